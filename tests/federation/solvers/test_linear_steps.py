"""Steps of linear heads by a loop of few products: what stacked steps with autograd give, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.solvers._linear_steps import LinearSteps
from fedtorch.federation.solvers.batches import Batches
from fedtorch.kernels.glm_steps import CATEGORICAL, glm_loop

LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "gaussian": (F.mse_loss, lambda: ft.LinearHead(3), lambda eta: eta + 0.5),
    "bernoulli": (F.binary_cross_entropy_with_logits, lambda: ft.LinearHead(3), lambda eta: (eta > 0).double()),
    "poisson": (F.poisson_nll_loss, lambda: ft.LinearHead(3), lambda eta: eta.abs().round()),
    "categorical": (F.cross_entropy, lambda: nn.Linear(3, 4), lambda eta: (eta.abs() * 2).long().clamp(max=3)),
}


def trained(name: str, sizes: list[int], wrap: Callable[[Any], ft.Algorithm], batch_size: int | None) -> ft.Run:
    loss, module, response = LOSSES[name]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in sizes]
    data = ft.data.from_tensors([(x, response(x.sum(1))) for x in rows])
    torch.manual_seed(0)
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1)
    local = ft.gradient_descent(module().double(), epochs=3, batch_size=batch_size, loss=loss, optimizer=optimizer)
    return ft.run(wrap(local), ft.InProcess(data), rounds=2, faults=ft.partial_work(0.5))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sizes", [[6, 6, 6], [2, 9, 5]], ids=["alike", "ragged"])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("wrap", [ft.fedavg, lambda local: ft.fedprox(local, 0.7)], ids=["fedavg", "fedprox"])
def test_the_same_as_stacked_steps(
    name: str, sizes: list[int], batch_size: int | None, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    solve = LinearSteps.solve
    monkeypatch.setattr(LinearSteps, "solve", lambda *a: calls.append(1) or solve(*a))
    ours = trained(name, sizes, wrap, batch_size)
    assert calls
    monkeypatch.setattr(LinearSteps, "knows", lambda *a: False)
    theirs = trained(name, sizes, wrap, batch_size)
    for one, other in zip(tree.leaves(ours.server), tree.leaves(theirs.server), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    losses = (torch.tensor(list(run.history["train_loss"])) for run in (ours, theirs))
    torch.testing.assert_close(*losses, rtol=1e-11, atol=1e-13)


def test_labels_that_are_left_out() -> None:
    x, y = torch.randn(1, 5, 3, dtype=torch.float64), torch.tensor([[0, -100, 2, 1, -100]])
    start, whole = torch.zeros(1, 3, 4, dtype=torch.float64), [(None, torch.full((3, 1), 5))]
    one, _ = glm_loop(CATEGORICAL, x, y, start, lambda _: whole, lr=0.5, total=torch.tensor([3]))
    kept = y[0] >= 0
    some = [(None, torch.full((1, 1), 3))] * 3
    other, _ = glm_loop(CATEGORICAL, x[:, kept], y[:, kept], start, lambda _: some, lr=0.5, total=torch.tensor([3]))
    torch.testing.assert_close(one, other)


def test_the_loop_is_for_a_cpu() -> None:
    """On another device without programs steps stay stacked."""
    linear = ft.gradient_descent(
        nn.Linear(3, 4), steps=1, loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    ).solve.__self__.linear  # type: ignore[attr-defined]
    sizes = {"weight": (2, 4, 3), "bias": (2, 4)}
    for device, known in (("cpu", True), ("meta", False)):
        start = {name: torch.zeros(size, device=device) for name, size in sizes.items()}
        rows = torch.zeros(2, 5, 3, device=device), torch.zeros(2, 5, dtype=torch.int64, device=device)
        assert linear.knows(start, rows, None) == known


@pytest.mark.parametrize("sizes", [[12, 12, 12], [10, 10, 10], [2, 9, 5]], ids=["whole", "alike", "ragged"])
@pytest.mark.parametrize("numbers", [1, 25, 1000])
def test_runs_hold_the_batches_of_their_steps(sizes: list[int], numbers: int) -> None:
    x = torch.arange(36.0).reshape(3, 12, 1)[:, : max(sizes)]
    keys = ft.random.fold_in(ft.random.key(0), torch.arange(3))
    one, other = (Batches(x, torch.tensor(sizes), 4, 3, None, keys) for _ in range(2))
    step = 0
    for places, counts in one.runs(numbers):
        assert places is not None
        assert len(counts) == 1 or len(counts) * 3 * 4 <= numbers
        assert not any(step < end < step + len(counts) for end in one.total.tolist())
        for place, count in zip(places, counts, strict=True):
            batch = other[step]
            active = (step < other.total).nonzero()[:, 0].tolist()
            for client in active:
                assert x[client, place[client, : count[client]]].tolist() == batch.alone(client).tolist()
            step += 1
    assert step == one.longest
