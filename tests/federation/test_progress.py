"""One bar over all rounds."""

import pytest
import torch
from support.closed_forms import linear_clients
from support.small_federations import trainer

import fedtorch as ft

DATA = linear_clients([5, 9, 14])


def federation() -> ft.Federation:
    width = DATA.rows[0].shape[1]
    return ft.Federation(ft.fedavg(ft.least_squares(torch.nn.Linear(width, 1).double())), ft.InProcess(DATA))


@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_steps": 3, "max_epochs": -1}])
def test_the_bar_counts_rounds(length: dict, capsys: pytest.CaptureFixture[str]) -> None:
    bar = ft.RoundProgressBar("FedAvg")
    trainer(callbacks=bar, enable_progress_bar=True, **length).fit(federation())
    shown = capsys.readouterr().out
    assert "FedAvg" in shown
    assert "3/3" in shown
    assert "train_loss" in shown


def test_an_error_closes_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    model = federation()

    def fail(*batch: object) -> None:
        raise RuntimeError("stop")

    model.training_step = fail
    bar = ft.RoundProgressBar()
    with pytest.raises(RuntimeError, match="stop"):
        trainer(max_epochs=3, callbacks=bar, enable_progress_bar=True).fit(model)
    assert bar._bar.disable


def test_a_disabled_bar_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ft.RoundProgressBar()
    bar.disable()
    trainer(max_epochs=2, callbacks=bar, enable_progress_bar=True).fit(federation())
    assert capsys.readouterr().out == ""
