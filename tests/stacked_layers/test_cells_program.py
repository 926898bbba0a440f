"""The program of recurrent cells gives what the operations of torch give, up to rounding."""

from __future__ import annotations

import pytest
import torch

from fedtorch import random
from fedtorch.dispatch import choice, compiled
from fedtorch.stacked_layers import _cells, _cells_program

pytestmark = pytest.mark.skipif(compiled._compiler() is None, reason="needs a C compiler")
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 5e-6}, torch.float64: {"rtol": 1e-12, "atol": 1e-13}}


def drawn(number, *shape, dtype):
    return random.normal(random.key(number), shape, dtype)


def arguments(kind, dtype, clients, steps, rows, size):
    gates = {"lstm": 4, "gru": 3}[kind] * size
    states = [drawn(i, clients, rows, size, dtype=dtype).requires_grad_() for i in range(2 if kind == "lstm" else 1)]
    inputs = 2 * drawn(3, clients, steps, rows, 6, dtype=dtype)
    weights = [drawn(4 + i, clients, gates, width, dtype=dtype).mul_(0.5) for i, width in enumerate((6, size))]
    biases = [drawn(6 + i, clients, gates, dtype=dtype) for i in range(2)]
    return [inputs.requires_grad_(), states, *(t.requires_grad_() for t in (*weights, *biases))]


def results(kind, given, parts):
    """Return (values, gradients) by those of the results that a loss depends on."""
    values = getattr(_cells, kind)(*given)
    some = [values[i] for i in parts]
    weights = [drawn(20 + i, *value.shape, dtype=value.dtype) for i, value in zip(parts, some)]
    loss = sum((value * weight).sum() for value, weight in zip(some, weights))
    return [*values, *torch.autograd.grad(loss, [given[0], *given[1], *given[2:]], allow_unused=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(1, 1, 1, 1), (3, 4, 2, 5), (2, 3, 4, 32), (2, 1, 3, 16), (2, 3, 0, 4)])
@pytest.mark.parametrize(("kind", "parts"), [("gru", [0]), ("lstm", [0]), ("lstm", [2]), ("lstm", [0, 1, 2])])
def test_values_and_gradients(kind, parts, size, dtype, monkeypatch):
    given = arguments(kind, dtype, *size)
    assert _cells_program.library(given[0]) is not None
    by_program = results(kind, given, parts)
    monkeypatch.setenv(choice.VARIABLE, "off")
    torch.testing.assert_close(by_program, results(kind, given, parts), **TOLERANCE[dtype])


def test_large_gates_are_those_of_torch():
    added, zeros = torch.tensor([-300.0, -90.0, -1.0, 0.0, 1.0, 90.0, 300.0]), torch.zeros(1, 1, 7)
    outputs, cells, gates, _ = _cells._lstm(added.repeat(4)[None, None, None], zeros, zeros, torch.zeros(1, 28, 7))
    expected = [added.sigmoid(), added.sigmoid(), added.tanh(), added.sigmoid()]
    torch.testing.assert_close(gates.flatten(), torch.cat(expected), rtol=0, atol=2e-7)
    assert outputs.isfinite().all()
    assert cells.isfinite().all()


def test_clients_apart_in_memory_and_expanded_states():
    inputs, _, *weights = (
        t.detach() if isinstance(t, torch.Tensor) else t for t in arguments("lstm", torch.float32, 2, 3, 2, 8)
    )
    states = [torch.zeros(1, 1, 8).expand(2, 2, 8)] * 2
    spread = [torch.stack([t, t], -1)[..., 0] for t in (inputs, *weights)]
    torch.testing.assert_close(_cells.lstm(spread[0], states, *spread[1:]), _cells.lstm(inputs, states, *weights))


def test_other_dtypes_have_no_program_and_threads_share_the_clients(monkeypatch):
    given = arguments("gru", torch.float32, 4, 3, 64, 64)
    assert _cells_program.library(given[0].bfloat16()) is None
    assert _cells_program.library(given[0], given[0].double()) is None
    alone = results("gru", given, [0])
    monkeypatch.setattr(compiled, "ENOUGH", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    torch.testing.assert_close(results("gru", given, [0]), alone, rtol=0, atol=0)
