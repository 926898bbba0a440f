"""A person at a site is shown what leaves in a run, and nothing leaves before the answer."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
from support.certified import certified
from support.formulas.agreeing import FRAMES, REQUEST
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import linear_clients, sgd
from support.sites import Carried, Thread, carry_of, joined, offers
from test_conformance import ALGORITHMS, POOLED, STARTS, population

import fedtorch as ft
from fedtorch.chained_log import digest
from fedtorch.cli import _sites as command, _terminal as terminal
from fedtorch.learns import as_frame
from fedtorch.models import hierarchical
from fedtorch.sites import AuditRecord, Hub, Policy, Remote, SiteConfiguration, agree, masked, sealed
from fedtorch.sites.audit import audit
from fedtorch.sites.identity import identity
from fedtorch.sites.rounds import _consent as consent, frames as frames, past_sums, sites as meeting
from fedtorch.sites.rounds.site import Site

DATA = linear_clients([5, 2, 9, 4, 17, 6])
NAMES = list("abc")


def fedavg(mu: float = 0.0) -> ft.Algorithm:
    return ft.fedavg(sgd(0.1), mu=mu)


class Answers:
    """A person who gives one answer, and may think first."""

    def __init__(self, yes: bool) -> None:
        self.yes, self.shown = yes, list[str]()
        self.thought = threading.Event()
        self.thought.set()

    def __call__(self, shown: str) -> bool:
        self.shown.append(shown)
        assert self.thought.wait(30.0)
        return self.yes


class Sites:
    """Three sites in threads, each with its person."""

    def __init__(self, folder: Path, brought: Any, **answers: bool) -> None:
        self.host, authority = Hub(), identity.make_server(folder)
        self.authority = authority.authority
        self.people = {name: Answers(answers.get(name, True)) for name in brought}
        self.records = {name: folder / f"{name}.jsonl" for name in brought}
        self.threads = {}
        for name, configuration in brought.items():
            own = identity.make_site(folder, name)
            past_sums.begin(folder / name)
            more = {"record": AuditRecord(self.records[name], own), "ask": self.people[name]}
            self.threads[name] = Thread(self.host, name, configuration, folder / name, own, **more)
        for thread in self.threads.values():
            thread.start()

    def end(self, remote: Remote, run: ft.Run) -> None:
        """The run is over; sites whose people said no wait for another, and are disconnected."""
        remote.finish(run)
        for name, thread in self.threads.items():
            if not self.people[name].yes:
                self.host.drop(name, "the test is over")
            thread.join(10.0)
            assert (thread.session is not None) == self.people[name].yes

    def consents(self, name: str) -> list[tuple[str, str]]:
        """(what was shown, the answer) of each entry of a site's record."""
        every = AuditRecord.entries(self.records[name])
        return [(entry["shown"], entry["answer"]) for entry in every if entry["event"] == "consent"]


def test_a_no_is_heard_by_the_server_and_on_record_with_what_was_shown(tmp_path: Path) -> None:
    made = Sites(tmp_path, offers(DATA, fedavg), b=False)
    remote = Remote(made.host, NAMES, "it", {"mu": 0.5}, quorum=0.5, timeout=20.0)
    run = ft.run(fedavg(0.5), remote, rounds=3)
    number = run.clients.run
    assert run.last.ids.tolist() == [0, 1, 4, 5]
    assert remote.troubles == {"b": f"the site's people have said no to the run {number[:8]}"}
    (shown,) = made.people["b"].shown
    assert shown.startswith(f"Run {number}\nAlgorithm: it(mu=0.5)\nClients: clients 2 to 3 of 6\nWhat leaves")
    assert (
        "round: change.value.weight, change.value.bias (of a site's sum, exact, to the server)\n      discloses"
        in shown
    )
    assert made.consents("b") == [(digest(shown.encode()), "no")]
    assert [answer for _, answer in made.consents("a")] == ["yes"]
    made.end(remote, run)
    assert [audit.verify(path, certificate=made.authority).holds for path in made.records.values()] == [True] * 3
    begun = [entry for entry in AuditRecord.entries(made.records["b"]) if entry["event"] == "begin"]
    assert begun[0]["refused"] == remote.troubles["b"]
    assert "answer" not in {entry["event"] for entry in AuditRecord.entries(made.records["b"])}
    assert not (tmp_path / "b" / number).exists(), "no states of a run that nobody wanted"


