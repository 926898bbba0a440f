"""A search by successive halving: its schedule, its trials against ordinary runs, and what is kept meanwhile."""

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
from support.oracles.closed_forms import linear, linear_clients, mean_squared_error, same_bits, sgd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedtorch as ft
from fedtorch import progress
from fedtorch.federation.runs.search import successive_halving
from fedtorch.federation.runs.search._trial import folder_of
from fedtorch.federation.runs.search.successive_halving import Trials, planned, rungs

DATA = linear_clients([5, 9, 4, 14, 7, 9])
TRAINING, VALIDATION = DATA.split(0.7, seed=3)
RATES = [0.001, 0.003, 0.005, 0.008, 0.01, 0.012, 0.015, 0.02, 0.03]  # the larger, the better: the metric is monotone


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


@pytest.mark.parametrize(
    ("arguments", "ladder", "spent"),
    [
        ((9, 9, 3, 1), [1, 3, 9], 9 * 1 + 3 * 2 + 1 * 6),
        ((16, 8, 2, 1), [2, 4, 8, 16], 8 * 2 + 4 * 2 + 2 * 4 + 1 * 8),
        ((50, 27, 3, 1), [1, 5, 16, 50], 27 * 1 + 9 * 4 + 3 * 11 + 1 * 34),
        ((50, 27, 3, 5), [5, 16, 50], 27 * 5 + 9 * 11 + 3 * 34),
        ((20, 10, 4, 1), [5, 20], 10 * 5 + 2 * 15),
        ((2, 100, 3, 1), [2], 200),
        ((7, 2, 3, 1), [7], 14),
    ],
)
def test_the_schedule_by_hand(arguments: tuple[int, int, int, int], ladder: list[int], spent: int) -> None:
    assert rungs(*arguments) == ladder
    assert planned(ladder, *arguments[1:3]) == spent


def test_a_full_bracket_has_the_rounds_of_its_formula() -> None:
    """Of n = f^s trials and R = f^s r rounds each halving costs n r (1 − 1/f), after n r before the first."""
    for factor, halvings, first in ((2, 4, 1), (3, 3, 2), (4, 2, 5)):
        trials, rounds = factor**halvings, first * factor**halvings
        formula = trials * first * (1 + halvings * (1 - 1 / factor))
        assert planned(rungs(rounds, trials, factor), trials, factor) == pytest.approx(formula, rel=1e-12)


@pytest.fixture(scope="module")
def monotone() -> Trials:
    return searched({"lr": RATES})


@pytest.mark.slow
def test_where_the_metric_is_monotone_it_is_the_best_of_the_grid(monotone: Trials) -> None:
    metric = ft.metrics.mean_squared_error()
    full = ft.grid(prox, {"lr": RATES}, ft.InProcess(TRAINING), validation=VALIDATION, metric=metric, rounds=9, seed=5)
    assert monotone.best == full.best == {"lr": 0.03}
    assert sorted(setting["lr"] for setting in monotone.settings) == RATES
    assert sum(monotone.rounds) == 21
    best = full.settings.index(full.best)
    assert monotone.table["mean over clients"][0] == full.scores[best].mean()


def test_the_table_has_a_row_a_trial_the_ones_that_went_further_first(monotone: Trials) -> None:
    table = monotone.table
    assert list(table)[:3] == ["lr", "rounds", "mean over clients"]
    assert table["rounds"].tolist() == [9, 3, 3, 1, 1, 1, 1, 1, 1]
    assert table["lr"].tolist() == RATES[::-1]


def test_halving_is_that_of_a_plain_loop() -> None:
    """Of six rates: all for a round, the best three to the second, the best of these to the fourth."""
    rates = [0.003, 0.02, 0.05, 0.09, 0.13, 0.2]
    result = searched({"lr": rates}, lambda lr: ft.fedavg(sgd(lr)), trials=6, rounds=4, factor=2)

    def score(rate: float, rounds: int) -> float:
        weight, total = linear().requires_grad_(), 0.0
        for _ in range(rounds):
            ends = []
            for x, y in TRAINING:
                own = [leaf.detach().clone().requires_grad_() for leaf in weight.parameters()]
                slopes = torch.autograd.grad(mean_squared_error(nn.functional.linear(x, *own), y), own)
                ends.append([(leaf - rate * slope).detach() * len(y) for leaf, slope in zip(own, slopes)])
            for leaf, parts in zip(weight.parameters(), zip(*ends)):
                leaf.data = sum(parts) / sum(len(y) for _, y in TRAINING)
        for x, y in VALIDATION:
            total += float(mean_squared_error(weight(x), y).detach()) / len(VALIDATION)
        return total

    left = rates
    for rounds, most in ((1, 3), (2, 1), (4, 1)):
        scores = {rate: score(rate, rounds) for rate in left}
        left = sorted(left, key=scores.__getitem__)[:most]
    assert rungs(4, 6, 2) == [1, 2, 4]
    assert result.best["lr"] == left[0]
    assert result.scores[result.settings.index(result.best)].mean() == pytest.approx(scores[left[0]], rel=1e-9)


