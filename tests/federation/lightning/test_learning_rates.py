"""Clients' learning rates as callbacks of a Trainer see them, and as they set them: beside Lightning on one client."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from support.oracles.closed_forms import linear, linear_clients
from support.small_federations import trainer
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader

import fedtorch as ft
from fedtorch import tree

ROUNDS = 6


class Lit(L.LightningModule):
    """Two parameter groups, momentum, and a schedule of any kind."""

    def __init__(self, kind: str = "epoch") -> None:
        super().__init__()
        self.linear, self.kind = linear(), kind

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.linear(batch[0])[:, 0], batch[1])

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.linear.weight]}, {"params": list(self.linear.parameters())[1:], "lr": 0.02}]
        optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=0.1, momentum=0.5)
        if self.kind == "none":
            return optimizer
        if self.kind == "cosine":
            return [optimizer], [CosineAnnealingLR(optimizer, self.trainer.max_epochs)]
        schedule = {"scheduler": StepLR(optimizer, 2, 0.5), "interval": self.kind.split()[0]}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {**schedule, **({"name": "rate"} if "named" in self.kind else {})},
        }


def local(solver: str, kind: str, **options: Any) -> ft.LocalSolver:
    rounds = ROUNDS if kind == "cosine" else None
    if solver == "stacked":
        return ft.gradient_descent(Lit(kind), epochs=1, rounds=rounds, **options)
    return ft.lightning_fit(Lit(kind), max_epochs=1, rounds=rounds, **options)


def federation(solver: str, kind: str, sizes: tuple[int, ...] = (6,), **options: Any) -> ft.Federation:
    return ft.Federation(ft.fedavg(local(solver, kind, **options)), ft.InProcess(linear_clients(list(sizes))))


@pytest.mark.parametrize("kind", ["none", "epoch", "step", "epoch named", "cosine"])
@pytest.mark.parametrize("solver", ["stacked", "Trainer"])
def test_the_monitor_logs_what_it_logs_of_the_module_alone(tmp_path: Any, solver: str, kind: str) -> None:
    monitors = [LearningRateMonitor(log_momentum=True, log_weight_decay=True) for _ in range(2)]
    plain = Lit(kind)
    rows = DataLoader(list(zip(*linear_clients([6])[0])), batch_size=6)
    loggers = [CSVLogger(tmp_path / str(i)) for i in range(2)]
    trainer(max_epochs=ROUNDS, callbacks=monitors[0], logger=loggers[0], log_every_n_steps=1).fit(plain, rows)
    trainer(max_epochs=ROUNDS, callbacks=monitors[1], logger=loggers[1]).fit(federation(solver, kind))
    assert monitors[1].lrs == {name: pytest.approx(rates) for name, rates in monitors[0].lrs.items()}
    assert monitors[1].last_momentum_values == monitors[0].last_momentum_values
    assert set(monitors[0].lrs) <= set(loggers[1].experiment.metrics_keys)


def test_of_clients_that_differ_it_is_the_mean_over_the_cohort(tmp_path: Any) -> None:
    monitor = LearningRateMonitor()
    model = federation("stacked", "step", (2, 8), batch_size=2)  # of one and of four minibatches
    trainer(max_epochs=3, callbacks=monitor, logger=CSVLogger(tmp_path)).fit(model)
    rate = lambda steps: 0.1 * 0.5 ** (steps // 2)
    (rates,) = [values for name, values in monitor.lrs.items() if "pg2" not in name]
    assert rates == pytest.approx([(rate(done) + rate(4 * done)) / 2 for done in range(3)])


def test_clients_without_learning_rates_are_refused(tmp_path: Any) -> None:
    model = ft.Federation(ft.fedavg(ft.least_squares(linear())), ft.InProcess(linear_clients([4, 5])))
    for callback in (LearningRateMonitor(), StochasticWeightAveraging(0.1)):
        with pytest.raises(ValueError, match=f"without the callback {type(callback).__name__}.*no learning rates"):
            trainer(max_epochs=1, callbacks=callback, logger=CSVLogger(tmp_path)).fit(model)


class Doubling(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 2:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 2


@pytest.mark.parametrize("solver", ["stacked", "Trainer"])
def test_clients_use_learning_rates_of_callbacks(solver: str) -> None:
    ends = []
    for callbacks in ([], [Doubling()]):
        model = federation(solver, "none")
        trainer(max_epochs=4, callbacks=callbacks).fit(model)
        ends.append(model.run.history["train_loss"].tolist())
    assert ends[0][:3] == ends[1][:3]
    assert ends[0][3] != ends[1][3]


SETTINGS = {"swa_lrs": 0.03, "swa_epoch_start": 3, "annealing_epochs": 2}


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize("kind", ["none", "epoch"])
@pytest.mark.parametrize("solver", ["stacked", "Trainer"])
def test_weight_averaging_of_one_client_is_lightnings(solver: str, kind: str, strategy: Any) -> None:
    averaging = [StochasticWeightAveraging(annealing_strategy=strategy, **SETTINGS) for _ in range(2)]
    plain = Lit(kind)
    rows = DataLoader(list(zip(*linear_clients([6])[0])), batch_size=6)
    # Momentum begins anew with every round of a federation, so that one fit of the module is an epoch.
    model = federation(solver, kind)

    class Anew(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.optimizers[0].state.clear()

    trainer(max_epochs=ROUNDS, callbacks=[averaging[0], Anew()]).fit(plain, rows)
    trainer(max_epochs=ROUNDS, callbacks=averaging[1]).fit(model)
    torch.testing.assert_close(model.global_module().linear.weight, plain.linear.weight, rtol=1e-12, atol=1e-12)
    assert int(averaging[1].n_averaged) == int(averaging[0].n_averaged) > 1  # the callback that was given says it, too


def test_the_average_is_of_the_servers_parameters_over_rounds(tmp_path: Any) -> None:
    seen = []

    class Look(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.append({name: leaf.clone() for name, leaf in pl_module.server.items()})

    model = federation("stacked", "none", (4, 7, 5), batch_size=3)
    trainer(max_epochs=ROUNDS, callbacks=[Look(), StochasticWeightAveraging(**SETTINGS)]).fit(model)
    mean = tree.map(lambda *leaves: torch.stack(leaves).mean(0), *seen[2:])
    torch.testing.assert_close(model.server, mean, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_run_averages_the_same(tmp_path: Any, stop: int) -> None:
    ends = []
    for again in (None, str(tmp_path / f"epoch={stop}.ckpt")):
        model = federation("stacked", "epoch", (4, 7), batch_size=3)
        saved = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
        callbacks = [StochasticWeightAveraging(**SETTINGS), saved]
        trainer(max_epochs=ROUNDS, callbacks=callbacks, enable_checkpointing=True).fit(model, ckpt_path=again)
        ends.append(model.server)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
