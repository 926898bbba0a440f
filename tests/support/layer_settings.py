"""Layers and functions of torch in many settings, each with inputs of one client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIENTS = 3
DOUBLE = torch.float64


class Setting(NamedTuple):
    """A function of tensors, or a layer, and how to draw one client's inputs."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[Callable[[torch.Generator], Tensor], ...]


def normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """Normal numbers."""
    return lambda generator: torch.randn(shape, generator=generator, dtype=DOUBLE)


def positive(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """Numbers between 0.1 and 0.9."""
    return lambda generator: 0.1 + 0.8 * torch.rand(shape, generator=generator, dtype=DOUBLE)


def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.Generator], Tensor]:
    """Whole numbers below `high`, of which 0 and 1 stand among the first."""

    def draw(generator: torch.Generator) -> Tensor:
        values = torch.randint(high, shape, generator=generator)
        if len(shape) == 1 and shape[0] > 1 and high > 1:
            values[:2] = torch.tensor([0, 1])
        return values.to(dtype)

    return draw


def truths(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """Booleans, the first of each line True."""

    def draw(generator: torch.Generator) -> Tensor:
        values = torch.rand(shape, generator=generator) > 0.4
        values[..., 0] = True
        return values

    return draw


def signs(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """Numbers -1 and 1."""
    return lambda generator: 2.0 * torch.randint(2, shape, generator=generator).to(DOUBLE) - 1


def _losses() -> Iterator[Setting]:
    x, y = normal(4, 3), normal(4, 3)
    pairs: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "mse_loss": (F.mse_loss, (x, y)),
        "l1_loss": (F.l1_loss, (x, y)),
        "smooth_l1_loss": (F.smooth_l1_loss, (x, y)),
        "huber_loss": (F.huber_loss, (x, y)),
        "binary_cross_entropy": (F.binary_cross_entropy, (positive(4, 3), positive(4, 3))),
        "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, (x, positive(4, 3))),
        "poisson_nll_loss": (F.poisson_nll_loss, (x, positive(4, 3))),
        "gaussian_nll_loss": (F.gaussian_nll_loss, (x, y, positive(4, 3))),
        "kl_div": (F.kl_div, (x, positive(4, 3))),
        "soft_margin_loss": (lambda a, b, **o: F.soft_margin_loss(a, b.detach(), **o), (x, signs(4, 3))),
        "hinge_embedding_loss": (F.hinge_embedding_loss, (x, signs(4, 3))),
        "margin_ranking_loss": (F.margin_ranking_loss, (normal(4), normal(4), signs(4))),
        "cosine_embedding_loss": (F.cosine_embedding_loss, (x, y, signs(4))),
        "triplet_margin_loss": (F.triplet_margin_loss, (x, y, normal(4, 3))),
        "triplet_margin_with_distance_loss": (F.triplet_margin_with_distance_loss, (x, y, normal(4, 3))),
        "multilabel_soft_margin_loss": (F.multilabel_soft_margin_loss, (x, positive(4, 3))),
        "multi_margin_loss": (F.multi_margin_loss, (x, integers(3, 4))),
        "multilabel_margin_loss": (F.multilabel_margin_loss, (x, lambda g: torch.tensor([[0, 2, -1]] * 4))),
        "cross_entropy": (F.cross_entropy, (x, integers(3, 4))),
        "cross_entropy of probabilities": (F.cross_entropy, (x, positive(4, 3))),
        "cross_entropy of images": (F.cross_entropy, (normal(2, 3, 2, 2), integers(3, 2, 2, 2))),
        "nll_loss": (F.nll_loss, (x, integers(3, 4))),
        "nll_loss of images": (F.nll_loss, (normal(2, 3, 2, 2), integers(3, 2, 2, 2))),
    }
    for name, (loss, inputs) in pairs.items():
        for reduction in ("mean", "sum", "none"):
            yield Setting(f"{name}, {reduction}", lambda *a, f=loss, r=reduction: f(*a, reduction=r), inputs)
    weight = torch.tensor([0.5, 2.0, 1.5], dtype=DOUBLE)
    classes = {
        "weight": {"weight": weight},
        "label_smoothing": {"label_smoothing": 0.1},
        "ignore_index": {"ignore_index": 1},
        "weight and label_smoothing": {"weight": weight, "label_smoothing": 0.1},
        "weight and ignore_index": {"weight": weight, "ignore_index": 1},
        "all": {"weight": weight, "label_smoothing": 0.1, "ignore_index": 0},
    }
    for kind, options in classes.items():
        for reduction in ("mean", "sum", "none"):
            call = lambda *a, o=options, r=reduction: F.cross_entropy(*a, reduction=r, **o)
            yield Setting(f"cross_entropy, {kind}, {reduction}", call, (x, integers(3, 4)))
        yield Setting(
            f"cross_entropy of images, {kind}",
            lambda *a, o=options: F.cross_entropy(*a, **o),
            (normal(2, 3, 2, 2), integers(3, 2, 2, 2)),
        )
        if "ignore_index" not in options:
            call = lambda *a, o=options: F.cross_entropy(*a, **o)
            yield Setting(f"cross_entropy of probabilities, {kind}", call, (x, positive(4, 3)))
        yield Setting(
            f"cross_entropy of a row, {kind}",
            lambda *a, o=options: F.cross_entropy(*a, **o),
            (normal(3), lambda g: torch.tensor(2)),
        )
    own = lambda a, b, w: F.cross_entropy(a, b, weight=w.detach(), label_smoothing=0.1)
    yield Setting("cross_entropy, weights of each client", own, (x, integers(3, 4), positive(3)))
    for dtype in (torch.uint8, torch.int32, torch.int16):
        yield Setting(f"cross_entropy of {dtype}", F.cross_entropy, (x, integers(3, 4, dtype=dtype)))
        yield Setting(f"nll_loss of {dtype}", F.nll_loss, (x, integers(3, 4, dtype=dtype)))
    yield Setting("nll_loss, weight", lambda *a: F.nll_loss(*a, weight=weight), (x, integers(3, 4)))
    yield Setting("nll_loss, ignore_index", lambda *a: F.nll_loss(*a, ignore_index=1), (x, integers(3, 4)))
    pos = lambda *a: F.binary_cross_entropy_with_logits(*a, weight=weight, pos_weight=weight)
    yield Setting("binary_cross_entropy_with_logits, weights", pos, (x, positive(4, 3)))
    yield Setting(
        "binary_cross_entropy, weight",
        lambda *a: F.binary_cross_entropy(*a, weight=weight),
        (positive(4, 3), positive(4, 3)),
    )
    yield Setting("kl_div, batchmean", lambda *a: F.kl_div(*a, reduction="batchmean"), (x, positive(4, 3)))
    yield Setting("kl_div, log_target", lambda *a: F.kl_div(*a, reduction="sum", log_target=True), (x, normal(4, 3)))
    yield Setting(
        "poisson_nll_loss, full",
        lambda *a: F.poisson_nll_loss(*a, full=True, log_input=False),
        (positive(4, 3), lambda g: 3 * torch.rand(4, 3, generator=g, dtype=DOUBLE)),
    )
    yield Setting(
        "multi_margin_loss, weight", lambda *a: F.multi_margin_loss(*a, p=2, weight=weight), (x, integers(3, 4))
    )
    yield Setting(
        "ctc_loss",
        lambda p, t: F.ctc_loss(p.log_softmax(-1), 1 + t, torch.tensor([6, 6]), torch.tensor([3, 2])),
        (normal(6, 2, 5), integers(4, 2, 3)),
    )
    yield Setting("MSELoss", nn.MSELoss(), (x, y))


def _recurrent() -> Iterator[Setting]:
    options: dict[str, dict[str, Any]] = {
        "": {},
        "layers": {"num_layers": 2},
        "bidirectional": {"bidirectional": True, "batch_first": True},
        "no bias": {"bias": False, "num_layers": 2, "bidirectional": True},
    }
    kinds: dict[str, Any] = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
    for name, kind in kinds.items():
        for said, given in options.items():
            layer = kind(3, 4, **given)
            yield Setting(f"{name}, {said}", layer, (normal(2, 5, 3),))
            yield Setting(f"{name}, {said}, unbatched", layer, (normal(5, 3),))
            count = layer.num_layers * (2 if layer.bidirectional else 1)
            batch = 2 if layer.batch_first else 5
            if name == "LSTM":
                call = _WithStates(layer)
                yield Setting(
                    f"{name}, {said}, states", call, (normal(2, 5, 3), normal(count, batch, 4), normal(count, batch, 4))
                )
            else:
                yield Setting(f"{name}, {said}, state", layer, (normal(2, 5, 3), normal(count, batch, 4)))
        yield Setting(f"{name}, shared state", _SharedState(kind(3, 4)), (normal(2, 5, 3),))
        yield Setting(f"{name}, dropout of zero", kind(3, 4, num_layers=2, dropout=0.5).eval(), (normal(2, 5, 3),))
    yield Setting("RNN, relu", nn.RNN(3, 4, nonlinearity="relu"), (normal(2, 5, 3),))
    yield Setting("GRUCell", nn.GRUCell(3, 4), (normal(2, 3), normal(2, 4)))
    yield Setting("GRUCell, unbatched", nn.GRUCell(3, 4), (normal(3),))
    yield Setting("RNNCell", nn.RNNCell(3, 4), (normal(2, 3), normal(2, 4)))
    yield Setting("RNNCell, relu", nn.RNNCell(3, 4, nonlinearity="relu", bias=False), (normal(2, 3), normal(2, 4)))
    yield Setting("LSTMCell", nn.LSTMCell(3, 4), (normal(2, 3),))
    yield Setting("LSTMCell, states", _WithStates(nn.LSTMCell(3, 4)), (normal(2, 3), normal(2, 4), normal(2, 4)))


class _SharedState(nn.Module):
    """A recurrent layer whose first state is the same for all clients."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        state = torch.linspace(-1, 1, 5 * 4, dtype=DOUBLE).view(1, 5, 4)
        return self.layer(x, (state, state.cos()) if isinstance(self.layer, nn.LSTM) else state)


class _WithStates(nn.Module):
    """An LSTM with states as arguments."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return self.layer(x, (h, c))


def _attention() -> Iterator[Setting]:
    q, k, v = normal(2, 2, 4, 3), normal(2, 2, 5, 3), normal(2, 2, 5, 3)
    attend = F.scaled_dot_product_attention
    yield Setting("attention", attend, (q, k, v))
    yield Setting("attention, is_causal", lambda *a: attend(*a, is_causal=True), (q, q, q))
    yield Setting("attention, scale", lambda *a: attend(*a, scale=0.3), (q, k, v))
    yield Setting("attention, mask of truths", attend, (q, k, v, truths(4, 5)))
    yield Setting("attention, mask of each row", attend, (q, k, v, truths(2, 1, 4, 5)))
    yield Setting("attention, trained mask", attend, (q, k, v, normal(2, 4, 5)))
    shared = torch.ones(4, 5, dtype=torch.bool).tril(1)
    yield Setting("attention, shared mask", lambda *a: attend(*a, attn_mask=shared), (q, k, v))
    yield Setting("attention, shared numbers", lambda *a: attend(*a, attn_mask=shared.double()), (q, k, v))
    yield Setting("attention without batch", attend, (normal(4, 3), normal(5, 3), normal(5, 3)))
    yield Setting("attention of three dimensions", attend, (normal(2, 4, 3), normal(2, 5, 3), normal(2, 5, 3)))
    yield Setting(
        "attention of five dimensions", attend, (normal(2, 2, 2, 4, 3), normal(2, 2, 2, 5, 3), normal(2, 2, 2, 5, 3))
    )
    yield Setting("attention, grouped", lambda *a: attend(*a, enable_gqa=True), (normal(2, 4, 4, 3), k, v))
    yield Setting("attention, other values", attend, (q, k, normal(2, 2, 5, 6)))
    yield Setting(
        "attention, shared keys",
        lambda q: attend(q, q.new_ones(2, 2, 5, 3), torch.linspace(0, 1, 60, dtype=DOUBLE).view(2, 2, 5, 3)),
        (q,),
    )
    yield Setting("attention, long", attend, (normal(2, 2, 40, 8), normal(2, 2, 40, 8), normal(2, 2, 40, 8)))
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    padded = torch.tensor([[False] * 4, [False] * 3 + [True]])
    options: dict[str, dict[str, Any]] = {
        "": {},
        "no weights": {"need_weights": False},
        "mask": {"attn_mask": hidden, "need_weights": False},
        "mask and weights": {"attn_mask": hidden},
        "causal": {"attn_mask": hidden, "is_causal": True, "need_weights": False},
        "padding": {"key_padding_mask": padded, "need_weights": False},
        "padding and weights": {"key_padding_mask": padded, "average_attn_weights": False},
        "both": {"key_padding_mask": padded, "attn_mask": hidden, "need_weights": False},
    }
    for name, given in options.items():
        yield Setting(f"MultiheadAttention, {name}", _Attention(given), (normal(2, 4, 8),))
    layers: dict[str, nn.Module] = {
        "batch second": _Attention({"need_weights": False}, batch_first=False),
        "extended": _Attention({"need_weights": False}, add_bias_kv=True, add_zero_attn=True),
        "no bias": _Attention({"need_weights": False}, bias=False),
        "evaluation": _Attention({"need_weights": False}).eval(),
        "other sizes": _Attention({"need_weights": False}, kdim=8, vdim=8),
    }
    for name, layer in layers.items():
        yield Setting(f"MultiheadAttention, {name}", layer, (normal(2, 4, 8),))
    yield Setting("MultiheadAttention, unbatched", _Attention({"need_weights": False}), (normal(4, 8),))
    encoder: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
    yield Setting("TransformerEncoderLayer", nn.TransformerEncoderLayer(8, 2, 16, **encoder), (normal(2, 4, 8),))
    yield Setting(
        "TransformerEncoderLayer, first",
        nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, **encoder).eval(),
        (normal(2, 4, 8),),
    )
    yield Setting(
        "TransformerDecoderLayer", nn.TransformerDecoderLayer(8, 2, 16, **encoder), (normal(2, 4, 8), normal(2, 5, 8))
    )
    yield Setting("Transformer", nn.Transformer(8, 2, 1, 1, 16, **encoder), (normal(2, 4, 8), normal(2, 5, 8)))


