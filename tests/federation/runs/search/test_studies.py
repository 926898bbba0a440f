"""Searches that Optuna leads: their trials against ordinary runs, what is pruned, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from support.oracles.closed_forms import linear, linear_clients, mean_squared_error, same_bits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedtorch as ft
from fedtorch import progress
from fedtorch.federation.runs.search import studies
from fedtorch.federation.runs.search.studies import Trials

DATA = linear_clients([5, 9, 4, 14, 7, 9])
TRAINING, VALIDATION = DATA.split(0.7, seed=3)
optuna = pytest.importorskip("optuna")

RATES = [0.001, 0.003, 0.005, 0.008, 0.01, 0.012, 0.015, 0.02, 0.03]  # the larger, the better: the metric is monotone


LOG = {"lr": scipy.stats.loguniform(1e-3, 3e-2)}


def prox(lr: float, mu: float = 0.0) -> ft.Algorithm:
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=lr)
    return ft.fedprox(
        ft.gradient_descent(linear(), epochs=1, batch_size=4, loss=mean_squared_error, optimizer=optimizer), mu
    )


def scaffold(lr: float) -> ft.Algorithm:
    """Whose clients have states of their own."""
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=lr)
    local = ft.gradient_descent(linear(), epochs=1, batch_size=4, loss=mean_squared_error, optimizer=optimizer)
    return ft.scaffold(local)


def searched(space: Any, build: Any = prox, **arguments: Any) -> Trials:
    given = {"validation": VALIDATION, "metric": ft.metrics.mean_squared_error(), "rounds": 9, "trials": 9, "seed": 5}
    given |= {"population": ft.InProcess(TRAINING), "progress": False, **arguments}
    return ft.tune(build, space, given.pop("population"), **given)


def untimed(flat: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: leaf for name, leaf in flat.items() if "seconds" not in name}


@pytest.mark.parametrize("build", [prox, scaffold])
def test_trials_are_runs_of_so_many_rounds(build: Any) -> None:
    """To the bit, also where they went on from rung to rung."""
    more = {"cohort": 4, "faults": ft.lost_messages(after=0.2)}
    result = searched(LOG, build, trials=5, rounds=6, factor=2, **more)
    for setting, score, rounds in zip(result.settings, result.scores, result.rounds):
        run = ft.run(build(**setting), ft.InProcess(TRAINING), rounds=rounds, seed=5, progress=False, **more)
        assert run.evaluate(VALIDATION, {"": ft.metrics.mean_squared_error()})[""].overall == score.overall
        if setting == result.best:
            assert same_bits(*(untimed(each.state_dict()) for each in (result.run, run)))
    assert {6} < set(result.rounds) <= {1, 2, 4, 6}


def test_the_table_has_a_row_a_trial_the_ones_that_went_further_first() -> None:
    result = searched(LOG)
    table = result.table
    assert list(table)[:3] == ["lr", "rounds", "mean over clients"]
    assert table["rounds"].tolist() == sorted(result.rounds, reverse=True)
    whole = table["mean over clients"][table["rounds"] == 9].tolist()
    assert whole == sorted(whole)
    assert table["lr"][0] == result.best["lr"] == result.study.best_params["lr"]


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_settings_are_drawn_by_the_seed_and_no_global_generator_is_read(search: str) -> None:
    space = {**LOG, "mu": [0.0, 0.1, 1.0]}
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    one, again, other = (searched(space, trials=3, rounds=1, seed=seed, search=search).settings for seed in (5, 5, 6))
    assert one == again != other
    assert all(type(value) is float and 0 <= value <= 1 for setting in one for value in setting.values())
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


@pytest.mark.slow
def test_runs_that_ended_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[ft.Run] = weakref.WeakSet()
    most = []

    class Watched(ft.Run):
        def __init__(self, *arguments: Any, **others: Any) -> None:
            super().__init__(*arguments, **others)
            alive.add(self)
            gc.collect()
            most.append(len(alive))

    monkeypatch.setattr(studies, "Run", Watched)
    result = searched(LOG)
    assert max(most) == 2 + 1  # the best one, the last one and the new one
    gc.collect()
    assert set(alive) == {result.run}


class Flat(nn.Module):
    """The linear model without a last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.line = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)[..., 0]


