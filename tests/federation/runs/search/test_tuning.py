"""A grid gives for every setting what an ordinary run of that setting gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torchmetrics
from support.oracles.closed_forms import ROUNDING, linear, linear_clients, mean_squared_error
from support.small_federations import Classifier, classes
from torch import nn

import fedtorch as ft
from fedtorch import progress
from fedtorch.federation.runs.evaluation import evaluate
from fedtorch.federation.runs.search.tuning import GridSearch

SIZES = [5, 9, 4, 14, 7, 9]
DATA = linear_clients(SIZES)
TRAINING, VALIDATION = DATA.split(0.7, seed=3)
Optimizer = Callable[[Any], torch.optim.Optimizer]


def descent(optimizer: Optimizer, module: nn.Module | None = None, **arguments: Any) -> ft.LocalSolver:
    """Two passes in minibatches of four."""
    return ft.gradient_descent(
        linear() if module is None else module,
        **{"epochs": 2, "batch_size": 4, "loss": mean_squared_error, "optimizer": optimizer, **arguments},
    )


def sgd(lr: float) -> Optimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def searched(build: Callable[..., ft.Algorithm], settings: dict[str, Sequence[Any]], **arguments: Any) -> GridSearch:
    """A grid over the linear clients, scored by squared errors."""
    given = {"validation": VALIDATION, "metric": ft.metrics.mean_squared_error(), "rounds": 4, "seed": 5}
    given["population"] = ft.InProcess(TRAINING)
    population = {**given, **arguments}.pop("population")
    rest = {name: value for name, value in {**given, **arguments}.items() if name != "population"}
    return ft.grid(build, settings, population, **{"largest_is_best": False, "progress": False, **rest})


def alone(algorithm: ft.Algorithm, rounds: int = 4, **arguments: Any) -> ft.Score:
    """The score of an ordinary run."""
    given = {"validation": VALIDATION, "metric": ft.metrics.mean_squared_error(), "population": ft.InProcess(TRAINING)}
    given.update(arguments)
    validation, metric, population = (given.pop(name) for name in ("validation", "metric", "population"))
    final = ft.run(algorithm, population, seed=5, **given, rounds=rounds).last
    assert algorithm.predict is not None
    outbox = algorithm.outbox(final.server)
    return evaluate(final.clients, outbox, algorithm.predict, validation, {"": metric})[""]


def assert_same(
    result: GridSearch, build: Callable[..., ft.Algorithm], rounding: float = ROUNDING, **kwargs: Any
) -> None:
    assert len({score.overall for score in result.scores}) == len(result.settings)  # settings make a difference
    for setting, score in zip(result.settings, result.scores):
        expected = alone(build(**setting), **kwargs)
        assert score.overall == pytest.approx(expected.overall, rel=rounding, abs=rounding), setting
        torch.testing.assert_close(score.clients, expected.clients, rtol=rounding, atol=rounding, equal_nan=True)


class Lit(Classifier):
    """The classifier with dropout, whose learning rate and decay are its own."""

    def __init__(self, lr: float, gamma: float = 0.9, dropout: float = 0.2) -> None:
        super().__init__()
        self.lr, self.gamma = lr, gamma
        self.body[2] = nn.Dropout(dropout)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, self.gamma)]


LR = {"lr": [0.01, 0.03, 0.1]}
# A grid is a loop over runs: what is tried are the ways in which settings meet, not every algorithm once more.
CASES: dict[str, tuple[Callable[..., ft.Algorithm], dict[str, list[Any]], int | None]] = {
    "two settings": (
        lambda lr, momentum: ft.fedavg(descent(lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum))),
        {"lr": [0.01, 0.03], "momentum": [0.0, 0.9]},
        None,
    ),
    "different optimisers": (
        lambda make: ft.fedavg(descent(lambda p: make(p, lr=0.05))),
        {"make": [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad]},
        3,
    ),
    "kept moments": (
        lambda lr: ft.fedavg(descent(lambda p: torch.optim.Adam(p, lr=lr), reset="never", steps=3, epochs=None)),
        LR,
        3,
    ),
    "totals": (lambda lr: ft.scaffold(descent(sgd(lr))), LR, 3),
    "personal parameters": (lambda strength: ft.ditto(descent(sgd(0.1)), strength), {"strength": [0.1, 1.0]}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_every_setting_is_an_ordinary_run(case: str) -> None:
    build, settings, cohort = CASES[case]
    result = searched(build, settings, cohort=cohort)
    assert_same(result, build, cohort=cohort)


def lightning(lr: float, gamma: float = 0.9, dropout: float = 0.2) -> ft.Algorithm:
    return ft.fedavg(ft.gradient_descent(Lit(lr, gamma, dropout), epochs=2, batch_size=4))


@pytest.mark.parametrize(
    "settings", [{"lr": [0.05, 0.2], "gamma": [0.9, 0.3]}, {"lr": [0.05, 0.2], "dropout": [0.1, 0.3]}]
)
def test_settings_of_a_lightning_module(settings: dict[str, list[float]]) -> None:
    data = classes([8, 8, 6])
    metric = ft.metrics.cross_entropy()
    arguments: dict[str, Any] = {"population": ft.InProcess(data), "validation": data, "metric": metric, "rounds": 2}
    result = searched(lightning, settings, **arguments)
    assert_same(result, lightning, 1e-5, **arguments)  # float32: eight steps of 1e-7 each, and a margin


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (
            lambda delta: ft.fedavg(
                descent(sgd(0.1), loss=lambda o, y: nn.functional.huber_loss(o[:, 0], y, delta=delta))
            ),
            {"delta": [0.1, 2.0]},
        ),
        (lambda size: ft.fedavg(descent(sgd(0.1), batch_size=size)), {"size": [2, 4]}),
        (lambda epochs: ft.fedavg(descent(sgd(0.1), epochs=epochs)), {"epochs": [1, 2]}),
        (lambda mu: ft.fedprox(ft.least_squares(linear()), mu), {"mu": [0.1, 1.0]}),
        (
            lambda algorithm: algorithm(descent(sgd(0.03))),
            {"algorithm": [ft.fedavg, ft.scaffold, ft.separate, lambda local: ft.ditto(local, 1.0)]},
        ),
    ],
)
def test_settings_of_other_kinds(build: Any, settings: Any) -> None:
    assert_same(searched(build, settings), build)


def prox(lr: float, mu: float = 0.0) -> ft.Algorithm:
    return ft.fedprox(descent(sgd(lr)), mu)


def test_a_setting_that_diverges_is_named_and_leaves_the_others_alone() -> None:
    result = searched(prox, {"lr": [0.03, 1e200, 0.1, 500.0]}, rounds=40)
    assert result.diverged == (False, True, False, True)
    table = result.table
    assert table["diverged"].tolist() == [False, False, True, True]
    assert table["lr"][2:].tolist() == [1e200, 500.0]
    assert table.loc[2:, ["mean over clients", "sd over clients", "worst client", "all rows"]].isna().all(axis=None)
    assert result.best["lr"] in (0.03, 0.1)
    for i in (0, 2):
        assert result.scores[i].overall == pytest.approx(alone(prox(**result.settings[i]), 40).overall, rel=ROUNDING)


def test_a_client_that_diverges_by_itself_is_noticed() -> None:
    """Separate training has no server whose state could tell."""
    result = searched(lambda lr: ft.separate(descent(sgd(lr))), {"lr": [0.01, 1e100]}, rounds=3)
    assert result.diverged == (False, True)


def test_there_is_no_best_of_settings_that_all_diverge() -> None:
    result = searched(prox, {"lr": [1e150, 1e200]}, rounds=10)
    assert result.diverged == (True, True)
    with pytest.raises(ValueError, match="Expected a setting that converges, but all 2 diverged"):
        _ = result.best


def test_table_is_sorted_with_spread_over_clients() -> None:
    result = searched(prox, {"lr": [0.001, 0.03, 0.1], "mu": [0.0, 1.0]}, rounds=2)
    table = result.table
    assert table["mean over clients"].is_monotonic_increasing
    assert result.best == table[["lr", "mu"]].iloc[0].to_dict()
    for _, row in table.iterrows():
        i = result.settings.index({"lr": row["lr"], "mu": row["mu"]})
        clients = result.scores[i].clients
        assert row["mean over clients"] == pytest.approx(float(clients.mean()), rel=1e-12)
        assert row["sd over clients"] == pytest.approx(float(clients.std()), rel=1e-12)
        assert row["worst client"] == float(clients.max())
        assert row["all rows"] == result.scores[i].overall
    turned = searched(prox, {"lr": [0.001, 0.1]}, rounds=2, largest_is_best=True)
    assert turned.best == {"lr": 0.001}
    assert turned.table["worst client"].tolist() == [float(score.clients.min()) for score in turned.scores]


def test_a_fraction_is_held_out_of_every_client() -> None:
    result = searched(prox, {"lr": [0.01, 0.1]}, population=ft.InProcess(DATA, chunk=2), validation=0.3)
    training, validation = DATA.split(0.7, 5)
    arguments = {"population": ft.InProcess(training), "validation": validation}
    assert_same(result, prox, **arguments)


def test_faults_and_chunks_are_those_of_a_run() -> None:
    population = ft.InProcess(TRAINING, chunk=2)
    arguments = {"population": population, "faults": ft.lost_messages(after=0.4), "cohort": 4}
    build, settings, _ = CASES["totals"]
    assert_same(searched(build, settings, **arguments), build, **arguments)


def test_modules_made_by_build_start_alike_and_the_global_generator_stays() -> None:
    starts = []

    def build(lr: float) -> ft.Algorithm:
        local = descent(sgd(lr), nn.Linear(3, 1, dtype=torch.float64))
        starts.append(local.parameters["weight"])
        return ft.fedavg(local)

    before = torch.get_rng_state()
    searched(build, {"lr": [0.01, 0.1]})
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*starts)


def test_progress_over_rounds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHORT", 0.0)
    searched(prox, {"lr": [0.01, 1e200]}, progress=True)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("2 settings: 8 of 8 rounds in ")
    assert last.endswith("diverged 1")


def test_metrics_that_keep_examples_compare_and_matrices_do_not() -> None:
    def build(lr: float) -> ft.Algorithm:
        start = nn.Linear(4, 3)
        nn.init.zeros_(start.weight), nn.init.zeros_(start.bias)
        return ft.fedavg(descent(sgd(lr), start, loss=nn.functional.cross_entropy, epochs=1))

    auroc = torchmetrics.AUROC("multiclass", num_classes=3)
    given = {"population": ft.InProcess(classes()), "validation": classes(), "rounds": 1, "largest_is_best": None}
    result = searched(build, {"lr": [0.001, 0.1]}, metric=auroc, **given)
    assert result.largest_is_best
    run = ft.run(build(0.1), given["population"], rounds=1, seed=5)
    assert result.scores[1].overall == run.evaluate(classes(), {"": auroc})[""].overall
    matrix = torchmetrics.ConfusionMatrix("multiclass", num_classes=3)
    with pytest.raises(TypeError, match=r"one number to compare settings by, but got one of shape \(3, 3\)"):
        searched(build, {"lr": [0.1]}, metric=matrix, **{**given, "largest_is_best": True})
    several = torchmetrics.MetricCollection([auroc, matrix])
    with pytest.raises(TypeError, match="Expected one metric to compare settings by, but got 2; pass one of them"):
        searched(build, {"lr": [0.1]}, metric=several, **given)


def test_a_client_whose_outputs_are_not_finite_is_noticed_by_metrics_that_keep_examples() -> None:
    def build(scale: float) -> ft.Algorithm:
        made = ft.fedavg(descent(sgd(0.1), nn.Linear(4, 3), loss=nn.functional.cross_entropy, epochs=1))
        predict = made.predict
        assert predict is not None
        wrong = lambda x: torch.where((x[..., :1] > 0.0) & (torch.tensor(scale) < 0.0), torch.nan, scale)
        return dataclasses.replace(made, predict=lambda tensors, x: predict(tensors, x) * wrong(x))

    given = {"population": ft.InProcess(classes()), "validation": classes(), "rounds": 1, "largest_is_best": None}
    auroc = torchmetrics.AUROC("multiclass", num_classes=3)
    result = searched(build, {"scale": [-1.0, 1.0, -2.0]}, metric=auroc, **given)
    assert result.diverged == (True, False, True)
    assert result.best == {"scale": 1.0}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rate": [0.1]}, TypeError, r"Expected settings among the parameters \['lr', 'mu'\] of build, .* \['rate'\]"),
        ({"mu": [0.1]}, TypeError, r"Expected values for all that build needs, but got none for \['lr'\]"),
        ({}, ValueError, "Expected settings to try, but got none"),
        ({"lr": []}, ValueError, r"Expected a list of values of lr, but got \[\]"),
        ({"lr": 0.1}, ValueError, "Expected a list of values of lr, but got 0.1"),
        ({"lr": [0.1, 0.1]}, ValueError, "Expected different values of lr"),
        ({"lr": [0.1], "mu": [-1.0]}, ValueError, "Expected mu of at least 0, but got -1.0"),
    ],
)
def test_settings_that_cannot_be(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        searched(prox, settings)
    if settings.get("mu") == [-1.0]:
        assert raised.value.__notes__ == ["in build of the setting {'lr': 0.1, 'mu': -1.0}"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"validation": linear_clients([4, 4])}, ValueError, "Expected validation rows of the population's 6 clients"),
        (
            {"validation": ft.data.FederatedData(VALIDATION.rows, VALIDATION.counts, tuple("abcdef"))},
            ValueError,
            "Expected validation rows of the same clients, but client 0 is 'a' there",
        ),
        ({"validation": 1.5}, ValueError, "a fraction between 0 and 1, but got 1.5"),
        ({"rounds": 0}, ValueError, "Expected at least one round, but got 0"),
        ({"cohort": 7}, ValueError, "Expected a cohort between 1 and the population's 6 clients, but got 7"),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        searched(prox, {"lr": [0.1]}, **arguments)


class Logging(Lit):
    """What its own validation step logs is compared."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))


