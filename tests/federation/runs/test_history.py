"""The history: equal to what `run` yields, kept in checkpoints, bounded."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pandas.testing import assert_frame_equal
from support.oracles.closed_forms import linear_clients, same_bits, sgd
from support.small_federations import classes, solver, trainer
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.runs.evaluation import evaluate
from fedtorch.history import History

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

DATA = classes()
TRAINING, VALIDATION = DATA.split(0.7, seed=1)
METRICS = {"accuracy": ft.metrics.accuracy(), "cross_entropy": ft.metrics.cross_entropy()}
FAULTS = ft.dropouts(0.2) | ft.stragglers(1.0, 0.05 * TRAINING.counts) | ft.lost_messages(after=0.1) | ft.duplicated()
LOCAL = solver()


def federation(**arguments: Any) -> ft.Federation:
    settings = {"cohort": 4, "seed": 5, "faults": FAULTS, "validation": VALIDATION, "metrics": METRICS}
    return ft.Federation(ft.personal_layers(LOCAL, "head.*"), ft.InProcess(TRAINING), **{**settings, **arguments})


def quadratic(**arguments: Any) -> ft.Federation:
    return ft.Federation(ft.fedavg(sgd(0.05)), ft.InProcess(linear_clients([4, 5, 6])), **arguments)


def without_seconds(model: ft.Federation) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in model.get_extra_state().items() if name != "history.seconds"}


def test_the_history_is_what_run_yields() -> None:
    model = federation()
    trainer(max_epochs=8).fit(model)
    table = model.history
    rounds, scores = [], []
    for done in ft.Run(model.run.algorithm, model.run.population, cohort=4, seed=5, faults=FAULTS).rounds(8):
        rounds.append(done)
        scores.append(evaluate(done.clients, done.server, LOCAL.predict, VALIDATION, METRICS))
    assert table["round"].tolist() == [round.number for round in rounds] == list(range(1, 9))
    for name in ("asked", "lost_before", "late", "lost_after", "repeated"):
        assert table[name].tolist() == [len(getattr(round, name)) for round in rounds]
        assert table[name].sum() > 0
    assert table["answered"].tolist() == [len(round.ids) for round in rounds]
    for name in ("bytes_up", "bytes_down"):
        assert table[f"round_{name}"].tolist() == [getattr(round, name) for round in rounds]
        assert table[name].tolist() == np.cumsum([getattr(round, name) for round in rounds]).tolist()
        assert table[name].iloc[-1] == getattr(model.run, name)
    for i, round in enumerate(rounds):
        row = table.iloc[i]
        losses = round.info["loss"].double().numpy() if len(round.ids) else np.full(1, np.nan)
        expected = [losses.mean(), *np.quantile(losses, [0, 0.25, 0.5, 0.75, 1])]
        found = [row["train_loss"], *(row[f"train_loss_{part}"] for part in ("min", "q25", "median", "q75", "max"))]
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)
        for name in METRICS:
            score = scores[i][name]
            expected = [score.overall, score.mean(), score.worst(True), score.worst(False)]
            assert [row[f"val_{name}{part}"] for part in ("", "_mean", "_min", "_max")] == expected
    assert (table["seconds"] > 0).all()
    assert not table.drop(columns=[c for c in table if c.startswith(("train_loss", "size"))]).isna().any().any()


def test_clients_losses() -> None:
    model = federation()
    trainer(max_epochs=6).fit(model)
    table = model.client_losses
    parts = []
    for done in ft.Run(model.run.algorithm, model.run.population, cohort=4, seed=5, faults=FAULTS).rounds(6):
        names = [TRAINING.names[k] for k in done.ids.tolist()]
        values = done.info["loss"].float().numpy() if names else np.zeros(0, np.float32)
        parts.append(pd.DataFrame({"round": done.number, "client": names, "train_loss": values}))
    expected = pd.concat([part for part in parts if len(part)], ignore_index=True)
    assert_frame_equal(table, expected, check_dtype=False)


def test_research_code_keeps_a_history_of_its_own() -> None:
    model, own = quadratic(cohort=2), History()
    trainer(max_epochs=5).fit(model)
    for round in ft.Run(model.run.algorithm, model.run.population, cohort=2).rounds(5):
        own.record(round)
    assert len(own) == 5
    assert_frame_equal(own.frame().drop(columns="seconds"), model.history.drop(columns="seconds"))
    assert own.frame()["seconds"].isna().all()


def test_a_resumed_history_has_the_same_bits(tmp_path: Path) -> None:
    def fit(**arguments: Any) -> ft.Federation:
        model = federation()
        keep = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
        trainer(max_epochs=6, callbacks=[keep], enable_checkpointing=True).fit(model, **arguments)
        return model

    whole = fit()
    seconds = torch.tensor(whole.history["seconds"].to_numpy(copy=True))
    resumed = fit(ckpt_path=tmp_path / "epoch=2.ckpt")
    assert same_bits(without_seconds(resumed), without_seconds(whole))
    assert_frame_equal(resumed.history.drop(columns="seconds"), whole.history.drop(columns="seconds"))
    assert_frame_equal(resumed.client_losses, whole.client_losses)
    assert torch.equal(resumed.get_extra_state()["history.seconds"][:3], seconds[:3])


def test_a_history_is_flat_tensors_that_load_safely(tmp_path: Path) -> None:
    model = federation()
    trainer(max_epochs=3).fit(model)
    torch.save(model.get_extra_state(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(type(leaf) is Tensor for leaf in loaded.values())
    again = federation()
    again.set_extra_state(loaded)
    assert_frame_equal(again.history, model.history)
    empty = federation()
    again.set_extra_state(empty.get_extra_state())
    assert len(again.history) == len(again.client_losses) == 0


def test_only_the_latest_losses_are_kept() -> None:
    whole, some, none = (quadratic(keep_losses=n) for n in (1000, 7, 0))
    for model in (whole, some, none):
        trainer(max_epochs=5).fit(model)
    assert len(whole.client_losses) == 15
    assert some.client_losses["round"].tolist() == [4, 4, 4, 5, 5, 5]
    assert len(none.client_losses) == 0
    assert_frame_equal(none.history.drop(columns="seconds"), whole.history.drop(columns="seconds"))
    with pytest.raises(ValueError, match="client_losses of at least 0"):
        quadratic(keep_losses=-1)


def test_rounds_without_validation_have_no_scores() -> None:
    data = linear_clients([4, 5, 6])
    error = lambda prediction, target: (prediction[..., 0] - target) ** 2
    model = quadratic(validation=data, metrics={"mse": error})
    trainer(max_epochs=6, check_val_every_n_epoch=3).fit(model)
    assert model.history["val_mse"].notna().tolist() == [False, False, True] * 2
    trainer().validate(model, verbose=False)
    assert model.history["val_mse"].notna().tolist() == [False, False, True] * 2


def told(info: dict[str, Tensor], number: int = 1) -> ft.Round:
    none = torch.zeros(0, dtype=torch.int64)
    ids = torch.arange(len(next(iter(info.values()), none)))
    return ft.Round(number, None, None, ids, info, 3, 4, ids, none, none, none, none, none, {})


@pytest.mark.parametrize("clients", [1, 2, 3, 9, 10, 11, 1003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_spreads_are_those_of_all_losses_in_order(clients: int, dtype: torch.dtype) -> None:
    losses = torch.randn(clients, dtype=dtype, generator=torch.Generator().manual_seed(clients)).round(decimals=1)
    history = History()
    history.record(told({"loss": losses}))
    row, ordered = history.frame().iloc[0], sorted(losses.tolist())
    for name, part in (("min", 0.0), ("q25", 0.25), ("median", 0.5), ("q75", 0.75), ("max", 1.0)):
        between, low = math.modf(part * (clients - 1))
        value, next_larger = ordered[int(low)], ordered[min(int(low) + 1, clients - 1)]
        assert row[f"train_loss_{name}"] == value + between * (next_larger - value)
    worst = ordered[-math.ceil(clients / 10) :]
    assert row["train_loss_worst_decile"] == sum(worst) / len(worst)


def test_spreads_of_odd_losses() -> None:
    history = History()
    history.record(told({"loss": torch.tensor([2.0, math.nan, 1.0, 4.0])}, 1))
    history.record(told({"loss": torch.tensor([math.nan])}, 2))
    history.record(told({"loss": torch.tensor([1.0, math.inf, math.inf])}, 3))
    history.record(told({}, 4))
    history.record(told({"seconds": torch.tensor([7.0]), "new": torch.tensor([8.0])}, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = history.frame()
    assert table["train_loss_median"].tolist() == pytest.approx([2.0, math.nan, math.inf, *[math.nan] * 2], nan_ok=True)
    assert table["train_loss_q25"][0] == 1.5
    assert table["train_loss_min"].tolist()[2] == 1.0
    assert table["logged_seconds"].tolist()[-1] == 7.0
    assert table["new"].isna().tolist() == [True] * 4 + [False]
    again = History()
    again.load_state_dict(history.state_dict())
    assert_frame_equal(again.frame(), table)
