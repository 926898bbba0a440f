"""Layers and functions of torch in many settings: stacked clients get the values and gradients that a loop gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.layer_settings import Setting, settings
from torch import Tensor, nn

from fedtorch.stacked_layers import StackedOperations, WithoutReading

SETTINGS = settings()
# Right by torch's own way, which evaluates one client at a time.
ONE_BY_ONE = {
    "Embedding, max_norm",
    "ctc_loss",
    "interpolate, nearest-exact",
    "quantile",
    "renorm",
    "stft",
    "take",
}
# Of what torch.vmap alone gives no error but other gradients: why the mode exists.
WRONG = {
    "embedding by example",
    *(f"{kind}, padding_idx={at}" for kind in ("embedding", "Embedding") for at in (0, 1, -2)),
}


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [leaf for each in results for leaf in flat(each)]


def drawn(setting: Setting, clients: int) -> tuple[Callable[..., list[Tensor]], list[Tensor]]:
    """Return a function of one client's tensors, and those of all clients, each with other numbers."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.stack([draw(generator) for _ in range(clients)]) for draw in setting.inputs]
    layer = setting.call.double() if isinstance(setting.call, nn.Module) else None
    named = [] if layer is None else list(layer.named_parameters())
    shapes = [(clients, *parameter.shape) for _, parameter in named]
    inputs += [torch.randn(shape, generator=generator, dtype=torch.float64).mul_(0.5) for shape in shapes]

    def call(*tensors: Tensor) -> list[Tensor]:
        if layer is None:
            return flat(setting.call(*tensors))
        count = len(setting.inputs)
        weights = {name: tensor for (name, _), tensor in zip(named, tensors[count:])}
        return flat(torch.func.functional_call(layer, weights, tensors[:count]))

    return call, [each.requires_grad_() if each.is_floating_point() else each for each in inputs]


def gradients(outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    parts = [
        (each * torch.arange(each.numel(), dtype=torch.float64).view_as(each).cos()).sum()
        for each in outputs
        if each.requires_grad
    ]
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    return list(torch.autograd.grad(sum(parts), leaves, allow_unused=True)) if parts and leaves else []


def by_loop(call: Callable[..., list[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(each) for each in zip(*(call(*client) for client in zip(*(t.unbind() for t in tensors))))]


def close(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> None:
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("name", SETTINGS)
def test_stacked_clients_get_what_a_loop_gives(name: str) -> None:
    call, tensors = drawn(SETTINGS[name], 3)
    mapped = torch.vmap(lambda *each: tuple(call(*each)), randomness="different")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "reduction: 'mean' divides")
        if name in ONE_BY_ONE:
            warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            alone = by_loop(call, tensors)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)), StackedOperations():
                mapped(*tensors)
            return
        with StackedOperations():
            together = mapped(*tensors)
        close(together, alone)
        if name != "functional gradient of attention":  # the fused kernel has no second derivative
            close(gradients(together, tensors), gradients(alone, tensors))


# Nested calls of `vmap` do not read values.
READING = {f"gaussian_nll_loss, {reduction}" for reduction in ("mean", "sum", "none")}
WHOLE = {"argmax", "bincount", "one_hot", "searchsorted"}  # numbers that have no gradient
BY_EXAMPLE = [name for name in SETTINGS if "example" not in name and "functional" not in name and "half" not in name]


@pytest.mark.parametrize("name", [name for name in BY_EXAMPLE if name not in READING | WHOLE])
def test_gradients_of_examples_within_clients(name: str) -> None:
    """As private training takes them, of weights that a client's examples share."""
    call, tensors = drawn(SETTINGS[name], 2)
    count = len(SETTINGS[name].inputs)
    weights = [tensor.detach() for tensor in tensors[count:]]
    examples = [torch.stack([t.detach(), t.detach().flip(0)], 1) for t in tensors[:count]]  # (K, 2, ...)
    real = [i for i, tensor in enumerate(examples) if tensor.is_floating_point()]

    def loss(trained: Sequence[Tensor], *rows: Tensor) -> Any:
        given = list(rows)
        for at, value in zip(real, trained[len(weights) :]):
            given[at] = value
        parts = [
            (each.square() * torch.arange(each.numel(), dtype=torch.float64).view_as(each).cos()).sum()
            for each in call(*given, *trained[: len(weights)])
            if each.dtype == torch.float64
        ]
        return sum(parts)

    def alone(client: int, example: int) -> list[Tensor]:
        rows = [tensor[client, example] for tensor in examples]
        trained = [w[client].clone().requires_grad_() for w in weights]
        trained += [rows[at].clone().requires_grad_() for at in real]
        found = torch.autograd.grad(loss(trained, *rows), trained, allow_unused=True)
        return [torch.zeros_like(t) if slope is None else slope for t, slope in zip(trained, found)]

    def each(weights: Sequence[Tensor], *rows: Tensor) -> list[Tensor]:
        gradient = torch.func.grad(lambda trained: loss(trained, *rows))
        return list(gradient([*weights, *(rows[at] for at in real)]))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "reduction: 'mean' divides|There is a performance drop")
        try:
            expected = [[alone(client, example) for example in range(2)] for client in range(2)]
        except (RuntimeError, IndexError):  # which torch refuses a client alone, too
            return
        with WithoutReading():
            inner = torch.vmap(each, (None, *(0 for _ in examples)), randomness="different")
            found = torch.vmap(inner, randomness="different")(weights, *examples)
    for at, stacked in enumerate(found):
        close([stacked], [torch.stack([torch.stack([one[at] for one in row]) for row in expected])])


@pytest.mark.parametrize("name", sorted(WRONG))
def test_torch_alone_gives_other_gradients(name: str) -> None:
    call, tensors = drawn(SETTINGS[name], 3)
    together = torch.vmap(lambda *each: tuple(call(*each)))(*tensors)
    alone = by_loop(call, tensors)
    close(together, alone)
    with pytest.raises(AssertionError):
        close(gradients(together, tensors), gradients(alone, tensors))


SECOND = (
    "GRU, bidirectional, state",
    "LSTM, bidirectional, states",
    "RNN, layers, state",
    "RNN, relu",
    "Linear of three dimensions",
    "attention, trained mask",
    "cross_entropy, weight, mean",
    "cross_entropy, all, mean",
    "max_pool2d, (2,), {}",
    "embedding, padding_idx=1",
)


@pytest.mark.parametrize("name", SECOND)
def test_gradients_of_gradients_are_those_of_a_loop(name: str) -> None:
    call, tensors = drawn(SETTINGS[name], 3)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    with WithoutReading():
        together = torch.vmap(lambda *each: tuple(call(*each)))(*tensors)
    found = []
    for each in (together, by_loop(call, tensors)):
        loss = sum(part.square().sum() for part in each)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(slope.square().sum() for slope in first), leaves))
    close(*found)


def test_attention_s_gradients_of_gradients_are_numerically_right() -> None:
    """The CPU's fused kernel has none for a client alone."""
    rows = torch.randn(2, 1, 1, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    attend = lambda x: torch.nn.functional.scaled_dot_product_attention(x, x.sin(), x.cos())

    def stacked(x: Tensor) -> Tensor:
        with WithoutReading():
            return torch.vmap(attend)(x)

    assert torch.autograd.gradcheck(stacked, rows)
    assert torch.autograd.gradgradcheck(stacked, rows)