def test_settings_are_compared_by_what_the_module_logs_itself() -> None:
    training, validation = classes().split(0.7, seed=0)
    build = lambda lr: ft.fedavg(ft.gradient_descent(Logging(lr, dropout=0.0), epochs=1, batch_size=4))
    search = lambda **arguments: ft.grid(
        build, {"lr": [0.01, 0.2]}, ft.InProcess(training), validation=validation, rounds=2, progress=False, **arguments
    )
    logged = search(metric="val_loss", largest_is_best=False)
    loss = search(metric=nn.functional.cross_entropy)
    assert logged.order == loss.order
    for ours, theirs in zip(logged.scores, loss.scores):
        assert ours.overall == pytest.approx(theirs.overall, rel=1e-5)
    with pytest.raises(ValueError, match=r"one of \['val_loss'\], but got 'val_auroc'"):
        search(metric="val_auroc", largest_is_best=True)
    with pytest.raises(ValueError, match=r"largest_is_best=True .* but got metric='val_loss' alone"):
        search(metric="val_loss")


def test_build_returns_an_algorithm() -> None:
    with pytest.raises(TypeError, match="Expected build to return an Algorithm"):
        searched(lambda lr: descent(sgd(lr)), {"lr": [0.1]})  # type: ignore[arg-type, return-value]