def untimed(flat: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: leaf for name, leaf in flat.items() if "seconds" not in name}


@pytest.mark.parametrize("build", [prox, scaffold])
def test_trials_go_on_from_where_they_stand(build: Any) -> None:
    """Each is the run of that many rounds, to the bit."""
    result = searched({"lr": RATES[::3]}, build, trials=3, rounds=6, cohort=4, faults=ft.lost_messages(after=0.2))
    for setting, score, rounds in zip(result.settings, result.scores, result.rounds):
        run = ft.run(
            build(**setting),
            ft.InProcess(TRAINING),
            rounds=rounds,
            seed=5,
            cohort=4,
            faults=ft.lost_messages(after=0.2),
            progress=False,
        )
        assert run.evaluate(VALIDATION, {"": ft.metrics.mean_squared_error()})[""].overall == score.overall
        if rounds == 6:
            assert same_bits(*(untimed(each.state_dict()) for each in (result.run, run)))
    assert sorted(result.rounds) == [2, 2, 6]


def test_settings_are_drawn_by_the_seed_and_no_global_generator_is_read() -> None:
    space = {"lr": scipy.stats.loguniform(1e-3, 3e-2), "mu": [0.0, 0.1, 1.0]}
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    one, again, other = (searched(space, trials=3, rounds=1, seed=seed).settings for seed in (5, 5, 6))
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

    monkeypatch.setattr(successive_halving, "Run", Watched)
    result = searched({"lr": RATES})
    assert max(most) == 1 + 9 // 3
    gc.collect()
    assert set(alive) == {result.run}


class Flat(nn.Module):
    """The linear model without a last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.line = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)[..., 0]


class Cut(Exception):
    """The process ends."""


def interrupted(folder: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends after so many rounds."""
    done = 0
    step = ft.Run.step

    def counted(run: ft.Run) -> ft.Round:
        nonlocal done
        done += 1
        if done > after:
            raise Cut
        return step(run)

    monkeypatch.setattr(ft.Run, "step", counted)
    with pytest.raises(Cut) as caught:
        searched({"lr": RATES}, folder=folder)
    monkeypatch.setattr(ft.Run, "step", step)
    assert caught.value.__notes__[0].startswith("in a trial of the setting {'lr': 0.0")


@pytest.mark.parametrize("after", [4, 9, 12, 20])
def test_an_interrupted_search_goes_on(
    after: int, tmp_path: Path, monotone: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path / "search", after, monkeypatch)
    steps = []
    step = ft.Run.step
    monkeypatch.setattr(ft.Run, "step", lambda run: steps.append(run.number) or step(run))
    result = searched({"lr": RATES}, folder=tmp_path / "search")
    assert len(steps) <= 21 - after + 6  # at most a rung of one trial is done again
    assert result.settings == monotone.settings
    assert result.rounds == monotone.rounds
    assert result.table.equals(monotone.table)
    assert same_bits(result.run.server, monotone.run.server)
    assert result.run.history.drop(columns="seconds").equals(monotone.run.history.drop(columns="seconds"))
    assert len(list((tmp_path / "search").glob("*.run.safetensors"))) == 1  # of the best alone
    steps.clear()
    done = searched({"lr": RATES}, folder=tmp_path / "search")
    assert steps == []
    assert done.scores[0].worst() == monotone.scores[0].worst()
    assert done.table.equals(monotone.table)


def test_the_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    few = {"trials": 3, "rounds": 1, "folder": tmp_path / "search"}
    searched({"lr": RATES}, **few)
    changes = [({"seed": 6}, "settings"), ({"cohort": 3}, "cohort"), ({"rounds": 2}, "rounds")]
    for changed, name in [*changes, ({"build": lambda lr: prox(lr, 0.5)}, "build")]:
        with pytest.raises(ValueError, match=f"Expected the folder of a search with {name} .* a folder of its own"):
            searched({"lr": RATES}, **{**few, **changed})
    others = {"population": ft.InProcess(TRAINING.map(lambda rows: (rows[0], -rows[1])))}
    scored = {"validation": VALIDATION.map(lambda rows: (rows[0], -rows[1]))}
    for changed, name in ((others, "rows"), (scored, "validation rows"), ({"split": lambda rows: rows}, "split")):
        with pytest.raises(ValueError, match=f"Expected the folder of a search with {name} "):
            searched({"lr": RATES}, **{**few, **changed})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(ValueError, match="Expected an empty folder for a search"):
        searched({"lr": RATES}, **{**few, "folder": tmp_path / "other"})
    assert folder_of(tmp_path / "other", {}, writes=False).name == "other"  # of a rank while another makes the folder


def test_trials_that_diverge_end_there(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "search", tmp_path / "search"):
        result = searched({"lr": [*RATES[:7], 1e150, 1e200]}, rounds=18, folder=folder)
        wrong = [i for i, setting in enumerate(result.settings) if setting["lr"] > 1]
        assert [i for i in range(9) if result.diverged[i]] == wrong
        assert result.order[-2:] == wrong or result.order[-2:] == wrong[::-1]
        assert result.best == {"lr": 0.015}
        assert result.table["mean over clients"].isna().tolist() == [False] * 7 + [True] * 2
    hopeless = searched({"lr": [1e150, 1e200, 1e250]}, trials=3)
    for take in (lambda: hopeless.run, lambda: hopeless.best):
        with pytest.raises(ValueError, match="Expected a setting that converges, but all 3 diverged"):
            take()


