"""Sites with missing cells agree on a design: they complete rows themselves, or leave out those that lack a cell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch
from support.formulas.agreeing import FRAMES
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import distance, same_bits
from support.sites import servers_keys

import fedtorch as ft
from fedtorch.data.agreement.disclosure import AnswerLog, Disclosure, Refused
from fedtorch.data.agreement.site import Answers
from fedtorch.data.frames.incomplete import incomplete_cells
from fedtorch.inference import completed
from fedtorch.models import hierarchical
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree
from fedtorch.sites.rounds import frames as reading, sites as meeting
from fedtorch.sites.rounds.policy import Refusal

FORMULA = "y ~ age + log(sbp) + (1 | clinic)"
NAMES = list("abc")
HOLES = {
    name: frame.assign(age=frame["age"].where(numpy.arange(len(frame)) % 4 > 0), y=frame["y"].mask(frame["sbp"] > 150))
    for name, frame in FRAMES.items()
}


def draws(design: ft.data.Design, draws: int) -> ft.Algorithm:
    return ft.normal_em(draws, columns=design)


def fit(design: ft.data.Design, **draw: Any) -> ft.Algorithm:
    return ft.ep(hierarchical.regression(design)) | completed(design=design, **draw)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def test_sites_complete_their_rows_as_one_process_does() -> None:
    offers = {"draws": draws, "fit": fit}
    brought = {
        name: SiteConfiguration.of_frame(frame, "clinic", offers, policy=Policy(), missing="impute")
        for name, frame in HOLES.items()
    }
    host = Loopback(brought, None)
    design = agree(host, NAMES, FORMULA, client="clinic")
    together = pandas.concat(HOLES.values())
    data = ft.data.from_frame(together, client="clinic", formula=FORMULA, minimum=10, missing="impute")
    assert data.design == design
    for k, name in enumerate(NAMES):
        assert same_bits(host.sites[name].configuration.data.rows, data[k])
    like = incomplete_cells(torch.zeros(1, 3))
    remote = Remote(host, NAMES, "draws", {"draws": 2}, quorum=1.0, rows=like)
    with servers_keys():
        runs = [ft.run(draws(design, 2), population, rounds=5) for population in (remote, ft.InProcess(data))]
    assert distance(runs[0].server.normal, runs[1].server.normal) < 1e-9
    remote.finish(runs[0])
    one = {name: leaf[0].tolist() for name, leaf in runs[1].server.normal._asdict().items()}
    for name in NAMES:
        host.start(name)
    agree(host, NAMES, design)
    remote = Remote(host, NAMES, "fit", {**one, "key": 4}, quorum=1.0, rows=like)
    fits = [ft.run(fit(design, **one, key=4), population, rounds=3) for population in (remote, ft.InProcess(data))]
    assert distance(fits[0].server.posterior, fits[1].server.posterior) < 1e-8


def brings(frame: pandas.DataFrame, missing: str, **policy: Any) -> SiteConfiguration:
    offers = {"draws": draws, "fit": fit, "plain": plain}
    return SiteConfiguration.of_frame(frame, "clinic", offers, policy=Policy(**policy), missing=missing)


def plain(design: ft.data.Design) -> ft.Algorithm:
    return ft.ep(hierarchical.regression(design))


def loopback(ways: dict[str, str], frames: dict[str, pandas.DataFrame] = HOLES, folder: Path | None = None) -> Loopback:
    return Loopback({name: brings(frames[name], way) for name, way in ways.items()}, folder)


def test_sites_leave_rows_out_as_one_process_does() -> None:
    """One that lacks no cell may refuse them: it has the same rows either way."""
    frames = {**HOLES, "c": FRAMES["c"]}
    host, told = loopback({"a": "drop", "b": "drop", "c": "refuse"}, frames), list[Any]()
    host.after = lambda name, reply: told.append((name, reading.read(reply, name).about)) or reply
    assert [reading.read(frame, name).about["rows"] for name, frame in host.frames] == [[0], [0], [100]]
    design = agree(host, NAMES, FORMULA, client="clinic")
    together = pandas.concat(frames.values())
    data = ft.data.from_frame(together, client="clinic", formula=FORMULA, minimum=10, missing="drop")
    assert data.design == design
    for k, name in enumerate(NAMES):
        assert same_bits(host.sites[name].configuration.data.rows, data[k])
    remote = Remote(host, NAMES, "plain", quorum=1.0)
    assert remote.counts.tolist() == data.counts.tolist()
    made = {name: about["answer"]["rows"] for name, about in told if "rows" in about.get("answer", {})}
    assert list(made.values()) == data.counts.tolist()
    assert data.counts[0] < len(frames["a"])
    runs = [ft.run(plain(design), population, rounds=3) for population in (remote, ft.InProcess(data))]
    assert distance(runs[0].server.posterior, runs[1].server.posterior) < 1e-8


def test_a_complete_site_has_a_mask_where_others_impute(tmp_path: Path) -> None:
    """It stays, and is not asked to say that it imputes what it does not lack."""
    frames = {**FRAMES, "b": HOLES["b"]}
    host = loopback({"a": "refuse", "b": "impute", "c": "refuse"}, frames, tmp_path)
    design = agree(host, NAMES, FORMULA, client="clinic")
    together = pandas.concat(frames.values())
    data = ft.data.from_frame(together, client="clinic", formula=FORMULA, minimum=10, missing="impute")
    for k, name in enumerate(NAMES):
        assert same_bits(host.sites[name].configuration.data.rows, data[k])
    host.kill("a"), host.start("a")
    assert bool(host.sites["a"].configuration.data.rows.observed.all())
    remote = Remote(host, NAMES, "draws", {"draws": 2}, quorum=1.0, rows=incomplete_cells(torch.zeros(1, 3)))
    with servers_keys():
        runs = [ft.run(draws(design, 2), population, rounds=3) for population in (remote, ft.InProcess(data))]
    assert distance(runs[0].server.normal, runs[1].server.normal) < 1e-9


@pytest.mark.parametrize(
    ("ways", "named"),
    [
        ({"a": "impute", "b": "drop", "c": "impute"}, "'b' has missing='drop', and the other 2 have missing='impute'"),
        ({"a": "drop", "b": "impute", "c": "drop"}, "'b' has missing='impute', and the other 2 have missing='drop'"),
        ({"a": "drop", "b": "impute", "c": "refuse"}, "'a' has missing='drop', and 'b' has missing='impute'"),
    ],
)
def test_no_run_leaves_rows_out_at_one_site_and_imputes_at_another(
    ways: dict[str, str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = loopback(ways)
    with pytest.raises(ValueError, match=f"but {named}; no estimate follows from both; set missing='impute' at all"):
        agree(host, NAMES, FORMULA, client="clinic")
    lines = [each.getMessage() for each in caplog.records if each.name.endswith("_site_log")]
    assert len(lines) == (2 if "refuse" in ways.values() else 1)
    assert all(named in line and line.endswith("; waiting for a run") for line in lines)
    assert host.dropped == {}
    alone = Loopback({"a": brings(HOLES["a"], "drop")}, None).sites["a"]
    question = {"step": "make", "design": agreed_design().to_json(), "masks": True}
    payload = reading.encode("agree", run="0" * 32, sequence=1, question=question)
    answer = reading.read(alone.answer(payload) or b"", "a").about["answer"]
    assert "the site leaves out rows that lack a cell, and others keep theirs" in answer["refused"]


def agreed_design() -> ft.data.Design:
    together = pandas.concat(FRAMES.values())
    design = ft.data.from_frame(together, client="clinic", formula=FORMULA, minimum=10).design
    assert design is not None
    return design


def test_a_missing_cell_is_in_the_log_of_its_site(caplog: pytest.LogCaptureFixture) -> None:
    host = loopback({"a": "refuse", "b": "refuse", "c": "refuse"}, {**FRAMES, "b": HOLES["b"]})
    with pytest.raises(ValueError, match="from site 'b': the site's column 'y' has missing cells; leave such rows out"):
        agree(host, NAMES, FORMULA, client="clinic")
    (line,) = [each.getMessage() for each in caplog.records if each.name.endswith("site_frame")]
    assert "the site's column 'y' has missing cells; leave such rows out, missing='drop' in its file" in line


def test_rows_that_stay_for_two_formulas_differ_by_none_or_by_many(tmp_path: Path) -> None:
    """Else the sums of both would differ by what a few rows say; a site that is started again knows that too."""
    few = FRAMES["a"].assign(age=FRAMES["a"]["age"].where(numpy.arange(60) > 2))
    host = loopback({"a": "drop"}, {"a": few}, tmp_path)
    agree(host, ["a"], "y ~ log(sbp) + (1 | clinic)", client="clinic")
    refusal = "those that stay differ by fewer than 10 rows from those that stayed for other columns"
    with pytest.raises(ValueError, match=refusal):
        agree(host, ["a"], FORMULA, client="clinic")
    host.kill("a"), host.start("a")
    with pytest.raises(ValueError, match=refusal):
        agree(host, ["a"], FORMULA, client="clinic")
    assert int(host.sites["a"].configuration.data.counts.sum()) == 60
    agree(host, ["a"], "sbp ~ y + (1 | clinic)", client="clinic")  # of the columns that were asked for before
    many = FRAMES["a"].assign(age=FRAMES["a"]["age"].where(numpy.arange(60) > 12))
    other = loopback({"a": "drop"}, {"a": many}, tmp_path / "other")
    for formula, rows in (("y ~ log(sbp) + (1 | clinic)", 60), (FORMULA, 47)):
        agree(other, ["a"], formula, client="clinic")
        assert int(other.sites["a"].configuration.data.counts.sum()) == rows


def wards(where: list[str]) -> pandas.DataFrame:
    """Return 120 patients, of whom one in the first ward and eleven in the others have no bmi."""
    draws = numpy.random.default_rng(0)
    frame = pandas.DataFrame({"clinic": numpy.repeat(where, 120 // len(where)), "age": draws.uniform(20, 80, 120)})
    frame = frame.assign(bmi=draws.normal(25, 4, 120), y=0.1 * frame["age"] + draws.normal(size=120))
    frame.loc[[7, *range(40, 45), *range(80, 86)], "bmi"] = numpy.nan
    return frame


def step(design: ft.data.Design) -> ft.Algorithm:
    module = torch.nn.Linear(len(design.columns), 1, bias=False, dtype=torch.float64)
    loss = lambda prediction, y: ((prediction[..., 0] - y) ** 2).mean()
    return ft.fedavg(ft.gradient_descent(module, steps=1, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)))


def products(host: Loopback, formula: str) -> torch.Tensor:
    """Return the sums over the first client's rows of y and of y times age, of a step from zeros."""
    design = agree(host, ["a"], formula, client="clinic")
    remote = Remote(host, ["a"], "step", quorum=1.0, seconds=0.05)
    run = ft.Run(step(design), remote, {"weight": torch.zeros(1, len(design.columns), dtype=torch.float64)})
    session, every = run.clients.session, type(run.clients.session).of_site
    session.of_site = lambda site, cohort=None: every(session, site, cohort)[:1]
    run.step()
    made = dict(zip(design.columns, run.server["weight"][0] * remote.counts[0]))
    age = design.encoding.standard["age"]
    return torch.stack([made["Intercept"], made["age"] * age.sd + made["Intercept"] * age.mean])


