"""Losses that are the means of their examples' are known from those that mix them, in every dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedtorch as ft
from fedtorch.trust import privacy


class Encoder(nn.Module):
    """Self-attention, whose keys' bias has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x.unflatten(-1, (4, 4)))
        h = h + F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h))
        return self.head(h.mean(-2))


class Transformer(nn.Module):
    """A layer of PyTorch's own on two tokens of eight numbers, by products: the fused kernel does not stack."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.layer(x.unflatten(-1, (2, 8))).flatten(1)[:, :3]


class Images(nn.Module):
    """A convolution whose bias the norm of each channel takes away again."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), norm(), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.unflatten(-1, (1, 4, 4)))


class Between(nn.Module):
    """Two linear layers, and something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], zero_head: bool = False) -> None:
        super().__init__()
        self.inner, self.between, self.head = nn.Linear(16, 8), between, nn.Linear(8, 3)
        if zero_head:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.inner(x)))


class Single(nn.Module):
    """Products in float32 and float64, whatever the module's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(16, 3), dtype

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(x.to(self.dtype), self.layer.weight.to(self.dtype)).to(x.dtype)
        return inner + self.layer.bias


class Only32(nn.Module):
    """What cannot be changed to float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fixed = nn.Linear(16, 8), torch.linspace(-1, 1, 24).reshape(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) @ self.fixed


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Each example against all of the batch."""
    unit = F.normalize(output, dim=1)
    return F.cross_entropy(unit @ unit.mT, torch.arange(len(unit)))


def over_the_batch(h: Tensor) -> Tensor:
    return (h - h.mean(0)) / (1 + h.var(0, unbiased=False)).sqrt()


SEPARABLE = {
    "attention": Encoder,
    "a layer of a Transformer": Transformer,
    "a norm of each channel": lambda: Images(lambda: nn.GroupNorm(4, 4)),
    "a norm of each image": lambda: Images(lambda: nn.GroupNorm(1, 4)),
    "InstanceNorm": lambda: Images(lambda: nn.InstanceNorm2d(4, affine=True)),
    "LayerNorm": lambda: Between(nn.LayerNorm(8)),
    "dropout": lambda: Between(nn.Dropout()),
    "a head of zeros": lambda: Between(torch.tanh, zero_head=True),
    "linear": lambda: nn.Linear(16, 3),
}
MIXING = {
    "the batch's mean and variance": lambda: Between(over_the_batch),
    "its mean, behind a head of zeros": lambda: Between(lambda h: torch.tanh(h - h.mean(0)), zero_head=True),
    "its standard deviation, which one alone has not": lambda: Between(lambda h: h / h.std(0)),
    "attention between examples": lambda: Between(lambda h: F.scaled_dot_product_attention(h, h, h)),
    "batch norm without a module": lambda: Between(lambda h: F.batch_norm(h, None, None, training=True)),
    "one float32 more": lambda: nn.Sequential(Between(over_the_batch), nn.Linear(3, 16), Only32()),
}


def begin(module: Callable[[], nn.Module], dtype: torch.dtype, loss: Callable = F.cross_entropy, ghost=False) -> ft.Run:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(n, 16, generator=generator).to(dtype), torch.arange(n) % 3) for n in (20, 9)]
    local = privacy.example_level(
        module().to(dtype), clip=1.0, noise=1.0, sampling_rate=0.5, steps=1, delta=1e-3, loss=loss, ghost=ghost,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    return ft.Run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SEPARABLE)
def test_losses_that_do_not_mix_examples_train(name: str, dtype: torch.dtype) -> None:
    run = begin(SEPARABLE[name], dtype)
    run.step()
    assert all(leaf.dtype == dtype and bool(leaf.isfinite().all()) for leaf in run.server.values())


@pytest.mark.parametrize("inside", [torch.bfloat16, torch.float32])
def test_modules_that_compute_in_a_dtype_of_their_own_train(inside: torch.dtype) -> None:
    for dtype in (torch.float64, torch.float32):
        begin(lambda: Single(inside), dtype).step()
    begin(Only32, torch.float32).step()
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), reduction="sum")
    begin(Only32, torch.float32, lambda output, y: weighted(output, y) / len(y)).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXING)
def test_losses_that_mix_examples_are_refused(name: str, dtype: torch.dtype) -> None:
    if name == "one float32 more" and dtype != torch.float32:
        pytest.skip("it runs in float32 only")
    with pytest.raises(ValueError, match="Expected a loss that is the mean of its examples' losses"):
        begin(MIXING[name], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("loss", "said"), [
    (contrastive, "the loss of a batch mixes them"),
    (lambda o, y: F.cross_entropy(o, y).sqrt(), "the loss of a batch mixes them"),
    (lambda o, y: F.cross_entropy(o, y, reduction="none").sum(), "the loss of a batch is their sum"),
    (lambda o, y: F.cross_entropy(o, y, reduction="sum"), "cross_entropy adds .*reduction='sum'.*reduction='mean'"),
    (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), "cross_entropy divides by .*class weights"),
    (lambda o, y: F.nll_loss(o.log_softmax(1), y, torch.arange(1, 4).to(o)), "nll_loss divides by .*class weights"),
], ids=["contrastive", "root", "sum", "reduction", "weights", "weights of nll"])  # fmt: skip
def test_losses_of_batches_are_refused_by_what_is_at_fault(loss: Callable, said: str, dtype: torch.dtype) -> None:
    if isinstance(loss, nn.Module):
        loss = loss.to(dtype)
    with pytest.raises(ValueError, match=said) as caught:
        begin(lambda: nn.Linear(16, 3), dtype, loss)
    assert "LayerNorm" not in str(caught.value)


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(4), lambda: nn.BatchNorm2d(4, track_running_stats=False)])
def test_batch_norms_are_refused_by_name(norm: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match="BatchNorm2d mixes"):
        begin(lambda: Images(norm), torch.float32)


def test_rows_whose_gradients_are_not_finite_do_not_count() -> None:
    """They have no share in sums; the others still tell whether examples are mixed."""
    far = lambda output, y: ((output[:, 0] - torch.where(y == 1, torch.inf, 0.0)).square()).mean()
    begin(lambda: nn.Linear(16, 3), torch.float32, far)
    with pytest.raises(ValueError, match="mixes them"):
        begin(MIXING["the batch's mean and variance"], torch.float32, far)