class _Attention(nn.Module):
    """Attention of a sequence to itself, with options."""

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, **{"batch_first": True, **settings})
        self.options = options

    def forward(self, x: Tensor) -> Any:
        outputs, weights = self.layer(x, x, x, **self.options)
        return outputs if weights is None else (outputs, weights)


def _embeddings() -> Iterator[Setting]:
    words, table = integers(5, 6), normal(5, 3)
    tokens = lambda g: torch.tensor([[0, 1, 2], [3, 1, 1]])
    for padding in (None, 0, 1, -2):
        yield Setting(
            f"embedding, padding_idx={padding}",
            lambda w, t, p=padding: F.embedding(w, t, padding_idx=p),
            (words, table),
        )
        yield Setting(f"Embedding, padding_idx={padding}", nn.Embedding(5, 3, padding_idx=padding), (tokens,))
        for mode in ("sum", "mean", "max"):
            call = lambda w, t, p=padding, m=mode: F.embedding_bag(w, t, mode=m, padding_idx=p)
            yield Setting(f"embedding_bag, {mode}, padding_idx={padding}", call, (tokens, table))
    yield Setting("Embedding, scale_grad_by_freq", nn.Embedding(5, 3, scale_grad_by_freq=True), (tokens,))
    yield Setting("embedding, int32", F.embedding, (integers(5, 6, dtype=torch.int32), table))
    yield Setting("Embedding, max_norm", lambda w, t: F.embedding(w, t.clone(), max_norm=1.0), (words, table))
    offsets = torch.tensor([0, 2, 2])
    for mode in ("sum", "mean", "max"):
        yield Setting(
            f"embedding_bag, offsets, {mode}",
            lambda w, t, m=mode: F.embedding_bag(w, t, offsets, mode=m),
            (words, table),
        )
        yield Setting(
            f"embedding_bag, offsets and padding, {mode}",
            lambda w, t, m=mode: F.embedding_bag(w, t, offsets, mode=m, padding_idx=1),
            (words, table),
        )
        last = torch.tensor([0, 2, 2, 6])
        yield Setting(
            f"embedding_bag, last offset, {mode}",
            lambda w, t, m=mode, o=last: F.embedding_bag(w, t, o, mode=m, include_last_offset=True),
            (words, table),
        )
    yield Setting(
        "embedding_bag, weights",
        lambda w, t, p: F.embedding_bag(w, t, mode="sum", per_sample_weights=p),
        (tokens, table, positive(2, 3)),
    )
    yield Setting(
        "embedding_bag, weights and offsets",
        lambda w, t, p: F.embedding_bag(w, t, offsets, mode="sum", per_sample_weights=p, padding_idx=1),
        (words, table, positive(6)),
    )
    yield Setting("one_hot", lambda w: F.one_hot(w, 5), (words,))