FEW = "those that stay differ by fewer than 10 rows from those that stayed for other columns"


def check_row(frame: pandas.DataFrame, with_it: torch.Tensor, without: torch.Tensor) -> None:
    y, product = (with_it - without).tolist()
    assert (y, product / y) == pytest.approx(tuple(frame.loc[7, ["y", "age"]]), rel=1e-6)


def test_rows_that_stay_at_one_client_differ_by_none_or_by_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ward answers alone: of twelve rows that lack a cell it has one, whose age and response two sums would tell."""
    frame = wards(["w1", "w2", "w3"])
    offer = lambda: Loopback({"a": SiteConfiguration.of_frame(frame, "clinic", {"step": step}, missing="drop")}, None)
    host = offer()
    products(host, "y ~ age + (1 | clinic)")
    with pytest.raises(ValueError, match=FEW):
        products(host, "y ~ age + bmi + (1 | clinic)")
    monkeypatch.setattr(Answers, "_clients_of_many", lambda answers: numpy.zeros(120, dtype=int))
    host = offer()
    check_row(frame, *(products(host, f"y ~ age {more}+ (1 | clinic)") for more in ("", "+ bmi ")))


def test_rows_of_patients_are_looked_at_together() -> None:
    """Where no client has many rows the site answers of several only."""
    frame = wards([f"p{k}" for k in range(40)])
    host = Loopback({"a": SiteConfiguration.of_frame(frame, "clinic", {"plain": plain}, missing="drop")}, None)
    for formula, rows in (("y ~ age + (1 | clinic)", 120), ("y ~ age + bmi + (1 | clinic)", 108)):
        agree(host, ["a"], formula, client="clinic")
        assert int(host.sites["a"].configuration.data.counts.sum()) == rows


def test_rows_that_stayed_before_a_site_left_some_out_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that refuses missing cells has an advice in its log, and follows it."""
    frame = wards(["n"])
    frame.loc[40:, "bmi"] = 25.0 + frame.loc[40:, "age"] / 80

    def told(folder: Path) -> list[torch.Tensor]:
        host = Loopback({"a": SiteConfiguration.of_frame(frame, "clinic", {"step": step})}, folder)
        with pytest.raises(ValueError, match="leave such rows out, missing='drop' in its file"):
            products(host, "y ~ age + bmi + (1 | clinic)")
        whole = products(host, "y ~ age + (1 | clinic)")
        host.kill("a")
        host.brought["a"] = replace(host.brought["a"], missing="drop")
        host.start("a")
        return [whole, products(host, "y ~ age + bmi + (1 | clinic)")]

    with pytest.raises(ValueError, match=FEW):
        told(tmp_path / "on")
    leave_out = Answers.leave_out
    forgets = lambda site, columns: leave_out(site, columns) if "bmi" in columns else None
    monkeypatch.setattr(Answers, "leave_out", forgets)
    check_row(frame, *told(tmp_path / "off"))