def test_trials_that_diverge_end_there() -> None:
    result = searched({"lr": [0.01, 1e200]}, search="random", trials=6, rounds=4)
    wrong = [i for i, setting in enumerate(result.settings) if setting["lr"] > 1]
    assert 0 < len(wrong) < 6
    assert [i for i in range(6) if result.diverged[i]] == wrong == sorted(result.order[-len(wrong) :])
    assert [trial.state.name == "PRUNED" for trial in result.study.trials if trial.number in wrong] == [True] * len(
        wrong
    )
    assert result.best == {"lr": 0.01}
    assert result.table["mean over clients"].isna().sum() == len(wrong)
    hopeless = searched({"lr": [1e150, 1e200, 1e250]}, trials=3)
    for take in (lambda: hopeless.run, lambda: hopeless.best):
        with pytest.raises(ValueError, match="Expected a setting that converges, but all 3 diverged"):
            take()


def test_a_fraction_is_held_out_over_ranks_too() -> None:
    results = [
        searched(LOG, population=population(DATA), validation=0.3, trials=3, rounds=3)
        for population in (ft.InProcess, ft.Distributed)
    ]
    assert results[0].table.equals(results[1].table)


def test_clients_with_loaders_are_scored_on_theirs() -> None:
    """As on the same rows."""
    held = [
        ft.data.from_loaders(
            {name: DataLoader(TensorDataset(*rows), batch_size=4) for name, rows in zip(data.names, data)}
        )
        for data in (TRAINING, VALIDATION)
    ]

    def build(lr: float) -> ft.Algorithm:
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=lr)
        loss = nn.functional.mse_loss
        return ft.fedavg(ft.gradient_descent(Flat(), epochs=1, loss=loss, optimizer=optimizer, batched=False))

    given = {"trials": 3, "rounds": 3, "population": ft.InProcess(held[0])}
    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    for lr in (0.001, 0.01, 1e200):
        study.enqueue_trial({"lr": lr})
    result = searched({"lr": [0.001, 0.01, 1e200]}, build, validation=held[1], search=study, **given)
    assert (result.best, sorted(result.rounds), sum(result.diverged)) == ({"lr": 0.01}, [1, 3, 3], 1)
    onto_rows = result.run.evaluate(VALIDATION, {"": ft.metrics.mean_squared_error()})[""]
    assert result.scores[result.order[0]].overall == pytest.approx(onto_rows.overall, rel=1e-12)
    with pytest.raises(TypeError, match="Expected validation= with loaders of the same clients"):
        searched({"lr": [0.001]}, build, validation=0.3, **{**given, "trials": 1})


def test_progress_over_rounds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHORT", 0.0)
    searched(LOG, progress=True)
    assert "9 trials: 81 of 81 rounds in " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"space": {"rate": [0.1]}}, TypeError, r"Expected settings among the parameters \['lr', 'mu'\] of build"),
        ({"space": {}}, ValueError, "Expected settings to try, but got none"),
        ({"space": {"lr": 0.1}}, ValueError, r"a list of values of lr, or a distribution such as scipy.* but got 0.1"),
        (
            {"space": {"lr": (1e-4, 1.0)}},
            ValueError,
            r"a list of values of lr, or .* \(0.0001, 1.0\), a list or a range",
        ),
        ({"space": {"lr": [0.1, 0.1]}}, ValueError, "Expected different values of lr"),
        (
            {"space": {"lr": [0.1], "mu": [-1.0, -2.0]}},
            ValueError,
            "Expected mu of at least 0, but got -",
        ),
        ({"rounds": 0}, ValueError, "Expected rounds of at least 1, but got 0"),
        ({"trials": 2.5}, ValueError, "Expected trials of at least 1, but got 2.5"),
        ({"factor": 1}, ValueError, "Expected factor of at least 2, but got 1"),
        ({"first": 0}, ValueError, "Expected first of at least 1, but got 0"),
        ({"validation": 1.5}, ValueError, "a fraction between 0 and 1, but got 1.5"),
        ({"cohort": 7}, ValueError, "Expected a cohort between 1 and the population's 6 clients, but got 7"),
        ({"population": DATA}, TypeError, "Expected clients in this process or over ranks, .* but got FederatedData"),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        searched(**{"space": {"lr": RATES}, **arguments})


