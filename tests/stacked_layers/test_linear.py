"""Wide linear layers of clients under `torch.vmap`: gradients lie in memory as the weights do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import fedtorch as ft
from fedtorch import random
from fedtorch.captured import capture
from fedtorch.stacked_layers import _linear, adapt

SHAPES = [(), (3,), (0,), (1,), (2, 3)]


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Small layers take the way of wide ones."""
    monkeypatch.setattr(_linear, "_WIDE", 0)


def drawn(number, *shape, dtype=torch.float64):
    return random.normal(random.key(number), shape, dtype).requires_grad_()


def tensors(shape=(3,), dtype=torch.float64):
    return drawn(1, 4, *shape, 5, dtype=dtype), drawn(2, 4, 6, 5, dtype=dtype), drawn(3, 4, 6, dtype=dtype)


def compared(together, alone, leaves, **tolerance):
    weights = drawn(9, *alone.shape, dtype=alone.dtype).detach()
    each = [torch.autograd.grad((o * weights).sum(), leaves, allow_unused=True) for o in (together, alone)]
    torch.testing.assert_close((together, *each[0]), (alone, *each[1]), **tolerance)
    return each[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_those_of_each_client(shape, dtype):
    x, weight, bias = leaves = tensors(shape, dtype)
    together = vmap(_linear.linear)(x, weight, bias)
    gradients = compared(together, torch.stack(list(map(F.linear, x, weight, bias))), leaves)
    assert gradients[1].is_contiguous()
    without = vmap(lambda x, w: _linear.linear(x, w, None))(x, weight)
    compared(without, torch.stack(list(map(F.linear, x, weight))), leaves[:2])


@pytest.mark.parametrize("dims", [(0, 0, None), (None, 0, 0), (0, None, 0), (0, None, None), (1, 2, 1)])
def test_what_clients_share_and_where_they_are(dims):
    parts = [t if d else t if d == 0 else t[0] for t, d in zip(tensors(), dims)]
    parts = [t.movedim(0, d) if d else t for t, d in zip(parts, dims)]
    each = [[t if d is None else t.select(d, k) for t, d in zip(parts, dims)] for k in range(4)]
    together = vmap(_linear.linear, in_dims=dims)(*parts)
    compared(together, torch.stack([F.linear(*client) for client in each]), parts)


def test_second_gradients_functional_ones_and_examples_inside():
    x, weight, bias = tensors()
    assert torch.autograd.gradgradcheck(vmap(_linear.linear), (x, weight, bias))
    loss = lambda w, x, b: _linear.linear(x, w, b).square().sum()
    inside = vmap(grad(loss))(weight, x, bias)
    torch.testing.assert_close(inside, torch.autograd.grad(vmap(loss)(weight, x, bias).sum(), weight)[0])
    rows = vmap(lambda x, w, b: vmap(lambda row: _linear.linear(row, w, b))(x))(x, weight, bias)
    compared(rows, torch.stack(list(map(F.linear, x, weight, bias))), [x, weight, bias])
    doubly = vmap(vmap(_linear.linear))(*(torch.stack([t, 2 * t]) for t in (x, weight, bias)))
    torch.testing.assert_close(doubly[0], torch.stack(list(map(F.linear, x, weight, bias))))


def test_modules_take_it_where_they_are_stacked():
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    adapt(net)
    assert type(net[0]) is _linear.StackedLinear
    named = {n: drawn(10 + i, 4, *p.shape) for i, (n, p) in enumerate(net.named_parameters())}
    x = drawn(5, 4, 3, 5)
    together = vmap(lambda t, x: functional_call(net, t, (x,)))(named, x)
    each = [functional_call(net, {n: p[k] for n, p in named.items()}, (x[k],)) for k in range(4)]
    compared(together, torch.stack(each), [*named.values(), x])


def test_captured_steps_have_it():
    x, weight, bias = (t.detach() for t in tensors())
    loss = lambda index, w, x, b: torch.autograd.grad(vmap(_linear.linear)(x, w.requires_grad_(), b).sum(), w)[0]
    torch.testing.assert_close(capture(loss, weight, x, bias)(weight, 2 * x, bias), 2 * loss(0, weight, x, bias))


def test_a_linear_model_takes_its_program_and_wide_ones_their_steps():
    x, y = drawn(6, 7, 3, dtype=torch.float32).detach(), random.randint(random.key(7), 2, (7,))
    data = ft.data.from_tensors([(x, y), (x[:4], y[:4])])
    made = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    runs = []
    for module in (nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2))):
        with torch.no_grad():
            [p.fill_(0.3) for p in module.parameters()]
        local = ft.gradient_descent(module, steps=3, batch_size=2, loss=F.cross_entropy, optimizer=made)
        runs.append(ft.run(ft.fedavg(local), ft.InProcess(data), rounds=2))
    torch.testing.assert_close(*(list(run.global_module().state_dict().values()) for run in runs))