def test_a_fraction_is_held_out_over_ranks_too() -> None:
    results = [
        searched({"lr": RATES}, population=population(DATA), validation=0.3, trials=3, rounds=3)
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
    result = searched({"lr": [0.001, 0.01, 1e200]}, build, validation=held[1], **given)
    assert (result.best, sorted(result.rounds), sum(result.diverged)) == ({"lr": 0.01}, [1, 1, 3], 1)
    onto_rows = result.run.evaluate(VALIDATION, {"": ft.metrics.mean_squared_error()})[""]
    assert result.scores[result.order[0]].overall == pytest.approx(onto_rows.overall, rel=1e-12)
    with pytest.raises(TypeError, match="Expected validation= with loaders of the same clients"):
        searched({"lr": [0.001]}, build, validation=0.3, **{**given, "trials": 1})


def test_progress_over_rounds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHORT", 0.0)
    searched({"lr": RATES}, progress=True)
    assert capsys.readouterr().err.splitlines()[-1].startswith("9 trials: 21 of 21 rounds in ")


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
            {"space": {"lr": [0.1, 0.2]}},
            ValueError,
            "Expected at most 2 trials, .* but got 9; ft.grid runs all",
        ),
        (
            {"space": {"lr": [0.1, 0.2, 0.3], "mu": [0.0, 0.1, -1.0]}},
            ValueError,
            "Expected mu of at least 0, but got -1",
        ),
        ({"rounds": 0}, ValueError, "Expected rounds of at least 1, but got 0"),
        ({"trials": 2.5}, ValueError, "Expected trials of at least 1, but got 2.5"),
        ({"factor": 1}, ValueError, "Expected factor of at least 2, but got 1"),
        ({"first": 0}, ValueError, "Expected first of at least 1, but got 0"),
        ({"validation": 1.5}, ValueError, "a fraction between 0 and 1, but got 1.5"),
        ({"cohort": 7}, ValueError, "Expected a cohort between 1 and the population's 6 clients, but got 7"),
        ({"population": DATA}, TypeError, "Expected clients in this process or over ranks, .* but got FederatedData"),
        ({"search": "tpe", "folder": "search"}, ValueError, "Expected no folder= for a search by Optuna"),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        searched(**{"space": {"lr": RATES}, **arguments})


# -- by Optuna ---------------------------------------------------------------------------------------------------------

LOG = {"lr": scipy.stats.loguniform(1e-3, 3e-2)}


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
    pytest.importorskip("optuna")
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


def test_a_study_of_ones_own_is_asked_and_told(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1), pruner=optuna.pruners.NopPruner())
    result = searched({**LOG, "mu": [0.0, 0.1]}, search=study, trials=4, rounds=3)
    assert result.rounds == (3, 3, 3, 3)
    assert [trial.params for trial in study.trials] == list(result.settings)
    assert [trial.value for trial in study.trials] == [score.mean() for score in result.scores]
    assert study.best_params == result.best
    searched({**LOG, "mu": [0.0, 0.1]}, search=study, trials=1, rounds=3)
    assert len(study.trials) == 5


def test_spaces_of_optuna() -> None:
    optuna = pytest.importorskip("optuna")

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
    with pytest.raises(ValueError, match=r"Expected uniform, loguniform or randint .* for lr .* but got norm"):
        searched({"lr": scipy.stats.norm()}, search="tpe")


def test_a_trial_of_optuna_that_diverges_is_pruned() -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    result = searched({"lr": [0.01, 1e200]}, search=study, trials=6, rounds=4)
    assert {trial.state.name for trial, bad in zip(study.trials, result.diverged) if bad} == {"PRUNED"}
    assert 0 < sum(result.diverged) < 6
    assert result.best == {"lr": 0.01}


def test_studies_that_cannot_be() -> None:
    optuna = pytest.importorskip("optuna")
    with pytest.raises(ValueError, match=r"a study with direction 'minimize', .* but got \['maximize'\]"):
        searched(LOG, search=optuna.create_study(direction="maximize"))
    with pytest.raises(ValueError, match="but got a study, which each rank would ask"):
        searched(LOG, search=optuna.create_study(), population=ft.Distributed(TRAINING))
    with pytest.raises(TypeError, match=r"Expected search='random', 'tpe' or an optuna.Study, but got 'grid'"):
        searched(LOG, search="grid")
    study = optuna.create_study()
    with pytest.raises(ValueError, match="Expected mu of at least 0") as caught:
        searched({"lr": [0.1], "mu": [-1.0]}, search=study)
    assert caught.value.__notes__[0] == "in build of the setting {'lr': 0.1, 'mu': -1.0}"
    assert [trial.state.name for trial in study.trials] == ["FAIL"]


def test_without_optuna_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'fedtorch\[tune\]'"):
        searched(LOG, search="tpe")
