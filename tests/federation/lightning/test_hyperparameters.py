"""`hparams.yaml` has the settings of the run and of its module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from support.small_federations import Classifier, classes, trainer

import fedtorch as ft


class Saved(Classifier):
    """Saves what it was made with."""

    def __init__(self, width: int = 5, schedule: Any = None, logger: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters(logger=logger)


def logged(module: Classifier, folder: Path) -> dict[str, Any]:
    logger = CSVLogger(folder)
    algorithm = ft.fedavg(ft.gradient_descent(module, epochs=1, batch_size=8))
    trainer(max_epochs=1, logger=logger).fit(ft.Federation(algorithm, ft.InProcess(classes())))
    told = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert told["local/batch_size"] == 8
    return {name: value for name, value in told.items() if name.startswith("module")}


def test_the_modules_hyperparameters_are_logged(tmp_path: Path) -> None:
    schedule = {"warmup": {"steps": 3}, "decay": ft.star}
    told = logged(Saved(width=7, schedule=schedule), tmp_path)
    assert told.pop("module/schedule/decay").startswith("fedtorch.federation.exchanges.star.star")
    assert told == {"module/width": 7, "module/schedule/warmup/steps": 3, "module/logger": True}


def test_those_kept_from_loggers_and_those_never_saved_are_not(tmp_path: Path) -> None:
    assert logged(Saved(logger=False), tmp_path) == {}
    assert logged(Classifier(), tmp_path) == {}


class OneCycle(Classifier):
    """Asks its Trainer how many steps there are in all."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize(("sizes", "steps"), [((16, 16), "10"), ((16, 24, 17), "10 to 15")])
@pytest.mark.parametrize("limit", [None, 1])
def test_schedules_are_logged_with_the_length_of_the_run(
    sizes: tuple[int, ...], steps: str, limit: int | None, tmp_path: Path
) -> None:
    x, y = torch.randn(sum(sizes), 4), torch.arange(sum(sizes)) % 3
    data = ft.data.from_tensors(list(zip(x.split(sizes), y.split(sizes))))
    algorithm, logger = (
        ft.fedavg(ft.gradient_descent(OneCycle(), epochs=1, batch_size=8, rounds=5)),
        CSVLogger(tmp_path),
    )
    settings = {} if limit is None else {"limit_train_batches": limit}
    trainer(max_epochs=5, logger=logger, **settings).fit(ft.Federation(algorithm, ft.InProcess(data)))
    told = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert f"total_steps: {steps if limit is None else 5}," in told["local/scheduler"]
    assert told["local/optimizer"] == "SGD"