def _pooling() -> Iterator[Setting]:
    line, plane, space = normal(2, 3, 9), normal(2, 3, 8, 7), normal(2, 3, 5, 6, 4)
    sizes = {1: line, 2: plane, 3: space}
    kinds: dict[str, Any] = {
        "max_pool": [((2,), {}), ((3, 2, 1), {}), ((2, 2, 0, 2, True), {}), ((3, 1, 0, 1), {"return_indices": True})],
        "avg_pool": [((2,), {}), ((3, 2, 1, True, False), {})],
        "adaptive_max_pool": [((2,), {}), ((3,), {"return_indices": True})],
        "adaptive_avg_pool": [((2,), {})],
        "lp_pool": [((2.0, 2), {})],
    }
    for dimensions, rows in sizes.items():
        for name, each in kinds.items():
            for arguments, options in each:
                call = getattr(F, f"{name}{dimensions}d")
                run = lambda x, f=call, a=arguments, o=options: f(x, *a, **o)
                yield Setting(f"{name}{dimensions}d, {arguments}, {options}", run, (rows,))
        unpool = getattr(F, f"max_unpool{dimensions}d")
        pool = getattr(F, f"max_pool{dimensions}d")
        yield Setting(
            f"max_unpool{dimensions}d", lambda x, p=pool, u=unpool: u(*p(x, 2, return_indices=True), 2), (rows,)
        )
    yield Setting("max_pool2d of one plane", lambda x: F.max_pool2d(x, 2), (normal(3, 8, 7),))
    yield Setting("max_pool2d of ties", lambda x: F.max_pool2d(x.round(), 2) * x[..., ::2, :6:2], (normal(2, 3, 8, 7),))
    yield Setting(
        "max_pool2d, channels last",
        lambda x: F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2),
        (plane,),
    )


