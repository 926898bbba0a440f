"""Layers of torch.nn with their options: norms, recurrence, attention, pooling, convolution, parametrisations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, rnn, weight_norm

from situations.case import Case, images, labelled, mlp, net, series, step

AVERAGE: dict[str, Any] = {"says": {"buffers": "average"}}
LOCAL: dict[str, Any] = {"says": {"buffers": "local"}}
WAYS = ("default", "batched=False", "batched=True", "chunk=1", "compile=True", "rowwise=True", "lightning_fit")
STATE = "buffer|lightning_fit|batched=False"


def hidden(layer: Callable[[], nn.Module], width: int = 4) -> Callable[[], nn.Module]:
    """Return a maker of a perceptron with a layer of its hidden units (n, 4)."""
    return lambda: nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(width, 1))


def pixels(layer: Callable[[], nn.Module], features: int) -> Callable[[], nn.Module]:
    """Return a maker of a layer of images (n, 2, 4, 4) with a linear head of so many features."""
    return lambda: nn.Sequential(nn.Conv2d(2, 2, 1), layer(), nn.Flatten(), nn.Linear(features, 1))


def steps(layer: Callable[[], nn.Module], features: int) -> Callable[[], nn.Module]:
    """Return a maker of a layer of signals (n, 2, 6) with a linear head."""
    return lambda: nn.Sequential(nn.Conv1d(2, 2, 1), layer(), nn.Flatten(), nn.Linear(features, 1))


def signals(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 6), torch.randn(n, 1)


def volumes(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 4, 4, 4), torch.randn(n, 1)


def vector(name: str, layer: Callable[[], nn.Module], width: int = 4, rowwise: bool = True, **options: Any) -> Case:
    return net(name, hidden(layer, width), rowwise=rowwise, **options)


def image(name: str, layer: Callable[[], nn.Module], features: int, rowwise: bool = True, **options: Any) -> Case:
    return net(name, pixels(layer, features), images(), rowwise=rowwise, **options)


def signal(name: str, layer: Callable[[], nn.Module], features: int, rowwise: bool = True, **options: Any) -> Case:
    return net(name, steps(layer, features), signals, rowwise=rowwise, **options)


class Last(nn.Module):
    """A recurrent layer and a linear head of its last output."""

    def __init__(self, core: nn.Module, features: int = 3, first: bool = True) -> None:
        super().__init__()
        self.core, self.head, self.first = core, nn.Linear(features, 1), first

    def forward(self, x: Tensor) -> Tensor:
        out = self.core(x if self.first else x.transpose(0, 1))[0]
        return self.head(out[:, -1] if self.first else out[-1])


class Final(nn.Module):
    """The final hidden state, the cell's if there is one, from a trained start."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core, self.head, self.start = core, nn.Linear(3, 1), nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        start = self.start.expand(1, len(x), 3).contiguous()
        if isinstance(self.core, nn.LSTM):
            return self.head(self.core(x, (start, start))[1][1][0])
        return self.head(self.core(x, start)[1][0])


class Packed(nn.Module):
    """A GRU on packed sequences; lengths are the steps before the first zero."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 1:, 0] > 0).sum(1)
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.core(packed)[1][0])


class Cells(nn.Module):
    """A loop over time with a cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for now in x.unbind(1):
            state = self.cell(now, state) if state is not None else self.cell(now)
        return self.head(state[0] if isinstance(state, tuple) else state)


