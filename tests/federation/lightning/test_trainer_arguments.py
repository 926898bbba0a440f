"""Every argument of a Trainer acts on a federation, or is refused with where to say it."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler
from support.oracles.closed_forms import linear, linear_clients, sgd
from support.small_federations import trainer
from torch.utils.data import DataLoader

import fedtorch as ft

DATA = linear_clients([4, 5, 6])

REFUSED: dict[str, list[Any]] = {
    "precision": ["16-true", "bf16-mixed", 64],
    "limit_predict_batches": [0.5, 1],
    "overfit_batches": [1, 0.5],
    "val_check_interval": [0.5],
    "accumulate_grad_batches": [2],
    "gradient_clip_val": [1.0],
    "gradient_clip_algorithm": ["norm"],
    "sync_batchnorm": [True],
    "reload_dataloaders_every_n_epochs": [1],
    "callbacks": [
        [each]
        for each in (
            BackboneFinetuning(),
            BatchSizeFinder(),
            GradientAccumulationScheduler({0: 2}),
            LearningRateFinder(),
            ModelPruning("l1_unstructured"),
            WeightAveraging(),
        )
    ],
}

# What acts, and what is seen of it after at most three rounds: (arguments, rounds, scores of validation).
ACTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "accelerator": ({"accelerator": "cpu"}, 3, 3),
    "strategy": ({"strategy": "auto"}, 3, 3),
    "devices": ({"devices": 1}, 3, 3),
    "num_nodes": ({"num_nodes": 1}, 3, 3),
    "fast_dev_run": ({"fast_dev_run": True}, 1, 1),
    "max_epochs": ({"max_epochs": 2}, 2, 2),
    "min_epochs": ({"min_epochs": 3}, 3, 3),
    "max_steps": ({"max_steps": 2}, 2, 2),
    "min_steps": ({"min_steps": 3}, 3, 3),
    "max_time": ({"max_time": timedelta(days=1)}, 3, 3),
    "limit_train_batches": ({"limit_train_batches": 0}, 0, 0),
    "limit_val_batches": ({"limit_val_batches": 0}, 3, 0),
    "val_check_interval": ({"val_check_interval": 2, "check_val_every_n_epoch": None}, 3, 1),
    "check_val_every_n_epoch": ({"check_val_every_n_epoch": 3}, 3, 1),
    "num_sanity_val_steps": ({"num_sanity_val_steps": 1}, 3, 4),
    "log_every_n_steps": ({"log_every_n_steps": 2}, 3, 3),
    "callbacks": ({"callbacks": [Timer(interval="epoch"), DeviceStatsMonitor(False), LearningRateMonitor()]}, 3, 3),
    "Timer": ({"callbacks": [Timer(duration={"seconds": 0})]}, 0, 0),
    "StochasticWeightAveraging": ({"callbacks": [StochasticWeightAveraging(0.1)]}, 3, 3),
    "deterministic": ({"deterministic": True}, 3, 3),
    "benchmark": ({"benchmark": False}, 3, 3),
    "inference_mode": ({"inference_mode": False}, 3, 3),
    "profiler": ({"profiler": SimpleProfiler()}, 3, 3),
    "detect_anomaly": ({"detect_anomaly": True}, 3, 3),
    "barebones": ({"barebones": True}, 3, 3),
    "enable_progress_bar": ({"enable_progress_bar": True}, 3, 3),
    "enable_model_summary": ({"enable_model_summary": True}, 3, 3),
    "plugins": ({"plugins": [TorchCheckpointIO()]}, 3, 3),
}

# With limits other than none and all, of clients' minibatches.
LIMITS = {"limit_train_batches", "limit_val_batches", "limit_test_batches"}

# They write files, which tests here, in `test_lightning` and `test_checkpoint_io` look at, or have nothing to act on.
ELSEWHERE = {
    *("logger", "enable_checkpointing", "default_root_dir", "enable_autolog_hparams"),
    "model_registry",  # where Lightning's own checkpoint callback uploads
    "use_distributed_sampler",  # no loader has rows
}


def federation(seen: list[int] | None = None) -> ft.Federation:
    class Watched(ft.Federation):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if seen is not None:
                seen.append(self.round)

    metrics = {"error": ft.metrics.mean_squared_error()}
    return Watched(ft.fedavg(sgd(0.05)), ft.InProcess(DATA), validation=DATA, metrics=metrics)


def test_every_argument_is_known() -> None:
    arguments = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    assert arguments == {*REFUSED, *ACTS, *LIMITS, *ELSEWHERE} - {"Timer", "StochasticWeightAveraging"}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in REFUSED.items() for v in values], ids=lambda v: str(v)[:30]
)
def test_what_would_do_nothing_is_refused(name: str, value: Any) -> None:
    told = type(value[0]).__name__ if name == "callbacks" else name
    with pytest.raises(ValueError, match=f"Expected a Trainer without .*{told}.*, which would do nothing.*; "):
        trainer(max_epochs=1, num_sanity_val_steps=0, **{name: value}).fit(federation())


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.filterwarnings("ignore")
def test_trainer_arguments_that_act(name: str, tmp_path: Any) -> None:
    arguments, rounds, scores = ACTS[name]
    seen: list[int] = []
    given = {"max_epochs": 3, "num_sanity_val_steps": 0, **arguments}
    if name == "barebones":
        given.pop("num_sanity_val_steps")
    if name == "callbacks":  # of which one logs
        given["logger"] = CSVLogger(tmp_path)
    model = federation(seen)
    trainer(**given).fit(model)
    assert (model.round, len(seen)) == (rounds, scores)


@pytest.mark.parametrize("told", [True, False])
def test_settings_are_logged_unless_disabled(tmp_path: Any, told: bool) -> None:
    logger = CSVLogger(tmp_path)
    trainer(max_epochs=1, logger=logger, enable_autolog_hparams=told).fit(federation())
    assert bool(logger.experiment.hparams) == told


def test_the_best_checkpoint_of_a_metric(tmp_path: Any) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val_error")
    trainer(max_epochs=2, callbacks=[best], enable_checkpointing=True).fit(federation())
    assert best.best_model_path


def batched(solver: str, **options: Any) -> ft.Federation:
    """Clients of 4, 5 and 6 rows in minibatches of 2: two or three to an epoch."""
    module = Lit()
    if solver == "stacked":
        local = ft.gradient_descent(module, epochs=2, batch_size=2)
    else:
        local = ft.lightning_fit(module, max_epochs=2, batch_size=2, **options)
    return ft.Federation(ft.fedavg(local), ft.InProcess(DATA))


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("rows", float(len(batch[0])))
        return torch.nn.functional.mse_loss(self.linear(batch[0])[:, 0], batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_rows", float(len(batch[0])), reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_rows", float(len(batch[0])), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("limit", [1, 2, 7, 0.7])
@pytest.mark.parametrize("solver", ["stacked", "Trainer"])
def test_clients_take_at_most_so_many_minibatches_of_an_epoch(solver: str, limit: float) -> None:
    model, each = batched(solver), batched("Trainer", limit_train_batches=limit)  # which is Lightning's own
    trainer(max_epochs=2, limit_train_batches=limit).fit(model)
    trainer(max_epochs=2).fit(each)
    torch.testing.assert_close(model.server, each.server, rtol=1e-12, atol=1e-12)


def test_impossible_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Client 'client 0': .* one minibatch .* limit of 0\.4 leaves none of 2"):
        trainer(max_epochs=1, limit_train_batches=0.4).fit(batched("stacked"))
    other = ft.Federation(ft.fedsgd(Lit(), lr=0.1), ft.InProcess(DATA))
    for model in (batched("Trainer", limit_train_batches=1), other):
        with pytest.raises(ValueError, match=r"without limit_train_batches=2, which would do nothing.*steps="):
            trainer(max_epochs=1, limit_train_batches=2).fit(model)


@pytest.mark.parametrize(("limit", "rows"), [(1, 6), (2, 12), (0.5, 6), (9, 15)])
def test_evaluation_takes_the_first_batches_of_each_client(limit: float, rows: int) -> None:
    local = ft.gradient_descent(Lit(), epochs=1)
    model = ft.Federation(ft.fedavg(local), ft.InProcess(DATA), validation=DATA, test=DATA, evaluation_batch_size=2)
    made = trainer(max_epochs=2, limit_val_batches=limit, limit_test_batches=limit)
    made.fit(model)
    assert made.callback_metrics["val_rows"] == rows
    made.test(model, verbose=False)
    assert made.callback_metrics["test_rows"] == rows


@pytest.mark.parametrize("name", ["limit_val_batches", "limit_test_batches"])
def test_one_batch_of_all_rows_has_no_limit(name: str) -> None:
    model = ft.Federation(ft.fedavg(ft.gradient_descent(Lit(), epochs=1)), ft.InProcess(DATA), validation=DATA)
    made = trainer(max_epochs=1, **{name: 2})
    with pytest.raises(ValueError, match=r"evaluation_batch_size=\) for a limit of 2 batches.*rows are one batch"):
        made.fit(model) if name == "limit_val_batches" else made.test(model, DATA)


def test_evaluation_takes_the_first_batches_of_each_loader() -> None:
    loaders = {str(n): DataLoader(list(zip(*linear_clients([n])[0])), batch_size=2) for n in (4, 5, 6)}
    data = ft.data.from_loaders(loaders)
    local = ft.gradient_descent(Lit(), epochs=1, batched=False)
    model = ft.Federation(ft.fedavg(local), ft.InProcess(data), validation=data)
    made = trainer(max_epochs=1, limit_val_batches=2, limit_train_batches=1)
    made.fit(model)
    assert made.callback_metrics["val_rows"] == 12


def test_accumulation_by_a_callback_is_for_the_clients_trainers() -> None:
    ends = []
    for given in ({"accumulate_grad_batches": 2}, {"callbacks": [GradientAccumulationScheduler({0: 2})]}):
        model = batched("Trainer", **given)
        trainer(max_epochs=2).fit(model)
        ends.append(model.server)
    assert torch.equal(ends[0]["linear.weight"], ends[1]["linear.weight"])
