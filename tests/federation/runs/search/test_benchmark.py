"""Algorithms over seeds: the table is that of runs one by one, and a stopped benchmark goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracles.closed_forms import linear_clients
from torch import nn

import fedtorch as ft
from fedtorch.federation.runs.search import benchmark as module
from fedtorch.trust import privacy

DATA = linear_clients([12] * 5)
METRICS = {"error": ft.metrics.mean_squared_error()}


def local(lr: float = 0.05) -> ft.LocalSolver:
    return ft.gradient_descent(
        nn.Linear(3, 1, dtype=torch.float64),
        epochs=1,
        batch_size=4,
        loss=lambda output, y: (output[:, 0] - y).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
    )


def compared(**options: Any) -> module.Benchmark:
    algorithms: dict[str, Any] = {"alone": lambda: ft.separate(local()), "averaged": lambda: ft.fedavg(local())}
    about: dict[str, Any] = dict(rounds=3, seeds=[1, 4, 7], validation=0.25, metrics=METRICS, progress=False)
    return ft.benchmark(algorithms, ft.InProcess(DATA), **about | options)


def test_the_table_is_that_of_runs_one_by_one() -> None:
    table = compared(cohort=3).table
    scores: dict[str, list[ft.Score]] = {"alone": [], "averaged": []}
    for seed in (1, 4, 7):
        training, validation = DATA.split(0.75, seed)
        for name, make in (("alone", ft.separate), ("averaged", ft.fedavg)):
            torch.manual_seed(seed)
            run = ft.run(make(local()), ft.InProcess(training), rounds=3, cohort=3, seed=seed)
            scores[name].append(run.evaluate(validation, METRICS)["error"])
    ours = {name: torch.tensor([each.overall for each in every], dtype=torch.float64) for name, every in scores.items()}
    difference = ours["averaged"] - ours["alone"]
    row = table.loc["averaged"]
    assert row["error"] == pytest.approx(float(ours["averaged"].mean()), rel=1e-12)
    assert row["error sd"] == pytest.approx(float(ours["averaged"].std()), rel=1e-12)
    assert row["error minus alone"] == pytest.approx(float(difference.mean()), rel=1e-12)
    assert row["error minus alone, sd"] == pytest.approx(float(difference.std()), rel=1e-12)
    worst = sum(each.worst() for each in scores["averaged"]) / 3
    assert row["error worst client"] == pytest.approx(worst, rel=1e-12)
    assert table.loc["alone", "error minus alone"] == 0
    assert math.isnan(table.loc["alone", "error minus alone, sd"])


def test_a_stopped_benchmark_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compared()
    monkeypatch.setattr(module, "_SAVED", -1.0)  # after every round
    step, steps = ft.Run.step, 0

    def stopped(run: ft.Run, **ask: Any) -> ft.Round:
        nonlocal steps
        steps += 1
        if steps == 9:  # in the middle of the third run
            raise KeyboardInterrupt
        return step(run, **ask)

    monkeypatch.setattr(ft.Run, "step", stopped)
    with pytest.raises(KeyboardInterrupt):
        compared(folder=tmp_path)
    resumed = compared(folder=tmp_path)
    assert steps == 9 + 3 * 2 * 3 - 8
    assert resumed.table.equals(whole.table)
    assert resumed.histories["averaged"][2]["train_loss"].equals(whole.histories["averaged"][2]["train_loss"])
    with pytest.raises(ValueError, match="Expected"):
        compared(folder=tmp_path, cohort=2)


def test_scores_between_rounds_are_in_the_histories() -> None:
    result = compared(every=2, rounds=5)
    for tables in result.histories.values():
        for table in tables:
            assert table["val_error"].notna().tolist() == [False, True, False, True, True]
    assert result.histories["averaged"][0]["val_error"].iloc[-1] == result.scores["averaged"]["error"][0].overall
    labels = [text.get_text() for text in ft.plots.curves(result.histories).legends[0].get_texts()]
    assert labels == ["alone", "averaged"]


def test_what_it_prints_is_its_table() -> None:
    result = compared(seeds=1)
    assert repr(result).endswith("1 seeds")
    assert "error minus alone" in repr(result)
    assert "<table" in result._repr_html_()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seeds": [1, 1]}, ValueError, r"different seeds, but got .* \[1, 1\]"),
        ({"seeds": 0}, ValueError, "Expected algorithms, metrics and different seeds"),
        ({"metrics": {}}, ValueError, "Expected algorithms, metrics and different seeds"),
        ({"rounds": 0}, ValueError, "Expected a positive rounds"),
        ({"every": 0}, ValueError, "Expected a positive every"),
        ({"metrics": {"row": lambda output, y: {"a": y}}}, TypeError, "metrics of one number each, but got 'row'"),
    ],
)
def test_errors_of_settings(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compared(**change)


def test_private_algorithms_are_made_for_each_seed() -> None:
    make: Callable[[], ft.Algorithm] = lambda: (
        ft.fedavg(local()) | privacy.client_level(clip=1.0, noise=1.0, delta=0.1, budget=100.0)
    )
    about: dict[str, Any] = dict(rounds=1, seeds=2, validation=0.25, metrics=METRICS, progress=False)
    with pytest.raises(ValueError, match="makes the private algorithm 'private' for each seed"):
        ft.benchmark({"private": make()}, ft.InProcess(DATA), **about)
    spent = ft.benchmark({"private": make}, ft.InProcess(DATA), **about).histories["private"]
    assert spent[0]["epsilon"].tolist() == spent[1]["epsilon"].tolist()