def asynchronous(values: Sequence[Sequence[float]], factor: int) -> list[int]:
    """Return the rungs that each trial reaches, one after another: it goes on if it is among the best 1 / factor of
    those that came to the rung, itself included, or the best while there are fewer than `factor`."""
    seen: list[list[float]] = [[] for _ in values[0]]
    reached = []
    for trial in values:
        for k, value in enumerate(trial):
            seen[k].append(value)
            if k + 1 < len(trial) and value > sorted(seen[k])[max(1, len(seen[k]) // factor) - 1]:
                break
        reached.append(k)
    return reached


def test_optuna_prunes_by_asynchronous_halving() -> None:
    result = searched(LOG, search="tpe", trials=12)
    values = []
    for setting in result.settings:
        run = ft.Run(prox(**setting), ft.InProcess(TRAINING), seed=5)
        scores = [run.evaluate(VALIDATION, {"": ft.metrics.mean_squared_error()})[""] for _ in run.rounds(9)]
        values.append([scores[rounds - 1].mean() for rounds in (1, 3, 9)])
    assert list(result.rounds) == [(1, 3, 9)[k] for k in asynchronous(values, factor=3)]
    assert len(set(result.rounds)) > 1
    full = [i for i in range(12) if result.rounds[i] == 9]
    assert result.best == result.settings[min(full, key=lambda i: values[i][-1])]
    assert same_bits(result.run.server, ft.run(prox(**result.best), ft.InProcess(TRAINING), rounds=9, seed=5).server)
    again = searched(LOG, search="tpe", trials=12)
    assert again.settings == result.settings
    assert again.table.equals(result.table)


def test_custom_study_is_used() -> None:
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1), pruner=optuna.pruners.NopPruner())
    result = searched({**LOG, "mu": [0.0, 0.1]}, search=study, trials=4, rounds=3)
    assert result.rounds == (3, 3, 3, 3)
    assert [trial.params for trial in study.trials] == list(result.settings)
    assert [trial.value for trial in study.trials] == [score.mean() for score in result.scores]
    assert study.best_params == result.best
    searched({**LOG, "mu": [0.0, 0.1]}, search=study, trials=1, rounds=3)
    assert len(study.trials) == 5


def test_a_study_in_a_file_goes_on(tmp_path: Path) -> None:
    for whole in (2, 5):
        study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="rates", load_if_exists=True)
        result = searched(LOG, search=study, trials=whole if whole == 2 else 3, rounds=1)
        assert len(study.trials) == whole
    assert len(result.settings) == 3


def test_spaces_of_optuna() -> None:

    def build(make: Any, epochs: int, lr: float, mu: float) -> ft.Algorithm:
        optimizer = lambda parameters: make(parameters, lr=lr)
        local = ft.gradient_descent(linear(), epochs=epochs, loss=mean_squared_error, optimizer=optimizer)
        return ft.fedprox(local, mu)

    space = {"make": [torch.optim.SGD, torch.optim.Adam], "epochs": scipy.stats.randint(1, 3)}
    space |= {"lr": scipy.stats.uniform(0.01, 0.01), "mu": optuna.distributions.FloatDistribution(0.1, 0.5)}
    result = searched(space, build, search="tpe", trials=6, rounds=1)
    assert {setting["make"] for setting in result.settings} == {torch.optim.SGD, torch.optim.Adam}
    assert {setting["epochs"] for setting in result.settings} == {1, 2}
    assert all(0.01 <= setting["lr"] <= 0.02 and 0.1 <= setting["mu"] <= 0.5 for setting in result.settings)
    with pytest.raises(ValueError, match=r"Expected uniform, loguniform or randint .* for lr, but got norm"):
        searched({"lr": scipy.stats.norm()}, search="tpe")


def test_studies_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"a study with direction 'minimize', .* but got \['maximize'\]"):
        searched(LOG, search=optuna.create_study(direction="maximize"))
    with pytest.raises(ValueError, match="but got a study, which each rank would ask"):
        searched(LOG, search=optuna.create_study(), population=ft.Distributed(TRAINING))
    with pytest.raises(TypeError, match=r"Expected search='tpe', 'random' or an optuna.Study, but got 'grid'"):
        searched(LOG, search="grid")
    study = optuna.create_study()
    with pytest.raises(ValueError, match="Expected mu of at least 0") as caught:
        searched({"lr": [0.1], "mu": [-1.0]}, search=study)
    assert caught.value.__notes__[0] == "in build of the setting {'lr': 0.1, 'mu': -1.0}"
    assert [trial.state.name for trial in study.trials] == ["FAIL"]


def test_missing_optuna_names_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'fedtorch\[tune\]'"):
        searched(LOG, search="tpe")
