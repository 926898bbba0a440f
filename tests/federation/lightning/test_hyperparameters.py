"""`hparams.yaml` has the settings of the run and of its module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
