"""What a REPL shows of runs, solvers and algorithms fits on a line and says what they are."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import lightning as L
import pytest
import torch
from support.small_federations import Classifier, classes, solver
from torch import nn

import fedtorch as ft
from fedtorch._representation import LONGEST, method, one_line
from fedtorch.data.datasets.hearts import VerticalTable
from fedtorch.trust import attacks, privacy, robust
from fedtorch.vfl.fit.run import VerticalRun
from fedtorch.vfl.nodes.iteration import Value

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


def test_what_does_not_fit_is_cut() -> None:
    settings = {"algorithm": "a" * 200, "mu": 1.0}
    text = one_line(lambda most: method(settings, most))
    assert (len(text), text[-1]) == (LONGEST, "…")


NO_ROWS = {"_Parties", "_Method", "Protocol"}  # names of parties, settings, functions


def rows_of_parties() -> list[type]:
    """The NamedTuples of vertical code, and the table of which parties are made."""
    found: list[type] = [VerticalTable]
    for package in (ft.vfl, importlib.import_module("fedtorch.sites.vertical")):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            here = [each for each in vars(importlib.import_module(info.name)).values() if isinstance(each, type)]
            found += [each for each in here if issubclass(each, tuple) and each.__module__ == info.name]
    return [each for each in found if each.__annotations__ and each.__qualname__ not in NO_ROWS]


def test_rows_of_parties_are_found_whatever_holds_their_tensors() -> None:
    assert {"Laws", "_Sent", "_Told", "VerticalTable", "Value"} <= {each.__qualname__ for each in rows_of_parties()}


@pytest.mark.parametrize("kind", rows_of_parties(), ids=lambda kind: kind.__qualname__)
def test_what_parties_keep_is_shown_by_its_shapes(kind: type) -> None:
    secret = torch.full((3, 2), 1234.5)
    held = (
        secret,
        ft.Sum(secret),
        {"age": secret},
        [torch.distributions.Normal(1234.5, 1.0)],
        Value(secret),
        (1234.5,),
    )
    for value in held:
        shown = repr(kind(*([value] * len(kind._fields))))
        assert "1234" not in shown
        assert "\n" not in shown
