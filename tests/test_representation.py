"""What a REPL shows of runs, solvers and algorithms fits on a line and says what they are."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any
from xml.etree import ElementTree

import lightning as L
import pytest
import torch
from support.small_federations import Classifier, classes, solver
from torch import nn

import fedtorch as ft
from fedtorch._representation import LONGEST, method, one_line
from fedtorch.trust import attacks, privacy, robust
from fedtorch.trust.privacy.mechanisms.split_labels import PrivateLabels
from fedtorch.vfl.fit.run import VerticalRun
from fedtorch.vfl.nodes.iteration import Value
from fedtorch.vfl.rows.data import VerticalData
from fedtorch.vfl.rows.parties import Party

LINE = ft.Network.from_edges([(0, 1), (1, 2), (2, 3), (3, 4)])


SHOWN = {
    "solver": (solver, "gradient_descent(Classifier, epochs=2, batch_size=4"),
    "least squares": (lambda: ft.least_squares(nn.Linear(2, 1)), "least_squares(Linear)"),
    "a Trainer": (
        lambda: ft.lightning_fit(Classifier(), max_epochs=1, callbacks=[L.Callback()]),
        "lightning_fit(Classifier, ",
    ),
    "fedavg": (lambda: ft.fedavg(solver(), mu=0.1), "fedavg(gradient_descent(Classifier, epochs=2, "),
    "personal": (lambda: ft.personal_layers(solver(), "head.*"), "personal_layers(gradient_descent(Classifier, "),
    "gtv": (lambda: ft.gtv(solver(), LINE, alpha=0.1), "gtv(gradient_descent(Classifier, "),
    "wrapped": (
        lambda: ft.fedavg(solver()) | attacks.sign_flip([0]) | robust.rule(robust.median()),
        "fedavg(gradient_descent(Classifier, …), …) | attacks.sign_flip(…) | robust.rule(…)",
    ),
    "private": (
        lambda: ft.fedavg(solver()) | privacy.client_level(clip=1.0, noise=1.0, delta=1e-5, sampling_rate=0.5),
        "fedavg(gradient_descent(Classifier",
    ),
    "unnamed": (lambda: dataclasses.replace(ft.fedavg(solver()), settings={}), "algorithm()"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_solvers_and_algorithms_are_a_line(name: str) -> None:
    make, beginning = SHOWN[name]
    text = repr(make())
    assert text.startswith(beginning)
    assert len(text) <= LONGEST
    assert "\n" not in text
    assert " at 0x" not in text


def test_runs_and_federations_are_a_line() -> None:
    algorithm, population = ft.fedavg(solver()), ft.InProcess(classes())
    run = ft.Run(algorithm, population)
    assert repr(run).startswith("Run(fedavg(gradient_descent(Classifier, ")
    assert repr(run).endswith(", 5 clients, round 0)")
    run.step()
    loss = f"{float(run.last.info['loss'].mean()):.3g}"
    assert repr(run).endswith(f"kB down, train_loss {loss})")
    assert len(repr(run)) <= LONGEST
    assert repr(ft.Federation(algorithm, population)).startswith("Federation(fedavg(")
    again = ft.Run(algorithm, population)
    again.load_state_dict(run.state_dict())
    assert repr(again).endswith("kB down)")


def test_vertical_fits_are_a_line() -> None:
    run = VerticalRun(["north", "south"], {"algorithm": "sfvi", "lr": 0.1})
    assert repr(run) == "VerticalRun(sfvi(lr=0.1), 2 parties, round 0)"


def cells(shown: Any) -> dict[str, str]:
    """Names and numbers of what a notebook shows, and what it is under ""."""
    (table,) = [ElementTree.fromstring(shown._repr_html_())]
    titles = [title.text for title in table.iter("th") if title.get("scope") is None]
    return {
        "": titles[0] or "",
        **{row[0].text or "": row[1].text or "" for row in table.iter("tr") if row[0].get("scope")},
    }


def test_notebooks_show_a_table_of_numbers_that_the_line_has_too() -> None:
    algorithm, population = ft.fedavg(solver()), ft.InProcess(classes())
    run = ft.Run(algorithm, population)
    assert cells(run) == {"": "Run", "method": cells(run)["method"], "clients": "5", "rounds": "0"}
    assert cells(run)["method"].startswith("fedavg(gradient_descent(Classifier, ")
    round = next(run.rounds(7, until=lambda history: True))
    for _ in run.rounds(7, until=lambda history: True):
        pass
    found = cells(run)
    assert found["ended"] == "stopped after 1 of 7 rounds by until="
    assert repr(run).endswith(f"{found['sent down']} down, train_loss {found['train_loss']})")
    assert cells(round)[""] == "Round 1"
    assert cells(round)["clients that answered"] == "5 of 5"
    assert f"{cells(round)['bytes up']} B up" in repr(round)
    assert cells(ft.Federation(algorithm, population))[""] == "Federation"
    vertical = VerticalRun(["north", "south"], {"algorithm": "sfvi <lr>", "lr": 0.1})
    assert cells(vertical) == {"": "VerticalRun", "method": "sfvi <lr>(lr=0.1)", "parties": "2", "rounds": "0"}


def test_rounds_name_the_clients_that_did_not_answer() -> None:
    wards = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0]))] * 6, [f"ward {k}" for k in range(6)])
    late = ft.Faults(after=lambda keys, ids: ids % 3 == 1, before=lambda keys, ids: ids == 5)
    algorithm = ft.fedavg(ft.least_squares(nn.Linear(2, 1)))
    round = ft.Run(algorithm, ft.InProcess(wards), faults=late).step()
    assert round.named(round.ids) == ["ward 0", "ward 2", "ward 3"]
    assert (round.named(round.lost_after), round.named(round.lost_before)) == (["ward 1", "ward 4"], ["ward 5"])
    assert repr(round).startswith("Round(1: 3 of 6 clients answered, not reached: ward 5, lost: ward 1, ward 4, ")
    assert cells(round)["lost"] == "ward 1, ward 4"
    every = ft.Faults(after=lambda keys, ids: ids >= 0)
    round = ft.Run(algorithm, ft.InProcess(wards), faults=every).step()
    assert "lost: ward 0, ward 1, ward 2 and 3 more" in repr(round)


def test_scores_in_notebooks_are_a_few_numbers_whatever_they_are_of() -> None:
    bad = torch.tensor([False, True])
    score = ft.Score(0.75, torch.tensor([0.5, 1.0]), largest_is_best=True, undefined=bad)
    numbers = {"all rows": "0.75", "clients": "2", "mean": "0.75", "worst": "0.5", "undefined": "1"}
    assert cells(score) == {"": "Score", **numbers}
    assert repr(score) == "Score(0.75 over all rows; 2 clients: mean 0.75, worst 0.5, 1 undefined)"
    matrix = ft.Score(torch.ones(2, 2), torch.ones(3, 2, 2))
    assert cells(matrix) == {"": "Score", "all rows": "a Tensor of shape (2, 2)", "clients": "3"}
    assert repr(matrix) == "Score(a Tensor of shape (2, 2) over all rows; 3 clients)"


def test_long_representations_are_cut() -> None:
    settings = {"algorithm": "a" * 200, "mu": 1.0}
    text = one_line(lambda most: method(settings, most))
    assert (len(text), text[-1]) == (LONGEST, "…")


PACKAGES = ("fedtorch.vfl", "fedtorch.protocol", "fedtorch.sites.vertical")
MODULES = (
    "fedtorch.models.own_encoders",
    "fedtorch.data.datasets.hearts",
    "fedtorch.sites.secure.vertical",
    "fedtorch.trust.attacks.split",
    "fedtorch.trust.privacy.mechanisms.split_labels",
)
NO_ROWS = {"Protocol", "Traffic", "Rate", "Kept"}  # names, settings, functions, counts
NO_ROWS |= {"Entered", "Held", "From", "Done"}  # how far a node has come
SETTINGS = {"Predictor", "ResponseLikelihood", "VerticalModel", "GaussianFamily", "Guide", "Auxiliary"}
SETTINGS |= {"HierarchicalBayes"}  # dataclasses of functions and of what a model is given


OWN_WORDS = {VerticalRun, PrivateLabels, Party, VerticalData}  # whose lines are tested by themselves


def classes_of_parties() -> list[type]:
    """The classes of vertical code, of its masks, noise and attacks, and of the table that parties are made of."""
    names = [*PACKAGES, *MODULES]
    for package in map(importlib.import_module, PACKAGES):
        names += [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    found: list[type] = []
    for name in names:
        here = [each for each in vars(importlib.import_module(name)).values() if isinstance(each, type)]
        found += [each for each in here if each.__module__ == name]
    return [each for each in found if each.__qualname__ not in NO_ROWS | SETTINGS]


def is_filled(kind: type) -> bool:
    """Whether a class is a tuple or dataclass whose representation is of its fields, whatever they are."""
    return kind not in OWN_WORDS and (issubclass(kind, tuple) or dataclasses.is_dataclass(kind))


def filled(kind: type, value: Any) -> Any:
    """An object whose every field is `value`, unchecked."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, [value] * len(kind._fields))  # type: ignore[attr-defined]
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(made, field.name, value)
    return made


