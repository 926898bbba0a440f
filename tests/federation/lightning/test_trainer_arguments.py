"""Every argument of a Trainer acts on a federation, or is refused with where to say it."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler
from support.oracles.closed_forms import linear_clients, sgd
from support.small_federations import trainer

import fedtorch as ft

DATA = linear_clients([4, 5, 6])

REFUSED: dict[str, list[Any]] = {
    "precision": ["16-true", "bf16-mixed", 64],
    "limit_train_batches": [2, 0.5],
    "limit_val_batches": [3, 0.5],
    "limit_test_batches": [2],
    "limit_predict_batches": [0.5],
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
            LearningRateFinder(),
            LearningRateMonitor(),
            ModelPruning("l1_unstructured"),
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
    "callbacks": ({"callbacks": [Timer(duration={"days": 1}), DeviceStatsMonitor(cpu_stats=False)]}, 3, 3),
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
    assert arguments == {*REFUSED, *ACTS, *ELSEWHERE}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in REFUSED.items() for v in values], ids=lambda v: str(v)[:30]
)
def test_what_would_do_nothing_is_refused(name: str, value: Any) -> None:
    told = type(value[0]).__name__ if name == "callbacks" else name
    with pytest.raises(ValueError, match=f"Expected a Trainer without .*{told}.*, which would do nothing.*; "):
        trainer(max_epochs=1, num_sanity_val_steps=0, **{name: value}).fit(federation())


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.filterwarnings("ignore")
def test_what_acts(name: str, tmp_path: Any) -> None:
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
def test_settings_are_logged_unless_told_not_to(tmp_path: Any, told: bool) -> None:
    logger = CSVLogger(tmp_path)
    trainer(max_epochs=1, logger=logger, enable_autolog_hparams=told).fit(federation())
    assert bool(logger.experiment.hparams) == told


def test_the_best_checkpoint_of_a_metric(tmp_path: Any) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val_error")
    trainer(max_epochs=2, callbacks=[best], enable_checkpointing=True).fit(federation())
    assert best.best_model_path
