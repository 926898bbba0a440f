"""Schedules over the whole run: the local solver is told how many rounds there are, and everybody else compares it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support.oracles.closed_forms import linear, linear_clients
from support.small_federations import trainer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import DataLoader

import fedtorch as ft
from fedtorch.trust import privacy

ROUNDS, EPOCHS = 4, 2


class Scheduled(L.LightningModule):
    """OneCycle or cosine as they stand in any module, as long as its trainer says."""

    def __init__(self, kind: str = "one cycle") -> None:
        super().__init__()
        self.linear, self.kind, self.rates = linear(), kind, []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.linear(batch[0])[:, 0], batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.kind == "cosine":
            return [optimizer], [CosineAnnealingLR(optimizer, self.trainer.max_epochs)]
        steps = {"ten steps": 10, "one cycle": None}[self.kind] or int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, 0.2, total_steps=steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def local(solver: str, kind: str = "one cycle", rounds: Any = ROUNDS) -> ft.LocalSolver:
    if solver == "stacked":
        return ft.gradient_descent(Scheduled(kind), epochs=EPOCHS, rounds=rounds)
    return ft.lightning_fit(Scheduled(kind), max_epochs=EPOCHS, rounds=rounds)


@pytest.mark.parametrize("kind", ["one cycle", "cosine"])
@pytest.mark.parametrize("solver", ["stacked", "Trainer"])
def test_one_client_is_trained_as_by_lightning(solver: str, kind: str) -> None:
    data = linear_clients([6])
    plain = Scheduled(kind)
    rows = list(zip(*data[0]))
    trainer(max_epochs=ROUNDS * EPOCHS).fit(plain, DataLoader(rows, batch_size=6))
    run = ft.run(ft.fedavg(local(solver, kind)), ft.InProcess(data), rounds=ROUNDS)
    torch.testing.assert_close(run.global_module().linear.weight, plain.linear.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("solver", ["stacked", "Trainer"])
def test_a_run_of_another_length_is_refused_by_name(solver: str) -> None:
    algorithm, population = ft.fedavg(local(solver)), ft.InProcess(linear_clients([4, 5]))
    with pytest.raises(ValueError, match=r"a run of 4 rounds, for which rounds=4 .* but got ft\.run\(…, rounds=3\)"):
        ft.run(algorithm, population, rounds=3)
    run = ft.Run(algorithm, population)
    with pytest.raises(ValueError, match=r"at most 4 rounds, .* but got 5"):
        run.rounds(5)
    assert [done.number for done in run.rounds(4)] == [1, 2, 3, 4]  # a part of it may be asked for
    with pytest.raises(ValueError, match=r"at most 4 rounds, .* but got 5"):
        run.step()


@pytest.mark.parametrize(
    ("settings", "named"), [({"max_epochs": 3}, "max_epochs=3"), ({"max_epochs": 9, "max_steps": 5}, "max_steps=5")]
)
def test_a_trainer_of_another_length_is_refused_by_name(settings: dict[str, int], named: str) -> None:
    federation = ft.Federation(ft.fedavg(local("stacked")), ft.InProcess(linear_clients([4, 5])))
    with pytest.raises(ValueError, match=f"a run of 4 rounds.*{named} of the Trainer"):
        trainer(**settings).fit(federation)
    trainer(max_epochs=ROUNDS).fit(federation)
    assert federation.round == ROUNDS


def test_client_trainers_need_the_schedule_length() -> None:
    with pytest.raises(ValueError, match=r"Expected rounds=.*lightning_fit\(\.\.\., rounds=50\).*\"each\""):
        ft.run(ft.fedavg(local("Trainer", rounds=None)), ft.InProcess(linear_clients([4])), rounds=2)
    assert ft.run(ft.fedavg(local("Trainer", rounds="each")), ft.InProcess(linear_clients([4])), rounds=2).number == 2
    with pytest.raises(ValueError, match="whole number of at least 1, or 'each', but got 'all'"):
        local("Trainer", rounds="all")


def test_protected_rows_too() -> None:
    protected = privacy.example_level(
        Scheduled(), clip=1.0, noise=1.0, sampling_rate=0.5, steps=2, delta=1e-3, rounds=ROUNDS
    )
    with pytest.raises(ValueError, match="a run of 4 rounds"):
        ft.run(ft.fedavg(protected), ft.InProcess(linear_clients([4, 5])), rounds=3)


def test_a_schedule_that_is_too_short_says_so() -> None:
    algorithm = ft.fedavg(local("stacked", "ten steps", rounds=None))
    with pytest.raises(ValueError, match=r"as long as the run, but OneCycleLR ends after 10 steps: .* say rounds="):
        ft.run(algorithm, ft.InProcess(linear_clients([4])), rounds=6)