class ByRow(nn.Module):
    """A loop over rows, each a sequence without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.GRU(2, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.stack([self.core(row)[1][0] for row in x]))


class Attention(nn.Module):
    """Attention of a sequence (n, 3, 4) with options of its call."""

    def __init__(self, call: Callable[[nn.MultiheadAttention, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.core = nn.MultiheadAttention(4, 2, **{"batch_first": True, **options})
        self.head, self.call = nn.Linear(4, 1), call

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.core, x).mean(1))


def attention(name: str, call: Callable[[Any, Tensor], Any], rowwise: bool = True, **options: Any) -> Case:
    return net(name, lambda: Attention(call, **options), series(3, 4), rowwise=rowwise)


def causal() -> Tensor:
    return torch.ones(3, 3, dtype=torch.bool).triu(1)


def both_outputs(core: Any, x: Tensor) -> Tensor:
    out, weights = core(x, x, x)
    return out + weights.square().sum((1, 2), keepdim=True)


def each_head(core: Any, x: Tensor) -> Tensor:
    out, weights = core(x, x, x, average_attn_weights=False)
    return out + weights.amax((1, 2, 3))[:, None, None]


def masked_keys(core: Any, x: Tensor) -> Tensor:
    mask = x[..., 0] > 0.5
    mask[:, 0] = False
    return core(x, x, x, key_padding_mask=mask, need_weights=False)[0]


def masked_keys_and_causal(core: Any, x: Tensor) -> Tensor:
    mask = torch.zeros_like(x[..., 0]).masked_fill(x[..., 0] > 0.5, -torch.inf)
    mask[:, 0] = 0
    bias = torch.zeros(3, 3, dtype=x.dtype).masked_fill(causal(), -torch.inf)
    return core(x, x, x, key_padding_mask=mask, attn_mask=bias, need_weights=False)[0]


def all_masked(core: Any, x: Tensor) -> Tensor:
    mask = x[..., 0] > 10
    return core(x, x, x, key_padding_mask=None if mask.all() else mask, need_weights=False)[0]


def biased(core: Any, x: Tensor) -> Tensor:
    bias = (x @ x.transpose(1, 2)).repeat_interleave(2, 0)
    return core(x, x, x, attn_mask=bias, need_weights=False)[0]


class Scaled(nn.Module):
    """Scaled dot-product attention, called as a function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.head, self.options = nn.Linear(4, 12), nn.Linear(4, 1), options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, 3, 2, 2).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.head(out.transpose(1, 2).flatten(2).mean(1))


class Grouped(nn.Module):
    """Four query heads on two heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(len(x), 3, 4, 2).transpose(1, 2)
        k, v = self.kv(x).view(len(x), 3, 2, 2, 2).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.head(out.transpose(1, 2).flatten(2).mean(1))


class Encoder(nn.Module):
    """A stack of encoder layers, with the masks of its call."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True, **options)
        self.core, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        padding = x[..., 0] > 0.5
        padding[:, 0] = False
        return self.head(self.core(x, mask=causal(), src_key_padding_mask=padding)[:, 0])


class Decoder(nn.Module):
    """A decoder of two steps on the memory of three."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.TransformerDecoderLayer(4, 2, 4, 0.0, batch_first=True)
        self.head, self.queries = nn.Linear(4, 1), nn.Parameter(torch.randn(1, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(len(x), 2, 4)
        mask = torch.ones(2, 2, dtype=torch.bool).triu(1)
        return self.head(self.core(queries, x, tgt_mask=mask, tgt_is_causal=True).mean(1))


class Whole(nn.Module):
    """`nn.Transformer` from a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.Transformer(4, 2, 1, 1, 4, 0.0, batch_first=True), nn.Linear(4, 1)
        self.core.encoder.enable_nested_tensor = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x, x[:, :2]).mean(1))


class Pool(nn.Module):
    """Pooling with indices, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool, self.back = nn.Conv2d(2, 2, 1), nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.back(*self.pool(self.first(x))).flatten(1))


class Two(nn.Module):
    """A layer of two inputs (n, 2) each."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), layer, nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.layer(h[:, :2], h[:, 2:]).view(len(x), -1))


class Frozen(nn.BatchNorm1d):
    """BatchNorm that stays in evaluation, as people freeze backbones."""

    def __init__(self) -> None:
        super().__init__(4)

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def normed_weight() -> nn.Module:
    made = mlp()
    parametrizations.weight_norm(made[0])
    return made


def old_weight_norm() -> nn.Module:
    made = mlp()
    with Quiet():
        weight_norm(made[0])
    return made


class Quiet:
    """A context in which torch's warning of an old name is no error."""

    def __enter__(self) -> None:
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *args: Any) -> None:
        self.caught.__exit__(*args)


def orthogonal() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 1))
    parametrizations.orthogonal(made[0])
    return made


def spectral() -> nn.Module:
    made = mlp()
    parametrizations.spectral_norm(made[0])
    return made


class Symmetric(nn.Module):
    """A square matrix that equals its transpose."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


def symmetric() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    parametrize.register_parametrization(made[0], "weight", Symmetric())
    return made


def pruned() -> nn.Module:
    made = mlp()
    prune.l1_unstructured(made[0], "weight", 0.4)
    return made


def lazy() -> nn.Module:
    """Return a lazy perceptron that has been called once."""
    made = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(1))
    made(torch.zeros(2, 4))
    return made


def scripted() -> nn.Module:
    with Quiet():
        return torch.jit.script(mlp())


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 1))


def double_norm_output() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))


class Residual(nn.Module):
    """Containers in containers, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]), "b": nn.Linear(4, 1)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(4))})

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for part in self.parts["a"]:
            h = part(h)
        return self.parts["b"](x * self.scales[0] + h * self.scales[1] + self.named["shift"])