def test_a_site_that_has_told_of_no_row_yet_may_still_leave_some_out(tmp_path: Path) -> None:
    frame = wards(["n"])
    host = Loopback({"a": SiteConfiguration.of_frame(frame, "clinic", {"plain": plain})}, tmp_path)
    with pytest.raises(ValueError, match="leave such rows out, missing='drop' in its file"):
        agree(host, ["a"], "y ~ age + bmi + (1 | clinic)", client="clinic")
    host.kill("a")
    host.brought["a"] = replace(host.brought["a"], missing="drop")
    host.start("a")
    agree(host, ["a"], "y ~ age + bmi + (1 | clinic)", client="clinic")
    assert host.sites["a"].configuration.rows_of_clients() == [108]


def test_a_site_that_would_tell_of_other_rows_after_a_restart_makes_none(tmp_path: Path) -> None:
    """By the design that was agreed on a row was left out, and the site says now that it completes rows."""
    frame = wards(["n"])
    frame.loc[40:, "bmi"] = 25.0
    host = Loopback({"a": SiteConfiguration.of_frame(frame, "clinic", {"plain": plain}, missing="drop")}, tmp_path)
    agree(host, ["a"], "y ~ bmi + (1 | clinic)", client="clinic", scales={"bmi": (25, 4)})
    host.kill("a")
    host.brought["a"] = replace(host.brought["a"], missing="impute")
    host.start("a")
    assert host.sites["a"].configuration.data.design is None