def _layers() -> Iterator[Setting]:
    line, plane, space, rows = normal(2, 4, 9), normal(2, 4, 6, 5), normal(2, 4, 5, 4, 3), normal(5, 4)
    layers: dict[str, tuple[nn.Module, Any]] = {
        "Linear": (nn.Linear(4, 3), rows),
        "Linear of three dimensions": (nn.Linear(5, 3, bias=False), plane),
        "Linear, unbatched": (nn.Linear(4, 3), normal(4)),
        "Conv1d": (nn.Conv1d(4, 6, 3, padding="same", dilation=2, padding_mode="reflect"), line),
        "Conv1d, groups": (nn.Conv1d(4, 6, 3, 2, 1, groups=2), line),
        "Conv2d": (nn.Conv2d(4, 6, 3, padding=1), plane),
        "Conv2d, circular": (nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular"), plane),
        "Conv2d, unbatched": (nn.Conv2d(4, 6, 3, bias=False), normal(4, 6, 5)),
        "Conv3d": (nn.Conv3d(4, 2, 2), space),
        "ConvTranspose1d": (nn.ConvTranspose1d(4, 6, 3, 2, 1, 1), line),
        "ConvTranspose2d": (nn.ConvTranspose2d(4, 6, 3, groups=2), plane),
        "ConvTranspose3d": (nn.ConvTranspose3d(4, 2, 2), space),
        "LayerNorm": (nn.LayerNorm(4), rows),
        "RMSNorm": (nn.RMSNorm(4), rows),
        "GroupNorm": (nn.GroupNorm(2, 4), plane),
        "GroupNorm, no scales": (nn.GroupNorm(2, 4, affine=False), line),
        "GroupNorm of rows": (nn.GroupNorm(2, 4), rows),
        "InstanceNorm1d": (nn.InstanceNorm1d(4, affine=True), line),
        "InstanceNorm2d": (nn.InstanceNorm2d(4), plane),
        "BatchNorm1d": (nn.BatchNorm1d(4, track_running_stats=False), rows),
        "BatchNorm2d": (nn.BatchNorm2d(4, track_running_stats=False), plane),
        "BatchNorm2d, evaluation": (nn.BatchNorm2d(4).eval(), plane),
        "LocalResponseNorm": (nn.LocalResponseNorm(2), plane),
        "PReLU": (nn.PReLU(), rows),
        "PReLU of channels": (nn.PReLU(4), plane),
        "Bilinear": (nn.Bilinear(4, 4, 3), rows),
        "PixelShuffle": (nn.PixelShuffle(2), plane),
        "PixelUnshuffle": (nn.PixelUnshuffle(2), normal(2, 4, 6, 4)),
        "ChannelShuffle": (nn.ChannelShuffle(2), plane),
        "Upsample": (nn.Upsample(scale_factor=2), plane),
        "Upsample, bilinear": (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), plane),
        "Upsample, bicubic": (nn.Upsample(size=(7, 8), mode="bicubic"), plane),
        "Upsample, linear": (nn.Upsample(scale_factor=2, mode="linear"), line),
        "Upsample, trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), space),
        "Unfold": (nn.Unfold(2), plane),
        "Fold": (nn.Fold((3, 4), 2), normal(2, 16, 6)),
        "Softmax": (nn.Softmax(-1), rows),
        "Softmax2d": (nn.Softmax2d(), plane),
        "CosineSimilarity": (nn.CosineSimilarity(), rows),
        "PairwiseDistance": (nn.PairwiseDistance(), rows),
        "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 3, 2)), line),
        "weight_norm, dim 1": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3), dim=1), rows),
        "weight_norm, all": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3), dim=None), rows),
        "orthogonal": (nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), rows),
    }
    pairs = {"Bilinear", "CosineSimilarity", "PairwiseDistance"}
    for name, (layer, given) in layers.items():
        yield Setting(name, layer, (given, normal(5, 4)) if name in pairs else (given,))
    for name in ("Reflection", "Replication", "Zero", "Circular"):
        for dimensions, given in ((1, line), (2, plane), (3, space)):
            yield Setting(f"{name}Pad{dimensions}d", getattr(nn, f"{name}Pad{dimensions}d")(1), (given,))
    yield Setting("bilinear, unbatched", F.bilinear, (normal(3), normal(2), normal(4, 3, 2), normal(4)))
    channels = lambda x, w, b: F.group_norm(x.movedim(-1, 1), 2, w, b)
    yield Setting("group_norm, channels moved", channels, (normal(2, 6, 5, 4), normal(4), normal(4)))
    last = lambda x, w, b: F.group_norm(x.contiguous(memory_format=torch.channels_last), 2, w, b)
    yield Setting("group_norm, channels_last", last, (plane, normal(4), normal(4)))