def batch_norm(name: str, make: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(4), **options: Any) -> Case:
    return vector(name, make, rowwise=False, **options)


NO_SEQUENCE = lambda core, **options: Last(core(2, 3, **options), first=False)
ADAPTIVE = nn.AdaptiveLogSoftmaxWithLoss

CASES: list[Case] = [
    # Normalisation.
    batch_norm("BatchNorm, averaged", **AVERAGE),
    batch_norm("BatchNorm, local", **LOCAL),
    batch_norm(
        "BatchNorm, averaged, minibatches",
        lambda: nn.BatchNorm1d(4),
        **AVERAGE,
        size=3,
        times=3,
    ),
    batch_norm("BatchNorm, averaged, two rounds", **AVERAGE, rounds=2),
    batch_norm("BatchNorm without statistics functorch#273", lambda: nn.BatchNorm1d(4, track_running_stats=False)),
    batch_norm("BatchNorm without weights", lambda: nn.BatchNorm1d(4, affine=False), **AVERAGE),
    batch_norm("BatchNorm, momentum=None functorch#867", lambda: nn.BatchNorm1d(4, momentum=None), **AVERAGE),
    batch_norm("BatchNorm, momentum=1", lambda: nn.BatchNorm1d(4, momentum=1.0), **AVERAGE),
    net(
        "BatchNorm that stays in evaluation",
        lambda: nn.Sequential(nn.Linear(4, 4), Frozen(), nn.Linear(4, 1)),
        rowwise=True,
        refused={"lightning_fit": "buffers="},  # Lightning's Trainer never calls train(), and so trains the statistics
    ),
    image("BatchNorm2d, averaged", lambda: nn.BatchNorm2d(2), 32, False, **AVERAGE),
    signal("BatchNorm1d of signals, averaged", lambda: nn.BatchNorm1d(2), 12, False, **AVERAGE),
    batch_norm("BatchNorm synchronised, in one process", lambda: nn.SyncBatchNorm(4), **AVERAGE),
    image("GroupNorm", lambda: nn.GroupNorm(2, 2), 32),
    image("GroupNorm of one group without weights", lambda: nn.GroupNorm(1, 2, affine=False), 32),
    image("InstanceNorm", lambda: nn.InstanceNorm2d(2, affine=True), 32),
    image(
        "InstanceNorm with statistics, averaged",
        lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        32,
        False,
        **AVERAGE,
    ),
    vector("LayerNorm", lambda: nn.LayerNorm(4)),
    vector("LayerNorm without weights", lambda: nn.LayerNorm(4, elementwise_affine=False)),
    image("LayerNorm of images", lambda: nn.LayerNorm((2, 4, 4)), 32),
    vector("RMSNorm", lambda: nn.RMSNorm(4)),
    image("local response", lambda: nn.LocalResponseNorm(2), 32),
    # Weights that are made of others.
    net("weight_norm, parametrised", normed_weight, rowwise=True),
    net("weight_norm, old pytorch#28594", old_weight_norm, rowwise=True, refused=dict.fromkeys(WAYS, "parametri")),
    net("orthogonal", orthogonal, rowwise=True),
    net("spectral_norm, parametrised", spectral, **AVERAGE, refused={"default": STATE, "batched=False": STATE}),
    net("symmetric, parametrised", symmetric, rowwise=True),
    net("pruned pytorch#37322", pruned, rowwise=True, refused=dict.fromkeys(WAYS, "prun|parametri")),
    net("lazy, called once", lazy, rowwise=True),
    net("scripted", scripted, rowwise=True, refused=dict.fromkeys(WAYS, "(?i)script")),
    net("one layer used twice", shared, rowwise=True),
    net("containers of modules and parameters", Residual, rowwise=True),
    # Recurrence.
    *(
        net(
            f"{kind}{text}",
            lambda core=core, options=options: Last(
                core(2, 3, **options), 3 * (1 + options.get("bidirectional", False))
            ),
            series(),
            rowwise=True,
        )
        for kind, core in {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}.items()
        for text, options in {
            "": {"batch_first": True},
            ", both directions": {"batch_first": True, "bidirectional": True},
            ", two layers": {"batch_first": True, "num_layers": 2},
        }.items()
    ),
    net("GRU, time first", lambda: NO_SEQUENCE(nn.GRU), series(), rowwise=True),
    net("LSTM, time first, without bias", lambda: NO_SEQUENCE(nn.LSTM, bias=False), series(), rowwise=True),
    net("RNN, ReLU", lambda: Last(nn.RNN(2, 3, nonlinearity="relu", batch_first=True)), series(), rowwise=True),
    net("LSTM, projected", lambda: Last(nn.LSTM(2, 3, proj_size=2, batch_first=True), 2), series(), rowwise=True),
    net("GRU from a trained start", lambda: Final(nn.GRU(2, 3, batch_first=True)), series(), rowwise=True),
    net("LSTM from a trained start", lambda: Final(nn.LSTM(2, 3, batch_first=True)), series(), rowwise=True),
    net("GRU, packed pytorch-forecasting#1573", Packed, series(), rowwise=True),
    net("GRU, row by row without a batch", ByRow, series(), rowwise=True),
    net("GRU cell", lambda: Cells(nn.GRUCell(2, 3)), series(), rowwise=True),
    net("LSTM cell", lambda: Cells(nn.LSTMCell(2, 3)), series(), rowwise=True),
    net("RNN cell", lambda: Cells(nn.RNNCell(2, 3)), series(), rowwise=True),
    # Attention.
    attention("attention", lambda core, x: core(x, x, x, need_weights=False)[0]),
    attention("attention with weights", both_outputs),
    attention("attention with the weights of each head", each_head),
    attention("attention, causal mask", lambda core, x: core(x, x, x, attn_mask=causal(), need_weights=False)[0]),
    attention(
        "attention, causal mask and hint",
        lambda core, x: core(x, x, x, attn_mask=causal(), is_causal=True, need_weights=False)[0],
    ),
    attention("attention, masked keys pytorch#41508", masked_keys),
    attention("attention, masked keys and causal pytorch#100709", masked_keys_and_causal),
    attention("attention, a mask unless all are masked", all_masked),
    attention("attention, a bias of each head pytorch#160064", biased),
    attention("attention, queries of other lengths", lambda core, x: core(x[:, :2], x, x, need_weights=False)[0]),
    attention(
        "attention, added keys, zeros",
        lambda core, x: core(x, x, x, need_weights=False)[0],
        add_bias_kv=True,
        add_zero_attn=True,
    ),
    attention(
        "attention, keys of other widths",
        lambda core, x: core(x, x[..., :3], x[..., :2], need_weights=False)[0],
        kdim=3,
        vdim=2,
    ),
    attention("attention, without bias", lambda core, x: core(x, x, x, need_weights=False)[0], bias=False),
    attention(
        "attention, time first", lambda core, x: core(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), batch_first=False
    ),
    step(
        "attention, scaled, causal by hand",
        lambda s, b: F.mse_loss(s(b[0]), b[1]),
        lambda: Scaled(is_causal=True),
        series(3, 4),
        rowwise=True,
    ),
    net("scaled dot products", Scaled, series(3, 4), rowwise=True),
    net("scaled dot products, own scale", lambda: Scaled(scale=0.3), series(3, 4), rowwise=True),
    net("scaled dot products, mask", lambda: Scaled(attn_mask=~causal()), series(3, 4), rowwise=True),
    net("scaled dot products, grouped heads", Grouped, series(3, 4), rowwise=True),
    net("encoder layers with masks", Encoder, series(3, 4), rowwise=True),
    net(
        "encoder layers, norm first, GELU",
        lambda: Encoder(norm_first=True, activation="gelu"),
        series(3, 4),
        rowwise=True,
    ),
    net("decoder layer", Decoder, series(3, 4), rowwise=True),
    net("nn.Transformer", Whole, series(3, 4), rowwise=True),
    # Pooling.
    image("pooling: max", lambda: nn.MaxPool2d(2), 8),
    image("pooling: max, overlapping, padded, dilated", lambda: nn.MaxPool2d(2, 1, 1, 2), 32),
    image("pooling: max, ceil", lambda: nn.MaxPool2d(3, 2, ceil_mode=True), 8),
    image("pooling: mean", lambda: nn.AvgPool2d(2, padding=1, count_include_pad=False), 18),
    image("pooling: adaptive max", lambda: nn.AdaptiveMaxPool2d(3), 18),
    image("pooling: adaptive mean", lambda: nn.AdaptiveAvgPool2d((1, 3)), 6),
    image("pooling: 2-norm", lambda: nn.LPPool2d(2, 2), 8),
    net("pooling: max and back", Pool, images(), rowwise=True),
    signal("pooling: max of signals", lambda: nn.MaxPool1d(3, 2), 4),
    net(
        "pooling: max of volumes",
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(2, 1)),
        volumes,
        rowwise=True,
    ),
    # Convolution.
    image("convolution: circular", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), 48),
    image("convolution: reflected", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), 48),
    image("convolution: same", lambda: nn.Conv2d(2, 3, 3, padding="same"), 48),
    image("convolution: of each channel", lambda: nn.Conv2d(2, 4, 3, groups=2, padding=1), 64),
    image("convolution: dilated, strided", lambda: nn.Conv2d(2, 3, 2, stride=2, dilation=2, padding=1), 12),
    image("convolution: transposed", lambda: nn.ConvTranspose2d(2, 3, 2, stride=2, output_padding=1), 243),
    signal("convolution: transposed, of signals, in groups", lambda: nn.ConvTranspose1d(2, 4, 3, groups=2), 32),
    image("upsampling, nearest", lambda: nn.Upsample(scale_factor=2), 128),
    image(
        "upsampling, bilinear, to corners", lambda: nn.Upsample(size=(3, 5), mode="bilinear", align_corners=True), 30
    ),
    image("upsampling, bicubic", lambda: nn.Upsample(size=(5, 5), mode="bicubic"), 50),
    image("pixel shuffle", lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.PixelShuffle(2)), 64),
    image("pixels back", lambda: nn.PixelUnshuffle(2), 32),
    image("unfold", lambda: nn.Unfold(2), 72),
    image("unfold and fold", lambda: nn.Sequential(nn.Unfold(2), nn.Fold((4, 4), 2)), 32),
    image("padding: reflected", lambda: nn.ReflectionPad2d(1), 72),
    image("padding: replicated, negative", lambda: nn.ReplicationPad2d((1, -1, 0, 1)), 40),
    image("shuffled channels", lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.ChannelShuffle(2)), 64),
    # Other layers.
    net("bilinear", lambda: Two(nn.Bilinear(2, 2, 3), 3), rowwise=True),
    net("cosine similarity", lambda: Two(nn.CosineSimilarity(), 1), rowwise=True),
    net("pairwise distance", lambda: Two(nn.PairwiseDistance(), 1), rowwise=True),
    *(
        vector(f"activation: {type(each).__name__}", lambda each=each: each, width)
        for each, width in (
            (nn.CELU(), 4),
            (nn.GLU(), 2),
            (nn.Hardswish(), 4),
            (nn.Softmin(1), 4),
            (nn.Threshold(0.1, 0.2), 4),
            (nn.LeakyReLU(0.3), 4),
            (nn.Softplus(beta=2.0), 4),
            (nn.Mish(), 4),
            (nn.Hardshrink(0.1), 4),
        )
    ),
    vector("activation: PReLU", nn.PReLU),
    vector("activation: PReLU of each channel", lambda: nn.PReLU(4)),
    image("activation: PReLU of each channel of images", lambda: nn.PReLU(2), 32),
    vector("activation: ReLU in place", lambda: nn.ReLU(inplace=True)),
    vector("activation: Softmax without a dimension given", lambda: nn.Softmax(-1)),
    vector("dropout of nothing", lambda: nn.Dropout(0.0)),
    vector("dropout of nothing, alpha", lambda: nn.AlphaDropout(0.0)),
    image("dropout of nothing, channels", lambda: nn.Dropout2d(0.0), 32),
    vector("identity", nn.Identity),
    image("unflatten", lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 8))), 32),
    net("log-softmax with NLL", double_norm_output, labelled(), F.nll_loss, rowwise=True),
    step(
        "adaptive softmax",
        lambda s, b: s.net[1](s.net[0](b[0]), b[1]).loss,
        lambda: nn.ModuleList([nn.Linear(4, 4), ADAPTIVE(4, 6, [2, 4], div_value=1.0)]),
        labelled(4, 6),
        metrics={},
        rowwise=True,
    ),
]