def test_sets_of_columns_of_which_no_row_is_complete_count_too() -> None:
    """Else whether one row has two cells would be told of any number of columns."""
    frame = FRAMES["a"].assign(a=lambda all: all["age"].where(numpy.arange(60) < 30), b=1.0)
    frame["b"] = frame["age"].where(numpy.arange(60) >= 30)
    site = Answers(frame, Disclosure(minimum=5, designs=2), drop=True)
    question = {"step": "describe", "minimum": 5, "declared": [], "also": [], "offset": []}
    said = [site.answer({**question, "formula": f"y ~ a + b{more}"})["refused"] for more in ("", " + age", " + sbp")]
    assert [each.startswith("no row of the site has a cell") for each in said] == [True, True, False]
    assert said[2].startswith("the site has left out rows for 2 sets of columns")


def test_sets_of_columns_that_were_refused_count_too(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path)

    def few(before: Any) -> None:
        if before:
            raise Refused("few")

    log.leave_out(["a"], 2, few)
    for _ in range(2):
        with pytest.raises(Refused, match=r"^few$"):
            log.leave_out(["a", "b"], 2, few)
    log.leave_out(["a"], 2, few)
    with pytest.raises(Refused, match="rows for 2 sets of columns"):
        AnswerLog(tmp_path).leave_out(["a", "c"], 2, few)


def test_persons_behind_rows_that_stay_are_counted() -> None:
    person = numpy.arange(60) // 2
    frame = FRAMES["a"].assign(person=person, age=FRAMES["a"]["age"].where(person > 1))
    host = Loopback({"a": brings(frame, "drop", minimum=10, person="person")}, None)
    agree(host, ["a"], FORMULA, client="clinic")
    assert host.sites["a"].configuration.rows_of_clients() == [28]


def test_models_are_compared_on_the_same_rows() -> None:
    frame = FRAMES["a"].assign(age=FRAMES["a"]["age"].where(numpy.arange(60) > 12))
    host = loopback({"a": "drop"}, {"a": frame})
    other = agree(host, ["a"], FORMULA, client="clinic").to_json()
    agree(host, ["a"], "y ~ log(sbp) + (1 | clinic)", client="clinic")
    with pytest.raises(Refusal, match="the site leaves out other rows for one formula than for the other"):
        host.sites["a"]._frame.beside(other)


def test_where_no_row_is_complete_a_site_says_so() -> None:
    frame = FRAMES["a"].assign(age=numpy.nan)
    with pytest.raises(ValueError, match=r"no row of the site has a cell in each of the columns \['y', 'age', 'sbp'\]"):
        agree(loopback({"a": "drop"}, {"a": frame}), ["a"], FORMULA, client="clinic")


def test_what_a_site_does_with_missing_cells_is_one_of_three() -> None:
    with pytest.raises(ValueError, match=r"missing= as one of \['refuse', 'drop', 'impute'\], but got 'keep'"):
        brings(HOLES["a"], "keep")