def test_a_site_whose_people_think_is_late_and_comes_in_later(tmp_path: Path) -> None:
    made = Sites(tmp_path, offers(DATA, fedavg))
    made.people["b"].thought.clear()
    remote = Remote(made.host, NAMES, "it", quorum=0.5, seconds=3.0, timeout=20.0)
    run = ft.Run(fedavg(), remote)
    assert run.step().ids.tolist() == [0, 1, 4, 5]
    assert run.last.late.tolist() == [2, 3]
    assert remote.troubles == {"b": "it is late"}
    made.people["b"].thought.set()
    for _ in run.rounds(200, until=lambda history: len(run.last.ids) == 6):
        pass
    assert run.last.ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(made.people["b"].shown) == 1, "once a run"
    made.end(remote, run)


def test_a_person_is_asked_once_for_a_run_and_again_for_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)
    host, person, begins = Loopback(offers(DATA, fedavg, sites=1), None), Answers(True), list[bytes]()
    host.before = lambda name, frame: begins.append(frame) or True
    ft.run(fedavg(), Remote(host, ["a"], "it"), rounds=1)
    begin = next(frame for frame in begins if frames.read(frame, "the server").kind == "begin")
    for yes in (False, True):
        person.yes = yes
        site = Site(host.brought["a"], ask=person)
        for _ in range(3):
            site.answer(begin)
        request = next(frame for frame in begins if frames.read(frame, "the server").kind == "round")
        assert frames.read(site.answer(request) or b"", "a").kind == ("answer" if yes else "refusal")
    assert len(person.shown) == 2
    ft.run(fedavg(), Remote(host, ["a"], "it"), rounds=1)
    again = next(each for each in reversed(begins) if frames.read(each, "the server").kind == "begin")
    site.answer(again)
    assert len(person.shown) == 3, "of another run"


@pytest.mark.parametrize("name", [*ALGORITHMS, "masked", "sealed"])
def test_what_is_shown_is_what_the_server_s_run_discloses(name: str) -> None:
    hidden = {
        "masked": Carried(fedavg, masked(dropouts=0)),
        "sealed": Carried(ALGORITHMS["gtv"], sealed(ft.Network.ring(6))),
    }
    make: Callable[..., ft.Algorithm] = hidden.get(name) or ALGORITHMS[name]
    data = DATA if name in hidden else population(name).data
    known = certified("abc") if name in hidden else None
    every = ("effects", "densities", "margins", "checks")
    policy = Policy(after_fit=every, minimum=1)
    brought = offers(data, make, STARTS.get(name), sites=1 if name in POOLED else 3, policy=policy)
    host = Loopback(brought, None, None if known is None else known.identities)
    roster = {} if known is None else {"roster": known.roster}
    remote = Remote(host, list(brought), "it", rows=data.rows, carry=carry_of(make), **roster)
    algorithm = make()
    run = ft.Run(algorithm, remote, STARTS.get(name) if algorithm.start is None else None)
    run.step()
    session = host.sites["a"]._session
    assert session is not None
    there = [list(row) for row in as_frame(session.disclosed()).astype(str).to_numpy()]
    table = run.disclosure().astype(str)
    table = table[~table["message"].isin(["agree", "evaluate"])]  # of frames, and of validation rows
    names = {f"{site}" for site in brought}
    here = [list(row) for row in table.to_numpy()]
    if name == "sealed":  # whose they are, sites do not know before the first round
        here = [row for row in here if row[1] not in names]
        there = [row for row in there if row[1] != "neighbours' sites"]
    assert there == here
    session.watch.policy = session.configuration.policy._replace(after_fit=())
    session.configuration = replace(session.configuration, policy=session.watch.policy)
    assert not any(field.message.startswith("ask ") for field in session.disclosed())


