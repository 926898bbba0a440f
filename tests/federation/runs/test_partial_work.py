"""Clients that do a part of a round's work: what each has then is what a run of so many epochs or steps gives it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support.oracles.closed_forms import linear_clients
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.federation.runs.faults import shares_of_work

SHARES = torch.tensor([0.2, 1.0, 0.55, 0.4])


class Network(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))[..., 0]


def solver(inputs: int, batch_size: int | None, adam: bool, **amount: int) -> ft.LocalSolver:
    torch.manual_seed(0)
    optimizer: Any = torch.optim.Adam if adam else torch.optim.SGD
    module = Network(inputs) if adam else ft.LinearHead(inputs)
    return ft.gradient_descent(
        module.double(), batch_size=batch_size, loss=F.mse_loss, optimizer=lambda p: optimizer(p, lr=0.05), **amount
    )


def one_round(data: ft.data.FederatedData, local: ft.LocalSolver, faults: ft.Faults | None = None) -> ft.Run:
    run = ft.Run(ft.separate(local), ft.InProcess(data), faults=faults)
    run.step()
    return run


@pytest.mark.parametrize(("sizes", "adam"), [([8] * 4, False), ([5, 8, 11, 8], True)], ids=["alike", "ragged"])
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_partial_work_by_epochs_or_steps(sizes: list[int], batch_size: int | None, unit: str, adam: bool) -> None:
    data = linear_clients(sizes)
    inputs = data[0][0].shape[1]
    slow = ft.partial_work(1.0, shares=SHARES)
    partly = one_round(data, solver(inputs, batch_size, adam, **{unit: 5}), slow)
    for client, amount in enumerate([1, 5, 3, 2]):  # of 5, rounded up
        whole = one_round(data, solver(inputs, batch_size, adam, **{unit: amount}))
        got, wanted = (run.client_module(client).state_dict() for run in (partly, whole))
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-12, atol=1e-12)
        assert partly.last is not None
        assert whole.last is not None
        losses = [float(run.last.info["loss"][client]) for run in (partly, whole)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_rounds_of_fedprox_with_drawn_shares_are_a_plain_loop() -> None:
    """Each client takes ⌈share · 7⌉ steps on its loss and ½μ‖w − θ‖², the server the mean by rows."""
    data, slow, mu, asked = linear_clients([6, 9, 4]), ft.partial_work(0.7), 0.3, []

    def noted(keys: Tensor, ids: Tensor) -> Tensor:
        assert slow.work is not None
        asked.append(slow.work(keys, ids))
        return asked[-1]

    local = solver(data[0][0].shape[1], None, False, steps=7)
    run = ft.Run(ft.fedprox(local, mu), ft.InProcess(data), faults=ft.Faults(work=noted))
    plain = [leaf.detach().clone() for leaf in local.parameters.values()]
    for done in run.rounds(4):
        ends = []
        for (x, y), share in zip(data, asked[-1].tolist()):
            own = [leaf.clone().requires_grad_() for leaf in plain]
            for _ in range(-int(-7 * share // 1)):
                fit = F.mse_loss(x @ own[0][:-1] + own[0][-1], y)
                pull = 0.5 * mu * sum((mine - start).square().sum() for mine, start in zip(own, plain))
                slopes = torch.autograd.grad(fit + pull, own)
                own = [(leaf - 0.05 * slope).detach().requires_grad_() for leaf, slope in zip(own, slopes)]
            ends.append(own)
        plain = [sum(n * leaf.detach() for n, leaf in zip([6, 9, 4], leaves)) / 19 for leaves in zip(*ends)]
        for leaf, wanted in zip(done.server.values(), plain):
            torch.testing.assert_close(leaf, wanted, rtol=1e-12, atol=1e-12)
    assert len({-int(-7 * share // 1) for shares in asked for share in shares.tolist()}) > 3


def test_drawn_shares_are_uniform_over_whole_epochs() -> None:
    count = 20_000
    shares = shares_of_work(ft.partial_work(0.9), ft.random.key(3), None, torch.arange(count))
    assert shares is not None
    epochs = (shares(torch.arange(count)) * 20).ceil()
    expected = torch.full((20,), 0.9 / 20)
    expected[-1] += 0.1
    error = (expected * (1 - expected) / count).sqrt()
    assert bool(((torch.bincount(epochs.long() - 1, minlength=20) / count - expected).abs() < 4.5 * error).all())


def test_company_does_not_matter() -> None:
    slow, key = ft.partial_work(0.5), ft.random.key(1)
    some, everybody = (shares_of_work(slow, key, who, torch.arange(9)) for who in (torch.tensor([2, 7]), None))
    assert some is not None
    assert everybody is not None
    assert some(torch.tensor([7])).tolist() == everybody(torch.arange(9))[[7]].tolist()


def test_so_many_of_a_cohort_are_slow() -> None:
    """A function of one's own sees all clients of the round at once."""
    seen = []

    def half(key: Tensor, ids: Tensor) -> Tensor:
        seen.append(ids.tolist())
        return torch.where(torch.arange(len(ids)) < len(ids) // 2, 0.5, 1.0)

    data = linear_clients([4, 9, 30, 5])  # of more than one block
    run = ft.Run(
        ft.fedavg(solver(data[0][0].shape[1], 2, True, epochs=2)),
        ft.InProcess(data, chunk=1),
        cohort=[0, 2, 3],
        faults=ft.Faults(work=half),
    )
    run.step()
    assert seen == [[0, 2, 3]]


def test_of_two_shares_the_smaller_counts_and_other_faults_stay() -> None:
    both = ft.partial_work(1.0, shares=SHARES) | ft.partial_work(1.0, shares=1.2 - SHARES) | ft.dropouts(0.5)
    assert both.before is not None
    assert both.work is not None
    keys = ft.random.fold_in(ft.random.key(0), torch.arange(4))
    assert both.work(keys, torch.arange(4)).tolist() == pytest.approx([0.2, 0.2, 0.55, 0.4])


class Scheduled(L.LightningModule):
    """A line whose rate halves after every epoch."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.line = ft.LinearHead(inputs).double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.line(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


def test_schedules_go_on_where_all_epochs_would_have_brought_them() -> None:
    """A client's second round begins with the rate of the fifth epoch, whatever it did of the first four."""
    data = linear_clients([6, 6])
    module = Scheduled(data[0][0].shape[1])
    run = ft.Run(
        ft.separate(ft.gradient_descent(module, epochs=4)),
        ft.InProcess(data),
        faults=ft.partial_work(1.0, shares=torch.tensor([0.25, 1.0])),
    )
    run.step()
    x, y = data[0]
    line = run.client_module(0).line
    run.step()
    loss = F.mse_loss(line(x), y)
    for parameter, gradient in zip(line.parameters(), torch.autograd.grad(loss, list(line.parameters()))):
        parameter.data -= 0.1 * 0.5**4 * gradient  # one epoch of four
    for name, value in run.client_module(0).line.state_dict().items():
        torch.testing.assert_close(value, line.state_dict()[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shares", [[0.0, 1.0], [0.5, 1.5], [[0.5]]])
def test_shares_are_checked(shares: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected shares \(K,\) above 0 and at most 1"):
        ft.partial_work(1.0, shares=torch.tensor(shares))


def test_work_without_parts_is_refused() -> None:
    head = ft.least_squares(ft.LinearHead(2))
    with pytest.raises(ValueError, match=r"Expected a local solver that takes steps.*fedavg of least_squares"):
        ft.Run(ft.fedavg(head), ft.InProcess(linear_clients([4, 5])), faults=ft.partial_work(0.5))