def _functions() -> Iterator[Setting]:
    x = normal(4, 3)
    names = (
        "celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu "
        "sigmoid silu softplus softshrink softsign tanh tanhshrink rrelu normalize"
    )
    for name in names.split():
        run = getattr(F, name)
        yield Setting(name, run, (normal(4, 4) if name == "glu" else x,))
    for name in ("softmax", "log_softmax", "softmin"):
        yield Setting(name, partial(getattr(F, name), dim=-1), (x,))
    yield Setting("threshold", lambda x: F.threshold(x, 0.1, 20.0), (x,))
    yield Setting("relu, in place", lambda x: F.relu(x + 0, inplace=True), (x,))
    yield Setting("prelu", F.prelu, (normal(2, 4, 3), normal(4)))
    yield Setting("prelu, one slope", F.prelu, (normal(2, 4, 3), normal(1)))
    yield Setting("prelu, shared slope", lambda x: F.prelu(x, torch.tensor([0.3], dtype=DOUBLE)), (normal(2, 4, 3),))
    yield Setting("torch.prelu of a vector", torch.prelu, (normal(4), normal(1)))
    yield Setting("Tensor.prelu", lambda x, w: x.prelu(w), (normal(2, 4), normal(4)))
    yield Setting("layer_norm", lambda x, w, b: F.layer_norm(x, (3,), w, b), (x, normal(3), normal(3)))
    yield Setting(
        "grid_sample",
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        (normal(2, 3, 4, 4), normal(2, 3, 3, 2)),
    )
    yield Setting("affine_grid", lambda t: F.affine_grid(t, [2, 3, 4, 4], align_corners=False), (normal(2, 2, 3),))
    yield Setting("interpolate, area", lambda x: F.interpolate(x, (3, 2), mode="area"), (normal(2, 3, 6, 4),))
    yield Setting("pad", lambda x: F.pad(x, (1, 2), value=3.0), (x,))
    yield Setting("pdist", F.pdist, (x,))
    yield Setting("cdist", torch.cdist, (x, normal(5, 3)))
    yield Setting("cosine_similarity", F.cosine_similarity, (x, normal(4, 3)))
    yield Setting("pairwise_distance", F.pairwise_distance, (x, normal(4, 3)))
    yield Setting("bincount", lambda v: torch.bincount(v, minlength=5), (integers(5, 7),))
    yield Setting("bincount, weights", lambda v, w: v.bincount(w.detach(), minlength=5), (integers(5, 7), normal(7)))
    yield Setting("masked number", lambda x, m: _masked(x, m, 2.0), (x, truths(4, 3)))
    yield Setting("masked rows", lambda x, m: _masked(x, m, 2.0), (x, truths(4)))
    yield Setting("masked tensor", lambda x, m: _masked(x, m, torch.tensor(2.0, dtype=DOUBLE)), (x, truths(4, 3)))
    yield Setting("masked number of each", lambda x, m, v: _masked(x, m, v), (x, truths(4, 3), normal()))
    yield Setting("masked by condition", lambda x: _masked(x, x > 0, 1.0), (x,))
    yield Setting("masked_fill", lambda x, m: x.masked_fill(m, -1.0), (x, truths(4, 3)))
    yield Setting("index by integers", lambda x, i: x[i], (x, integers(4, 5)))
    yield Setting("index_put", lambda x, i: _put(x, i), (x, lambda g: torch.tensor([0, 2])))
    yield Setting("scatter_add", lambda x, i: torch.zeros(3, 3, dtype=DOUBLE).index_add(0, i, x), (x, integers(3, 4)))
    yield Setting("logcumsumexp", lambda x: x.logcumsumexp(-1), (x,))
    yield Setting("cumprod", lambda x: x.cumprod(-1), (x,))
    yield Setting("median", lambda x: x.median(-1).values, (x,))
    yield Setting("sort", lambda x: x.sort(-1).values, (x,))
    yield Setting("topk", lambda x: x.topk(2).values, (x,))
    yield Setting("cholesky", lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4, dtype=DOUBLE)), (x,))
    yield Setting("solve", lambda x, y: torch.linalg.solve(x @ x.mT + torch.eye(4, dtype=DOUBLE), y), (x, normal(4, 2)))
    yield Setting("det", lambda x: (x @ x.mT + torch.eye(4, dtype=DOUBLE)).logdet(), (x,))
    yield Setting(
        "stft",
        lambda x: torch.stft(x, 8, 4, window=torch.ones(8, dtype=DOUBLE), return_complex=True).abs(),
        (normal(2, 32),),
    )
    yield Setting("fft", lambda x: torch.fft.rfft(x).abs(), (x,))
    yield Setting("einsum", lambda x, y: torch.einsum("ni,nj->ij", x, y), (x, normal(4, 2)))
    yield Setting("searchsorted", lambda x, y: torch.searchsorted(x.sort(-1).values, y), (x, normal(4, 2)))
    yield Setting("logsumexp", lambda x: x.logsumexp(0), (x,))
    yield Setting("baddbmm", torch.baddbmm, (normal(2, 3, 4), normal(2, 3, 5), normal(2, 5, 4)))
    yield Setting("tensordot", lambda x, y: torch.tensordot(x, y, dims=1), (x, normal(3, 2)))
    yield Setting("unfold", lambda x: x.unfold(1, 2, 1), (x,))
    yield Setting("cross", lambda x, y: torch.linalg.cross(x, y), (x, normal(4, 3)))
    yield Setting("renorm", lambda x: x.renorm(2, 0, 1.0), (x,))
    yield Setting("norm", lambda x: x.norm(dim=-1), (x,))
    yield Setting(
        "interpolate, nearest-exact",
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
        (normal(2, 3, 4),),
    )
    square = lambda x: x @ x.mT + torch.eye(x.shape[-2], dtype=DOUBLE)
    more: dict[str, Any] = {
        "amax": lambda x: x.amax(0),
        "argmax": lambda x: x.argmax(-1),
        "clamp_": lambda x: (x * 2).clamp_(-0.5, 0.5),
        "cov": torch.cov,
        "cummax": lambda x: x.cummax(0).values,
        "diag_embed": torch.diag_embed,
        "diff": torch.diff,
        "dist": lambda x: torch.dist(x, x.flip(0)),
        "eigh": lambda x: torch.linalg.eigvalsh(square(x)),
        "flip": lambda x: x.flip(0),
        "gather": lambda x: x.gather(-1, x.argsort(-1)[:, :2]),
        "index_copy": lambda x: x.index_copy(0, torch.tensor([1]), x[:1] * 3),
        "index_fill": lambda x: x.index_fill(0, torch.tensor([1]), 3.0),
        "inverse": lambda x: square(x).inverse(),
        "kron": lambda x: torch.kron(x, x[:2]),
        "kthvalue": lambda x: x.kthvalue(2, -1).values,
        "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
        "masked_scatter": lambda x: torch.where(x > 0, x, 0.0),
        "matrix_exp": lambda x: torch.linalg.matrix_exp(square(x) / 9),
        "nan_to_num": lambda x: (x / x.relu()).nan_to_num(0.0, 1.0, -1.0),
        "nanmean": lambda x: torch.where(x > 0, x, torch.nan).nanmean(0),
        "outer": lambda x: torch.outer(x[0], x[1]),
        "prod": lambda x: x.prod(0),
        "put": lambda x: (x * 2).index_put((torch.tensor([0, 0]),), x[:2], accumulate=True),
        "qr": lambda x: torch.linalg.qr(x).R.abs(),
        "quantile": lambda x: x.quantile(0.3, 0),
        "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
        "roll": lambda x: x.roll(1, 0),
        "scatter_reduce": lambda x: torch.zeros(2, 3, dtype=DOUBLE).scatter_reduce(0, (x > 0).long(), x, "amax"),
        "slogdet": lambda x: torch.linalg.slogdet(square(x)).logabsdet,
        "std": lambda x: x.std(0),
        "svd": lambda x: torch.linalg.svdvals(x),
        "take": lambda x: torch.take(x, torch.tensor([0, 5])),
        "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(0), 0),
        "trace": lambda x: torch.trace(x),
        "trapezoid": lambda x: torch.trapezoid(x),
        "tril": lambda x: x.tril(),
        "triangular": lambda x: torch.linalg.solve_triangular(square(x).tril(), x, upper=False),
        "unflatten": lambda x: x.flatten().unflatten(0, (2, 6)),
        "var": lambda x: torch.var_mean(x, -1),
        "view_as_complex": lambda x: torch.view_as_complex(x[:, :2].contiguous()).abs(),
        "where": lambda x: torch.where(x > 0, x, -x),
        "xlogy": lambda x: torch.xlogy(x.abs(), x.abs()),
        "zero_": lambda x: (x * 1)[:1].zero_() + x,
        "functional gradient": torch.func.grad(lambda x: F.gelu(x).square().sum()),
        "functional gradient of attention": torch.func.grad(
            lambda x: (
                F.scaled_dot_product_attention(x[None, None], x.sin()[None, None], x.cos()[None, None]).square().sum()
            )
        ),
        "functional gradient of cross_entropy": torch.func.grad(
            lambda x: F.cross_entropy(x, torch.tensor([0, 2, 1, 1]))
        ),
        "functional gradient of pooling": torch.func.grad(lambda x: F.max_pool2d(x[None, None], 2).square().sum()),
        "attention by example": by_row(
            lambda row: F.scaled_dot_product_attention(
                row[None, None, None], row[None, None, None], row[None, None, None]
            )[0, 0, 0]
        ),
        "cross_entropy by example": by_row(lambda row: F.cross_entropy(row[None], torch.tensor([1]))),
        "pooling by example": by_row(lambda row: F.max_pool2d(row.expand(2, 3)[None, None], 2)),
    }
    for name, call in more.items():
        yield Setting(name, call, (x,))
    embed = lambda t, w: by_row(lambda token: F.embedding(token[None], w, padding_idx=1)[0])(t)
    yield Setting("embedding by example", embed, (integers(5, 6), normal(5, 3)))
    turned = lambda x, w, v: F.linear(torch.complex(x, x.cos()), torch.complex(w, v)).abs()
    yield Setting("linear of complex numbers", turned, (x, normal(2, 3), normal(2, 3)))
    half = lambda x, w, b: F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16()).double()
    yield Setting("linear in half precision", half, (normal(1, 1), normal(2, 1), normal(2)))
    affine = lambda x, w, b: by_row(lambda row: F.linear(row[None], w, b)[0])(x)
    yield Setting("linear by example", affine, (x, normal(2, 3), normal(2)))
    slope = lambda w, x: torch.func.grad(lambda w: F.linear(x, w).square().sum())(w)
    yield Setting("functional gradient of linear", slope, (normal(2, 3), x))
    for kind in (nn.GRU, nn.LSTM, nn.RNN):
        layer = kind(3, 4, dtype=DOUBLE)
        names = [name for name, _ in layer.named_parameters()]
        shapes = [normal(*p.shape) for p in layer.parameters()]

        def loss(weights: Any, x: Tensor, layer: nn.Module = layer, names: list[str] = names) -> Tensor:
            return torch.func.functional_call(layer, dict(zip(names, weights)), (x,))[0].square().sum()

        def grads(x: Tensor, *weights: Tensor, loss: Any = loss) -> Any:
            return torch.func.grad(loss)(weights, x)

        def each(x: Tensor, *weights: Tensor, loss: Any = loss) -> Any:
            return by_row(lambda row: loss(weights, row[:, None]))(x.transpose(0, 1))

        def both(x: Tensor, *weights: Tensor, loss: Any = loss) -> Any:
            return by_row(lambda row: torch.func.grad(loss)(weights, row[:, None]))(x.transpose(0, 1))

        name = kind.__name__
        yield Setting(f"functional gradient of {name}", grads, (normal(5, 2, 3), *shapes))
        yield Setting(f"{name} by example", each, (normal(5, 2, 3), *shapes))
        yield Setting(f"functional gradient of {name} by example", both, (normal(5, 2, 3), *shapes))


def by_row(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Map a function over rows: by `torch.vmap` within another one, and else by a loop."""

    def run(rows: Tensor) -> Any:
        if torch._C._functorch.is_batchedtensor(rows):
            return torch.vmap(function)(rows)
        results = [function(row) for row in rows]
        return torch.stack(results) if isinstance(results[0], Tensor) else [torch.stack(each) for each in zip(*results)]

    return run


def _masked(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    x = x * 2
    x[mask] = value
    return x * x


def _put(x: Tensor, at: Tensor) -> Tensor:
    x = x * 2
    x[at] = x[at] + 1
    return x


def settings() -> dict[str, Setting]:
    """All by name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        each = [*_losses(), *_recurrent(), *_attention(), *_embeddings(), *_pooling(), *_layers(), *_functions()]
    return {setting.name: setting for setting in each}