def test_a_formula_is_asked_about_before_anything_is_told(tmp_path: Path) -> None:
    regression = lambda design: ft.ep(hierarchical.regression(design, noise=1.0))
    brought = {name: SiteConfiguration.of_frame(frame, "clinic", {"it": regression}) for name, frame in FRAMES.items()}
    made = Sites(tmp_path, brought, b=False)
    ask: dict[str, Any] = {"client": "clinic", "other": {"sex": "x"}, "timeout": 20.0}
    with pytest.raises(ValueError, match=r"some refuse: 'b': the site's people have said no to the formula 'y ~ age"):
        agree(made.host, NAMES, REQUEST.formula, **ask)
    (shown,) = made.people["b"].shown
    read = "Columns that it reads: 'age', 'sbp', 'sex', 'y'"
    assert shown.startswith(f"An agreement on the formula {REQUEST.formula!r}\n{read}\nWhat leaves")
    assert "agree: histograms.* (of a site, exact, to the server)" in shown
    assert not (tmp_path / "b" / "answers.jsonl").exists()
    design = agree(made.host, ["a", "c"], REQUEST.formula, **ask)
    assert [len(made.people[name].shown) for name in NAMES] == [1, 1, 1], "once for all questions about a formula"
    remote = Remote(made.host, ["a", "c"], "it", quorum=1.0)
    made.end(remote, ft.run(regression(design), remote, rounds=1))
    assert [len(made.people[name].shown) for name in NAMES] == [2, 1, 2]


def test_what_a_server_says_is_shown_as_characters_that_print() -> None:
    shown = consent.of_run("7f", "it", {"mu": "\x1b[2J" + "x" * 1000, "\x1b[2J": 0}, "client 0 of 1", [])
    assert "\x1b" not in shown
    assert len(shown) < 500


def test_a_yes_is_to_all_that_a_server_says_however_long() -> None:
    """Else a yes to one formula, or to one run, were one to others that begin like it."""
    long = "x" * 400
    runs = [consent.of_run("7f", "it", {"note": long + end}, "client 0 of 1", []) for end in ("", "y")]
    assert runs[0] != runs[1]
    assert digest(repr(long).encode()) in runs[0]
    columns = [f"measurement_{k:02d}" for k in range(40)]
    frame = pandas.DataFrame({name: numpy.arange(60.0) + k for k, name in enumerate([*columns, "zz_hiv"])})
    person = Answers(True)
    brought = SiteConfiguration.of_frame(frame.assign(ward="n"), "ward", {"it": lambda design: fedavg()})
    site = Site(brought, ask=person)
    for end in ("", " + zz_hiv"):
        formula = f"{columns[0]} ~ {' + '.join(columns[1:])}{end}"
        question = {"step": "describe", "formula": formula, "minimum": 10, "declared": [], "also": [], "offset": []}
        site.answer(frames.encode("agree", run="0" * 32, sequence=1, question=question))
    assert ["'zz_hiv'" in shown for shown in person.shown] == [False, True]


def test_the_command_waits_for_yes_or_no(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = iter(["y", "", " YES ", "no"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert command._say_yes("Run 7f")
    assert not command._say_yes("Run 7f")
    assert capsys.readouterr().out == "".join(
        ["\nRun 7f\n", "Expected yes or no, but got 'y'\n", "Expected yes or no, but got ''\n", "\nRun 7f\n"]
    )

    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert not command._say_yes("Run 7f")


def test_no_line_of_a_server_hides_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one by which a terminal shows nothing that follows."""
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr("sys.stderr", stream)
    terminal.log()
    Site(offers(DATA, fedavg, sites=1)["a"]).answer(frames.encode("wait", reason="no\x1b[8m\r\n"))
    assert "no\\u001b[8m\\u000d\n" in stream.getvalue()


def test_without_a_person_nothing_is_shown() -> None:
    with joined(offers(DATA, fedavg)) as (sites, _):
        assert len(ft.run(fedavg(), sites, rounds=1).last.ids) == 6
