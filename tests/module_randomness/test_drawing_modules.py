"""Interception around the parts that draw gives what interception of everything gives, and touches no generator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fedtorch import random
from fedtorch.module_randomness.drawing_modules import DrawingModules
from fedtorch.module_randomness.interception import KeyedRandomness

KEYS, X = random.fold_in(random.key(3), torch.arange(3)), random.normal(random.key(4), (3, 4, 6), torch.float64)


@pytest.fixture(autouse=True)
def _untouched_generator():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


class Drawn(nn.Module):
    """Draws by a function, in its own `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training) + torch.rand_like(x)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[None], x[None], x[None])[0][0]


MODULES = {
    "dropout": lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.5)),
    "in place": lambda: nn.Sequential(nn.Softplus(), nn.Dropout(0.3, inplace=True)),
    "all dropped": lambda: nn.Sequential(nn.Dropout(0.3), nn.Dropout(1.0)),
    "alpha": lambda: nn.Sequential(nn.Tanh(), nn.AlphaDropout(0.3)),
    "twice the same": lambda: nn.Sequential(*[nn.Dropout(0.3)] * 2),
    "functions": lambda: nn.Sequential(nn.Tanh(), Drawn()),
    "attention": Attending,
}


def intercepted(drawing: DrawingModules, function, interception: KeyedRandomness) -> Tensor:
    def forward(_: int, context) -> Tensor:
        with context:
            return function()

    return drawing.drawn(forward, [interception])[0]


def observed(module: nn.Module) -> DrawingModules:
    drawing = DrawingModules(module)
    with drawing.observed(random.key(0)):
        module(X[0])
    return drawing


@pytest.mark.parametrize("name", MODULES)
def test_equals_interception_of_everything(name):
    with KeyedRandomness(random.key(1)):
        module = MODULES[name]()
    drawing = observed(module)
    assert drawing.parts
    assert not any(part is module or "forward" in vars(part) for part in drawing.parts)
    for function, keys, x in (
        (vmap(module, randomness="different"), KEYS, X),
        (module, KEYS[1], X[1]),
        (vmap(vmap(module, randomness="different"), randomness="different"), KEYS, X[:, :, None]),
        (vmap(module, randomness="different"), KEYS[1], X[1][:, None]),
        (vmap(grad(lambda x: module(x).square().sum()), randomness="different"), KEYS, X),
        (vmap(module, randomness="same"), KEYS[0], X),
    ):
        whole, some = x.clone().requires_grad_(), x.clone().requires_grad_()
        with KeyedRandomness(keys):
            expected = function(whole)
        got = intercepted(drawing, lambda f=function, x=some: f(x), KeyedRandomness(keys))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        (expected.square().sum() + got.square().sum()).backward()
        torch.testing.assert_close(some.grad, whole.grad, rtol=1e-14, atol=0)
    assert drawing.parts  # nothing was drawn elsewhere


def test_dropout_that_is_off_draws_nothing():
    module = nn.Sequential(nn.Dropout(0.3))
    drawing, draws = observed(module), KeyedRandomness(KEYS[0])
    module.eval()
    assert torch.equal(intercepted(drawing, lambda: module(X[0]), draws), X[0])
    assert draws.calls == 0


def test_other_parts_are_not_intercepted():
    modes = []

    class Watching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(torch._C._len_torch_dispatch_stack())
            return x

    module = nn.Sequential(Watching(), Drawn(), Watching())
    drawing = observed(module)
    modes.clear()
    intercepted(drawing, lambda: module(X[0]), KeyedRandomness(KEYS[0]))
    assert modes == [0, 0]


def test_draws_outside_of_all_parts_are_intercepted_with_everything():
    drawing = DrawingModules(nn.Dropout(0.3))
    with drawing.observed(random.key(0)):
        torch.rand_like(drawing.module(X[0]))
    assert drawing.parts is None


@pytest.mark.parametrize("keys", [KEYS, KEYS[1]])
def test_draws_that_begin_later_are_those_of_interception_of_everything(keys):
    module, x = nn.Sequential(nn.Tanh(), nn.Dropout(0.3)), X if keys.ndim else X[1]
    drawing = observed(module)
    later = lambda: torch.rand_like(x) * module(x)
    with KeyedRandomness(keys):
        expected = later()
    assert torch.equal(intercepted(drawing, later, KeyedRandomness(keys)), expected)
    assert drawing.parts is None  # who has drawn once elsewhere is intercepted everywhere from then on


def test_later_draws_that_are_not_supported_leave_the_generator():
    module = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))
    drawing = observed(module)
    drawn = lambda: module(X[0]) * torch.rand(4, 1) * torch.rand(4, 1, generator=torch.default_generator)
    with pytest.raises(NotImplementedError, match="explicit generator"):
        intercepted(drawing, drawn, KeyedRandomness(KEYS[0]))


def test_draws_of_backward_passes_have_a_key_of_their_own():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.rand_like(gradient)

    module = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))
    drawing = observed(module)

    def step(client: int, context) -> Tensor:
        x = X[client].clone().requires_grad_()
        with context:
            loss = Noisy.apply(module(x)).sum()
        return torch.autograd.grad(loss, x)[0]

    expected, later = [], random.fold_in(KEYS, 1)
    for client, key in enumerate(KEYS):
        with KeyedRandomness(later[client]):
            expected.append(step(client, KeyedRandomness(key)))
    for _ in range(2):
        got = drawing.drawn(step, [KeyedRandomness(key) for key in KEYS], later.unbind())
        assert torch.equal(torch.stack(got), torch.stack(expected))
    assert drawing.parts  # the forward pass draws where it is known to
