"""Rounds that nobody answers: the history's columns are there, and callbacks go on."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn

import fedtorch as ft

DATA = ft.data.from_tensors([(torch.ones(4, 2), torch.tensor([1.0, 2.0, 3.0, k])) for k in (1.0, 5.0)])
SPREAD = ("", "_min", "_q25", "_median", "_q75", "_max", "_worst_decile")


class Module(L.LightningModule):
    """Logs beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0])[:, 0], batch[1])
        self.log("root", loss.detach().sqrt())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def local(batched: bool = True) -> Any:
    torch.manual_seed(0)
    return ft.gradient_descent(Module(), epochs=1, batched=batched)


ALGORITHMS = {
    "gradients": lambda: ft.fedavg(local()),
    "one by one": lambda: ft.fedavg(local(batched=False)),
    "controls": lambda: ft.scaffold(local()),
    "least squares": lambda: ft.fedavg(ft.least_squares(nn.Linear(2, 1))),
}
NOBODY = {"before": ft.dropouts(0.999999), "after": ft.lost_messages(0.999999)}


@pytest.mark.filterwarnings("ignore:.*depend")
@pytest.mark.parametrize("lost", NOBODY)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_history_columns_are_nan_without_answers(algorithm: str, lost: str) -> None:
    run = ft.run(ALGORITHMS[algorithm](), ft.InProcess(DATA), rounds=2, faults=NOBODY[lost])
    answered = ft.run(ALGORITHMS[algorithm](), ft.InProcess(DATA), rounds=2)
    assert run.history["answered"].tolist() == [0, 0]
    for end in SPREAD:
        assert np.isnan(run.history[f"train_loss{end}"]).all()
    assert set(answered.history) - set(run.history) <= {"root"}  # what a module logs is not known before it does


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_early_stopping_ignores_rounds_without_answers(seed: int, tmp_path: Any) -> None:
    stopping = EarlyStopping("train_loss", patience=2)
    checkpoint = ModelCheckpoint(tmp_path, monitor="train_loss")
    federation = ft.Federation(ft.fedavg(local()), ft.InProcess(DATA), faults=ft.dropouts(0.7), seed=seed)
    trainer = L.Trainer(
        max_epochs=6, callbacks=[stopping, checkpoint], logger=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(federation)
    history = federation.history
    assert federation.round == 6
    assert history["train_loss"].isna().tolist() == (history["answered"] == 0).tolist()
    assert (history["answered"] == 0).any()
    assert stopping.check_finite
    known = history["train_loss"].min()
    assert stopping.best_score == pytest.approx(known)
    assert checkpoint.best_model_score == pytest.approx(known)


def test_losses_that_are_not_finite_still_stop() -> None:
    stopping = EarlyStopping("train_loss")
    broken = ft.gradient_descent(
        nn.Linear(2, 1), epochs=1, loss=lambda output, y: F.mse_loss(output[:, 0], y) + torch.inf,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    federation = ft.Federation(ft.fedavg(broken), ft.InProcess(DATA), faults=ft.dropouts(0.7))
    trainer = L.Trainer(
        max_epochs=9, callbacks=[stopping], logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(federation)
    answered = federation.history["answered"].tolist()
    assert answered[-1] > 0
    assert sum(answered[:-1]) == 0
    assert federation.round < 9
    assert stopping.check_finite
