"""Full-batch gradient steps in closed form by the program in C are those of torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.programs import reference
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.dispatch import choice, compiled
from fedtorch.federation.algorithm import Quadratic
from fedtorch.kernels.programs import gradient_steps

pytestmark = pytest.mark.skipif(compiled._compiler() is None, reason="needs a C compiler")
KEY = random.key(3)


@pytest.fixture(autouse=True)
def _by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "on")


def normal(seed: int, *shape: int) -> Tensor:
    return random.normal(random.fold_in(KEY, seed), shape, torch.float64)


def problem(clients: int, features: int, outputs: int, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """A module's parameters of every client, their rows, ragged, one client with none, and a quadratic."""
    rows = torch.tensor([(3 * k) % 7 for k in range(clients)])
    x, y = (normal(5 + i, int(rows.sum()), size).to(dtype) for i, size in enumerate((features, outputs)))
    data = ft.data.FederatedData((x, y), rows, allow_empty=True)
    module = nn.Linear(features, outputs, dtype=dtype)
    start = {"weight": normal(7, clients, outputs, features).to(dtype), "bias": normal(8, clients, outputs).to(dtype)}
    shift = {name: normal(9 + i, *leaf.shape).to(dtype) for i, (name, leaf) in enumerate(start.items())}
    return module, data, start, Quadratic(normal(11, clients).square().to(dtype), shift)


def solved(local: Any, data: Any, start: Any, quadratic: Any) -> Any:
    with torch.no_grad():
        return local.solve(start, local.init(start), local.prepare(data), quadratic, ft.Turn(KEY, 0))


@pytest.mark.parametrize(("clients", "features", "outputs"), [(5, 4, 1), (9, 8, 3), (1, 1, 1), (2, 19, 2)])
@pytest.mark.parametrize("steps", [1, 2, 3, 20, 1000])
@pytest.mark.parametrize("lr", [None, 0.01])
@pytest.mark.filterwarnings("ignore:Expected columns of rank")
def test_the_program_is_the_reference(
    lr: float | None, steps: int, clients: int, features: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, data, start, quadratic = problem(clients, features, outputs)
    local, block = ft.least_squares(module, steps=steps, lr=lr), data.stack(range(clients))
    called: list[int] = []
    original = gradient_steps.descended
    monkeypatch.setattr(gradient_steps, "descended", lambda *a: called.append(1) or original(*a))
    for added in (None, quadratic):
        found = solved(local, block, start, added)
        assert called.pop()
        with reference():
            wanted = solved(local, block, start, added)
        assert not called
        for one, other in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Expected columns of rank")
def test_a_client_does_not_see_the_others_nor_threads() -> None:
    """The same bits alone and among others, and in two threads."""
    module, data, start, quadratic = problem(40, 6, 2)
    local = ft.least_squares(module, steps=7)
    together = solved(local, data.stack(range(40)), start, quadratic)
    prepared = local.prepare(data.stack(range(40)))
    for client in (0, 3, 39):
        rows = slice(client, client + 1)
        added = Quadratic(quadratic.precision[rows], tree.take(quadratic.shift, rows))
        alone = local.solve(tree.take(start, rows), None, tree.take(prepared, rows), added, ft.Turn(KEY, 0))
        assert torch.equal(alone.parameters["weight"][0], together.parameters["weight"][client])
        assert torch.equal(alone.info["loss"][0], together.info["loss"][client])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        many = tree.map(lambda leaf: leaf.repeat(100, *[1] * (leaf.ndim - 1)), (start, prepared, quadratic))
        found = local.solve(many[0], None, many[1], many[2], ft.Turn(KEY, 0))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found.parameters["weight"], together.parameters["weight"].repeat(100, 1, 1))


def test_no_clients_single_precision_and_numbers_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    module, data, start, _ = problem(3, 2, 1, torch.float32)
    local, block = ft.least_squares(module, steps=3), data.stack(range(3))
    found = solved(local, block, start, None)
    with reference():
        wanted = solved(local, block, start, None)
    torch.testing.assert_close(found.parameters, wanted.parameters, rtol=1e-6, atol=1e-7)
    assert found.parameters["weight"].dtype == torch.float32
    prepared, nobody = local.prepare(block), slice(0, 0)
    none = local.solve(tree.take(start, nobody), None, tree.take(prepared, nobody), None, ft.Turn(KEY, 0))
    assert none.parameters["weight"].shape == (0, 1, 2)
    start["weight"][1] = torch.nan
    lost = solved(local, block, start, None)
    assert lost.parameters["weight"][1].isnan().all()
    assert lost.info["loss"][1].isnan()
    assert lost.parameters["weight"][0].isfinite().all()
    each = Quadratic({"weight": torch.ones(3, 1, 2), "bias": torch.ones(3, 1)}, tree.zeros_like(start))
    monkeypatch.setattr(gradient_steps, "descended", lambda *a: pytest.fail("it knows one precision a client"))
    solved(local, block, tree.zeros_like(start), each)