def test_rows_of_parties_are_found_whatever_holds_their_tensors() -> None:
    names = {each.__qualname__ for each in classes_of_parties()}
    assert {
        "Laws",
        "_Sent",
        "_Message",
        "VerticalTable",
        "Value",
        "Party",
        "Send",
        "Words",
        "Holder",
        "PartyNode",
    } <= names
    assert {"VerticalData", "Aligned", "Points", "NoisedGradient", "Journal", "Part", "NodesRun"} <= names


@pytest.mark.parametrize("kind", list(filter(is_filled, classes_of_parties())), ids=lambda kind: kind.__qualname__)
def test_repr_of_parties_shows_shapes(kind: type) -> None:
    secret = torch.full((3, 2), 1234.5)
    held = (
        secret,
        ft.Sum(secret),
        {"age": secret},
        [torch.distributions.Normal(1234.5, 1.0)],
        Value(secret),
        (1234.5,),
        b"1234",
    )
    for value in held:
        shown = repr(filled(kind, value))
        assert "1234" not in shown
        assert "\n" not in shown


@pytest.mark.parametrize(
    "kind", [each for each in classes_of_parties() if not is_filled(each)], ids=lambda kind: kind.__qualname__
)
def test_repr_of_party_objects_shows_no_rows(kind: type) -> None:
    """An address, the layers of a module, settings of an optimiser, or words of an error."""
    owner = next(base for base in kind.__mro__ if "__repr__" in vars(base))
    assert owner in {object, type, nn.Module, BaseException, torch.optim.Optimizer} | OWN_WORDS
    if issubclass(kind, nn.Module):
        assert kind.extra_repr in (nn.Module.extra_repr, nn.Linear.extra_repr)
