"""The report of hierarchical models: names, each client's interval, convergence in words, organisations."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
from report.test_report import harmless
from support.sites import joined as joined_sites, offers

import fedtorch as ft
from fedtorch.federation.algorithms import ep
from fedtorch.inference.ranef import site_estimates
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import hyperpriors
from fedtorch.report._convergence import propagation
from fedtorch.report._page import joined
from fedtorch.report._words import rounds, width
from fedtorch.report.folder import render
from fedtorch.sites import AuditRecord, Policy
from fedtorch.sites.identity import identity
from fedtorch.sites.rounds.status import Trouble


def clinics(count: int = 4) -> ft.data.FederatedData:
    x = torch.ones(20, 1, dtype=torch.float64)
    parts = [(x, x[:, 0] * level + torch.linspace(-1, 1, 20).double()) for level in range(count)]
    return ft.data.from_tensors(parts, names=[f"The hospital of the town, clinic {k}, heart" for k in range(count)])


def fitted(count: int = 4, most: int = 40, **arguments: object) -> ft.Run:
    model = hierarchical.linear(hierarchical.normal(1, sd=3.0, names=["level"], **arguments))  # type: ignore[arg-type]
    return ft.run(ft.ep(model), ft.InProcess(clinics(count)), rounds=most, until=ep.settled())


def test_every_client_has_its_interval_beside_its_own_rows(tmp_path: Path) -> None:
    run = fitted()
    page = ft.report.write(run, tmp_path)
    shared, own = json.loads((tmp_path / "about.json").read_text())["posteriors"]
    assert [row["name"] for row in shared["rows"]] == run.summary().index.tolist() == ["level", "sd(level)", "sigma"]
    found = site_estimates(run, 0.95)
    rows = {row["name"]: row for row in own["rows"]}
    assert list(rows)[-1] == "all clients"
    for k, name in enumerate(found.sites):
        assert (rows[name]["mean"], rows[name]["low"]) == pytest.approx(
            (float(found.mean[k, 0]), float(found.low[k, 0]))
        )
        assert rows[name]["other"] == pytest.approx(float(found.unpooled[k, 0]))
    texts = harmless(page.read_text()).texts
    assert all(any(f"clinic {k}" in text for text in texts) for k in range(4))
    assert "its own rows alone" in texts


def test_names_of_sites_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ("$\\bad$", "<script>", "a&b", "中文")
    model = hierarchical.linear(hierarchical.normal(1, sd=3.0, names=["$level$"]))
    data = dataclasses.replace(clinics(), names=names)
    path = ft.report.write(ft.run(ft.ep(model), ft.InProcess(data), rounds=40), tmp_path)
    page = path.read_bytes()
    texts = harmless(page.decode()).texts
    for name in names:
        assert texts.count(name) >= 2  # in the picture, and in the table behind it
    assert render(tmp_path).read_bytes() == page


def test_the_intercept_is_off_the_axis_of_effects(tmp_path: Path) -> None:
    rows = [(torch.cat([x, x.cumsum(0)], 1), y + 1000) for x, y in clinics()]
    model = hierarchical.linear(hierarchical.normal(2, names=["Intercept", "age"], sd=1000.0, random=[]))
    run = ft.run(ft.ep(model), ft.InProcess(ft.data.from_tensors(rows)), rounds=40, until=ep.settled())
    page = harmless(ft.report.write(run, tmp_path).read_text())
    described = [text for text in page.texts if text.startswith("age: ")]
    assert described
    assert not [text for text in page.texts if text.startswith("Intercept: ")]
    assert "Coefficients but for the intercept" in page.texts
    assert "Intercept" in page.texts[page.texts.index("Numbers") :]


def test_convergence_is_said_in_words() -> None:
    run = fitted()
    first, *others = propagation(run.history)
    assert first.startswith(f"Settled after {run.number} rounds: the last round moved a mean by")
    assert others[0] == "All steps were whole: none had to be shortened."
    assert "was a density throughout" in others[1]
    assert propagation(fitted(most=2).history)[0].startswith("Not settled after 2 rounds")
    assert propagation(pd.DataFrame({"round": [1], "train_loss": [0.1]})) == []


def test_an_improper_prior_is_explained(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fitted(1, 8, variance=hyperpriors.non_informative())
        words = " ".join(harmless(ft.report.write(run, tmp_path).read_text()).texts)
    assert "100 % of the clients had an improper cavity: the product of the prior and the other clients' sites" in words
    assert "the last round among them, so that such clients kept an old site" in words


def history(**columns: list[float]) -> pd.DataFrame:
    count = len(next(iter(columns.values())))
    calm = {
        "mean_change": [0.1] * count,
        "sd_change": [0.1] * count,
        "damping": [1.0] * count,
        "improper": [0.0] * count,
    }
    more = {"remaining": [1.0] * count, "answered": [3] * count, "round": list(range(1, count + 1))}
    return pd.DataFrame({**calm, **more, **columns})


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"damping": [1, 1, 0.5, 0.7]},
            "rounds 3 and 4, with a smallest of 0.5 of a step, because in round 2 means and",
        ),
        (
            {"damping": [1, 0.5], "mean_change": [float("nan"), 0.1]},
            "in round 1 the product of all clients' sites was not",
        ),
        ({"damping": [1, 0.5], "mean_change": [7.0, 0.1]}, "in round 1 a mean moved by more than five standard"),
        ({"damping": [1, 0.5], "improper": [0.25, 0.0]}, "in round 1 some client's cavity was improper"),
    ],
)
def test_short_steps_have_their_reason(columns: dict[str, list[float]], expected: str) -> None:
    text = " ".join(propagation(history(**columns)))
    assert expected in text
    if "improper" in columns:
        assert "In round 1 up to 25 % of the clients" in text
        assert "not at the end" in text


def test_steps_as_short_as_asked_are_whole() -> None:
    assert "All steps were of 0.5, as asked," in propagation(history(damping=[0.5, 0.5]))[1]


def test_failed_projections_are_named() -> None:
    assert "In round 2 some clients could not compute the moments" in propagation(history(failed=[0.0, 0.5]))[-1]


def test_a_mean_of_several_clients_is_one_line() -> None:
    losses = pd.DataFrame(
        {
            "round": [1, 1, 1, 2, 2, 2],
            "client": ["a", "b", "c", "a", "b", "c"],
            "train_loss": [0.5, 0.5, 0.1, 0.4, 0.4, 0.2],
        }
    )
    made, shared = joined(losses, {"north": ["a", "b"], "south": ["c"]})
    assert shared == {"north"}
    assert made["client"].tolist() == ["north: mean of 2 clients", "c"] * 2
    losses.loc[3, "train_loss"] = 0.3
    assert joined(losses, {"north": ["a", "b"]})[1] == set()


def test_organisations_and_what_their_numbers_are(tmp_path: Path) -> None:
    def fedavg() -> ft.Algorithm:
        return ft.fedavg(ft.gradient_descent(torch.nn.Linear(1, 1).double(), epochs=1, loss=loss, optimizer=optimizer))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - target).square().mean()

    def optimizer(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)  # type: ignore[arg-type]

    record = AuditRecord(tmp_path / "audit.jsonl", identity.make_server(tmp_path / "server"))
    with joined_sites(offers(clinics(6), fedavg, policy=Policy(minimum=21)), record=record) as (sites, _):
        assert list(sites.organisations) == ["a", "b", "c"]
        run = ft.run(fedavg(), sites, rounds=2)
        sites.plan.sites.tally["b"] = Trouble(late=2, why="it is late", at="2026-11-30T14:01:40Z")
        words = " ".join(harmless(ft.report.write(run, tmp_path).read_text()).texts)
        sites.finish(run)
    assert "the mean of 2 clients" in words
    assert "a: mean of 2 clients" in words
    assert "late 2 times; last at 2026-11-30T14:01:40Z: it is late" in words
    assert "The server's audit record is audit.jsonl" in words


def test_words_of_rounds_and_widths_of_names() -> None:
    assert rounds([1, 3, 5, 7, 9, 11, 13, 15, 17, 19]).endswith("13 and 3 more ranges")
    assert width("WWW") > width("AAA") > width("iii")
