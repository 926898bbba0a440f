"""Max pooling of clients under `torch.vmap`: what torch gives of each alone, with the program and without."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from fedtorch import random
from fedtorch.captured import capture
from fedtorch.dispatch import compiled
from fedtorch.stacked_layers import _pooling

aten = torch.ops.aten


def drawn(number, *shape, dtype=torch.float64):
    return random.normal(random.key(number), shape, dtype)


WINDOWS = [  # size of planes, and arguments of the pooling
    ((8, 8), (2,)),
    ((7, 9), (2,)),
    ((28, 28), (2,)),
    ((4, 5), (2, 2, 0, 1, True)),
    ((6, 4), (2,)),
    ((9, 7), (3, 2, 1)),
    ((9, 12), (3, 2)),
    ((5, 6), ((2, 3), (1, 2), (1, 0))),
    ((11, 10), (3, 3, 1, 1, True)),
    ((9, 9), (2, 1, 1, 2)),
    ((3, 3), (3,)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "settings"), WINDOWS)
def test_values_and_gradients_are_those_of_each_client(size, settings, dtype, programs):
    x = drawn(1, 3, 2, 5, *size).to(dtype).mul_(2).round_().requires_grad_()  # with equal values in windows
    pool = lambda planes: F.max_pool2d(planes, *settings)
    together, alone = vmap(pool)(x), torch.stack([pool(client) for client in x])
    assert torch.equal(together, alone)
    weights = drawn(2, *alone.shape).to(dtype)
    gradients = [torch.autograd.grad((values * weights).sum(), x)[0] for values in (together, alone)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize("batch", [(), (0,), (1,), (4,)])
def test_clients_wherever_they_are_in_memory(batch, programs):
    x = drawn(3, *batch, 3, 8, 6, 2).movedim(-1, -4).requires_grad_()  # (..., K=2, C=3, 8, 6) once the batch is inside
    dim = x.ndim - 4
    outputs = vmap(lambda planes: F.max_pool2d(planes, 2), in_dims=dim)(x)
    assert torch.equal(outputs, torch.stack([F.max_pool2d(planes, 2) for planes in x.unbind(dim)]))
    (gradient,) = torch.autograd.grad(outputs.sum(), x)
    assert gradient.sum() == outputs.numel()
    convolved = drawn(4, 5, 2 * 3, 8, 6).unflatten(1, (2, 3))  # as a convolution in groups leaves its results
    outputs = vmap(lambda planes: F.max_pool2d(planes, 2), in_dims=1)(convolved)
    assert outputs.movedim(0, 1).is_contiguous()


def test_infinities_and_what_is_no_number_are_treated_as_by_torch(programs):
    x = drawn(5, 2, 1, 3, 8, 8, dtype=torch.float32)
    x[0, 0, 0, :4] = -torch.inf
    x[0, 0, 1, 2:5, ::3] = torch.nan
    x[1, 0, 2] = torch.inf
    for settings in ([2, 2], [2, 2], [0, 0]), ([3, 3], [2, 2], [1, 1]), ([3, 3], [2, 2], [0, 0]):
        values, places = _pooling._max_pool(x, *settings, False)
        expected, where = aten.max_pool2d_with_indices(x.flatten(0, 1), *settings)
        torch.testing.assert_close(values.flatten(0, 1), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(places.flatten(0, 1).long(), where)


def test_second_gradients_and_functional_ones(programs):
    x = drawn(6, 2, 1, 2, 6, 6).requires_grad_()
    pool = lambda planes: F.max_pool2d(planes, 2).square()
    assert torch.autograd.gradcheck(vmap(pool), x)
    assert torch.autograd.gradgradcheck(vmap(pool), x)
    inside = vmap(torch.func.grad(lambda planes: pool(planes).sum()))(x)
    torch.testing.assert_close(inside, torch.autograd.grad(vmap(pool)(x).sum(), x)[0])


def test_examples_inside_of_clients_and_shared_planes():
    x = drawn(7, 2, 5, 1, 6, 6)
    inner = vmap(vmap(lambda plane: F.max_pool2d(plane[None], 2)[0]))(x)
    assert torch.equal(inner, torch.stack([F.max_pool2d(client, 2) for client in x]))
    shared = vmap(lambda scale: F.max_pool2d(x[0], 2) * scale)(torch.ones(3))
    assert torch.equal(shared[2], F.max_pool2d(x[0], 2))


def test_errors_are_those_of_torch():
    with pytest.raises(RuntimeError, match="pad should be"):
        vmap(lambda planes: F.max_pool2d(planes, 2, 2, 2))(torch.ones(2, 1, 1, 4, 4))
    with pytest.raises(RuntimeError, match="too small"):
        vmap(lambda planes: F.max_pool2d(planes, 5))(torch.ones(2, 1, 1, 4, 4))
    with pytest.raises(RuntimeError):  # an assertion of torch's rule
        vmap(lambda planes: F.max_pool2d(planes, 2))(torch.ones(2, 4, 4))


def test_a_program_runs_where_there_is_a_compiler_and_in_captured_steps():
    x = drawn(8, 2, 1, 2, 8, 8, dtype=torch.float32)
    places = _pooling._max_pool(x, [2, 2], [2, 2], [0, 0], False)[1]
    assert places.dtype == (torch.int64 if compiled._compiler() is None else torch.int32)
    step = capture(lambda index, planes: vmap(lambda p: F.max_pool2d(p, 2))(planes), x)
    assert torch.equal(step(x + 1), vmap(lambda p: F.max_pool2d(p, 2))(x + 1))


def test_threads_share_the_planes(monkeypatch):
    x, seen = drawn(9, 4, 3, 5, 64, 64, dtype=torch.float32), []
    monkeypatch.setattr(torch, "get_num_threads", lambda: seen.append(1) or 3)
    assert torch.equal(vmap(lambda p: F.max_pool2d(p, 2))(x), F.max_pool2d(x.flatten(0, 1), 2).unflatten(0, (4, 3)))
    assert seen or compiled._compiler() is None
