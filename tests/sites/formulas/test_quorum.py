"""Agreements without some of the sites, and two agreements whose difference would be what one site has told."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch
from support.formulas.agreeing import FRAMES, REQUEST, frame
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import same_bits

import fedtorch as ft
from fedtorch.data.agreement.histogram import histogram, mean_and_squares
from fedtorch.data.agreement.server import agreed
from fedtorch.data.agreement.site import Answers
from fedtorch.models import hierarchical
from fedtorch.sites import AuditRecord, Policy, Remote, SiteConfiguration, agree
from fedtorch.sites.formulas.agreement import _least
from fedtorch.sites.identity import identity
from fedtorch.sites.rounds import frames as frames, past_sums, sites as meeting
from fedtorch.sites.rounds.past_sums import PastSums
from fedtorch.sites.rounds.policy import Refusal

FORMULA = REQUEST.formula
NAMES = list("abcd")
OLDER = frame("d", 90, 3).assign(age=lambda table: table["age"] + 30.0)
OLDER["sex"] = ["x-linked"] * 20 + OLDER["sex"][20:].tolist()
EVERY = {**FRAMES, "d": OLDER}  # "d" has older patients, and a level that no other site has
ASK: dict[str, Any] = {"client": "clinic", "other": {"sex": "x"}, "seconds": 5.0, "timeout": 5.0}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def regression(design: ft.data.Design) -> ft.Algorithm:
    return ft.ep(hierarchical.regression(design, noise=1.0))


def loopback(folder: Path | None = None, without: str = "", **policies: Any) -> Loopback:
    """Four sites; some of them have not come yet."""
    limits = {name: Policy(**policies.get(name, {})) for name in EVERY}
    offered = {"it": regression}
    brought = {name: SiteConfiguration.of_frame(EVERY[name], "clinic", offered, policy=limits[name]) for name in EVERY}
    host = Loopback(brought, folder)
    for name in without:
        leave(host, name)
    return host


def leave(host: Loopback, name: str) -> None:
    """A site goes, and nothing of it arrives any more."""
    host.kill(name)
    host.frames = type(host.frames)(each for each in host.frames if each[0] != name)


def of(names: str) -> str:
    """The design that follows from some sites, in one process."""
    return agreed(REQUEST, {name: Answers(EVERY[name]) for name in names}).to_json()


def step_of(payload: bytes) -> str:
    """The step of a question; empty for another frame."""
    return frames.read(payload, "the server").about.get("question", {}).get("step", "")


# -- with all sites, and without some ----------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", [1.0, 0.5, 2, 4])
@pytest.mark.parametrize("order", ["abcd", "dbca"])
def test_where_all_come_a_quorum_changes_no_bit(quorum: float, order: str) -> None:
    host, troubles = loopback(), {"z": "of an earlier one"}
    assert agree(host, list(order), FORMULA, quorum=quorum, troubles=troubles, **ASK).to_json() == of("abcd")
    assert troubles == {}
    here = ft.data.from_frame(
        pandas.concat(EVERY.values()), client="clinic", formula=FORMULA, minimum=10, other=ASK["other"]
    )
    for k, name in enumerate(NAMES):
        assert same_bits(host.sites[name].configuration.data.rows, here[k])


def test_the_agreement_of_a_quorum_is_that_of_its_sites_alone(caplog: pytest.LogCaptureFixture) -> None:
    host, troubles = loopback(without="d"), dict[str, str]()
    design = agree(host, NAMES, FORMULA, quorum=0.75, troubles=troubles, **ASK)
    assert design.to_json() == of("abc") != of("abcd")
    assert troubles == {"d": "it did not connect"}
    assert f"3 of 4 sites have agreed on {FORMULA!r}, without 'd': it did not connect" in caplog.messages
    names = [name for name in NAMES if name not in troubles]
    assert ft.run(regression(design), Remote(host, names, "it"), rounds=1).last.ids.tolist() == [0, 1, 2]


def test_too_few_sites_are_no_agreement() -> None:
    host = loopback(without="cd")
    with pytest.raises(TimeoutError, match="at least 3 of 4 sites within 5 s, but got no 'c': it did not connect; 'd'"):
        agree(host, NAMES, FORMULA, quorum=3, **ASK)
    assert all(site.configuration.data.design is None for site in host.sites.values())


def test_nothing_in_a_quorum_s_design_is_of_fewer_rows_than_the_minimum() -> None:
    """Each site of it has rows for a histogram of its own, or tells none; two with few rows do not add up to one."""
    small = {name: table.head(12) for name, table in EVERY.items()}
    brought = {name: SiteConfiguration.of_frame(table, "clinic", {"it": regression}) for name, table in small.items()}
    host = Loopback(brought, None)
    leave(host, "d")
    with pytest.raises(ValueError, match=r"a site that tells its histogram of .*, but got none"):
        agree(host, NAMES, "y ~ age + (1 | clinic)", client="clinic", quorum=2, timeout=1.0)


@pytest.mark.parametrize(
    ("quorum", "asked", "why"),
    [
        (0, 4, "above 0 and at most 1, or 1 to 4 sites, but got 0"),
        (0.0, 4, "above 0 and at most 1"),
        (1.5, 4, "above 0 and at most 1"),
        (5, 4, "1 to 4 sites, but got 5"),
        (math.nan, 4, "but got nan"),
        (1, 4, r"at least 2 of 4 sites, .* but got 1, which is 1 site; use 1.0 for all sites"),
        (0.25, 4, "at least 2 of 4 sites"),
    ],
)
def test_a_quorum_out_of_range_is_refused_before_anybody_is_asked(quorum: Any, asked: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        _least(quorum, asked, alone=False)


# -- late, dead, refusing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["describe", "confirm", "make"])
@pytest.mark.parametrize("dies", [False, True])
def test_a_site_that_falls_silent_is_left_out_with_a_reason(
    step: str, dies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once its answer is in, the design follows from it too: one without it would differ by this one site."""
    host, troubles = loopback(), dict[str, str]()

    def before(name: str, payload: bytes) -> bool:
        if name != "d" or step_of(payload) != step:
            return True
        if dies:
            leave(host, "d")
        return False

    host.before = before
    design = agree(host, NAMES, FORMULA, quorum=3, troubles=troubles, **ASK)
    assert design.to_json() == of("abc" if step == "describe" else "abcd")
    late = "it had not answered yet" if step == "confirm" else "it is late"  # which is not waited for once more
    assert troubles == {"d": "it is not connected" if dies else late}
    assert f"without 'd': {troubles['d']}" in caplog.text
    for name in "abc":
        assert host.sites[name].configuration.data.design == design
    host.before = lambda name, payload: True
    host.start("d")
    assert agree(host, ["d"], design, **ASK) == design
    assert Remote(host, NAMES, "it").names == tuple(NAMES)


def test_a_site_that_refuses_is_left_out_of_a_quorum_and_hears_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    host, troubles = loopback(d={"columns": ("y", "age")}), dict[str, str]()
    with pytest.raises(ValueError, match="from site 'd': the site's policy lets formulas read"):
        agree(host, NAMES, FORMULA, **ASK)
    assert agree(host, NAMES, FORMULA, quorum=3, troubles=troubles, **ASK).to_json() == of("abc")
    assert troubles["d"].startswith("the site's policy lets formulas read columns")
    (line,) = [each.getMessage() for each in caplog.records if each.name.endswith("_site_log")]
    assert line.startswith(f"sites have agreed on {FORMULA!r} without 'd': the site's policy lets formulas read")
    assert line.endswith("can have it make rows by their design, agree(host, ['d'], design); waiting for a run")


def test_a_site_that_was_not_in_the_agreement_is_told_so_where_a_run_lists_it(caplog: pytest.LogCaptureFixture) -> None:
    host = loopback(without="d")
    design = agree(host, NAMES, FORMULA, quorum=3, **ASK)
    host.start("d")
    remedy = r"sites.agree\(host, \['d'\], design\), and disclose nothing of their columns for it"
    with pytest.raises(ValueError, match=f"'d' has a frame without a design yet.*{remedy}"):
        Remote(host, NAMES, "it", timeout=1.0)
    (line,) = [each.getMessage() for each in caplog.records if each.name.endswith("_site_log")]
    assert "sites.agree(host, ['d'], design)" in line
    sent = list[bytes]()
    host.after = lambda name, reply: sent.append(reply) or reply
    assert agree(host, ["d"], design) == design
    assert not any(b"histograms" in reply or b"x-linked" in reply for reply in sent)
    assert Remote(host, NAMES, "it").names == tuple(NAMES)


def test_both_records_name_the_sites_of_an_agreement(tmp_path: Path) -> None:
    server, site = identity.make_server(tmp_path), identity.make_site(tmp_path, "a")
    host, record = loopback(without="d"), AuditRecord(tmp_path / "server.jsonl", server)
    agree(host, NAMES, FORMULA, quorum=3, record=record, **ASK)
    asked = [entry["question"] for entry in AuditRecord.entries(record.path) if entry["event"] == "asked"]
    assert [each["step"] for each in asked] == ["describe", "confirm", "make"]
    assert asked[1]["sites"] == list("abc")
    assert site.name == "a"


# -- two agreements that differ by one site ----------------------------------------------------------------------------


def told_apart(host: Loopback, formula: str = FORMULA) -> tuple[set[str], float, float]:
    """What site "a" learns of "d" from two designs: (its levels, its mean age, the largest error of that).

    The adversary has both designs and knows how many rows sites have. The server between is honest.
    """
    first = agree(host, NAMES[:3], formula, **ASK)
    for name in NAMES:
        host.start(name)
    second = agree(host, NAMES, formula, **ASK)
    levels = [set(each.encoding.levels["sex"].names) for each in (first, second)]
    (one, few), (both, many) = ((each.encoding.standard["age"], n) for each, n in ((first, 240), (second, 330)))
    error = 0.01 * (one.sd * few + both.sd * many) / (many - few)
    return levels[1] - levels[0], (both.mean * many - one.mean * few) / (many - few), error


def test_without_memory_two_designs_tell_a_site_s_level_and_its_mean() -> None:
    """The attack that the memory keeps back, of sites that forget at every start."""
    assert [len(EVERY[name]) for name in NAMES] == [60, 80, 100, 90]
    levels, mean, error = told_apart(loopback(None))
    assert levels == {"x-linked"}
    own = histogram(OLDER["age"].to_numpy(), 10)
    assert own is not None
    assert abs(mean - mean_and_squares([own])[0]) < error
    others = numpy.concatenate([FRAMES[name]["age"] for name in "abc"]).mean()
    assert mean - others > 20.0 > 5 * error, "which is no guess from the others"


def test_with_memory_the_second_of_two_designs_is_refused_before_it_leaves_the_server(tmp_path: Path) -> None:
    host, sent = loopback(tmp_path), list[str]()
    agree(host, NAMES[:3], FORMULA, **ASK)
    for name in NAMES:
        host.start(name)
    host.before = lambda name, payload: sent.append(step_of(payload)) or True
    why = r"the site has agreed on '\w+' on \d{4}-.* UTC with \['a', 'b', 'c'\] \(3 in all\), .* same sites only"
    with pytest.raises(ValueError, match=why):
        agree(host, NAMES, FORMULA, **ASK)
    with pytest.raises(ValueError, match=why):  # nor by a quorum, which is of "d" alone
        agree(host, NAMES, FORMULA, quorum=2, **ASK)
    assert "make" not in sent
    assert host.sites["d"].configuration.data.design is None
    assert agree(host, NAMES[:3], FORMULA, **ASK).to_json() == of("abc"), "the same sites may"


def test_another_formula_of_the_same_column_is_the_same_difference(tmp_path: Path) -> None:
    host = loopback(tmp_path)
    agree(host, NAMES[:3], "y ~ age + (1 | clinic)", client="clinic")
    host.start("d")
    for formula in ("y ~ log(age) + (1 | clinic)", "age ~ sbp + (1 | clinic)", "sbp ~ bs(age, 4) + (1 | clinic)"):
        with pytest.raises(ValueError, match=r"the site has agreed on '(age|y)'"):
            agree(host, NAMES, formula, client="clinic")
    assert agree(host, NAMES, "sbp ~ sex + (1 | clinic)", client="clinic", other=ASK["other"]).response == "sbp"


def test_a_site_that_leaves_before_the_design_does_is_in_it_for_good(tmp_path: Path) -> None:
    """A server that would leave it out then has two designs, with and without it."""
    host = loopback(tmp_path)
    host.before = lambda name, payload: not (name == "d" and step_of(payload) == "make" and leave(host, "d") is None)
    design = agree(host, NAMES, FORMULA, quorum=3, **ASK)
    assert design.to_json() == of("abcd")
    host.before = lambda name, payload: True
    with pytest.raises(ValueError, match=r"with \['a', 'b', 'c', 'd'\] \(4 in all\), and agrees on it with the same"):
        agree(host, NAMES, FORMULA, quorum=3, **ASK)
    host.start("d")
    assert agree(host, NAMES, FORMULA, quorum=3, **ASK) == design


def test_where_a_site_refuses_to_confirm_no_design_leaves_the_server(tmp_path: Path) -> None:
    """The sites that answer may be fewer than were asked: whose design it is, is decided once more."""
    host, sent = loopback(tmp_path), list[str]()
    agree(host, NAMES, "y ~ age + (1 | clinic)", client="clinic")

    def before(name: str, payload: bytes) -> bool:
        sent.append(step_of(payload))
        return not (name == "d" and sent[-1] == "describe" and leave(host, "d") is None)

    host.before = before
    with pytest.raises(ValueError, match=r"at least 3 of 4 sites, but some refuse: 'a': the site has agreed on 'age'"):
        agree(host, NAMES, "y ~ age + (1 | clinic)", client="clinic", quorum=3, seconds=5.0)
    assert "confirm" in sent
    assert "make" not in sent


def test_a_site_with_a_folder_and_no_memory_in_it_agrees_with_nobody(tmp_path: Path) -> None:
    host = loopback(tmp_path)
    (tmp_path / "b" / past_sums.FILE).unlink()
    with pytest.raises(ValueError, match=r"'b': the site has no sums.jsonl .* and of the agreements .*--begin-sums"):
        agree(host, NAMES, FORMULA, **ASK)
    assert agree(host, ["a", "c", "d"], FORMULA, **ASK).to_json() == of("acd")


def test_no_combination_of_the_designs_that_sites_agree_on_shows_one_of_them() -> None:
    """Any sets, in any order, of six sites: only a set that is the site alone is about that site."""
    draws = numpy.random.default_rng(51)
    for _ in range(200):
        memories, accepted = [PastSums(None, lasting=False) for _ in range(6)], list[frozenset[str]]()
        for _ in range(12):
            members = draws.choice(6, draws.integers(2, 7), replace=False).tolist()
            sites = frozenset("abcdef"[member] for member in members)
            try:
                for confirmed in (False, True):
                    for member in members:
                        memories[member].of_agreement(["age"], sites, confirmed=confirmed)
            except Refusal:
                continue
            accepted.append(sites)
        rows = torch.tensor([[float(site in sites) for site in "abcdef"] for sites in accepted], dtype=torch.float64)
        rank = int(torch.linalg.matrix_rank(rows))
        for site in range(6):
            one = torch.zeros(1, 6, dtype=torch.float64)
            one[0, site] = 1.0
            assert int(torch.linalg.matrix_rank(torch.cat([rows, one]))) == rank + 1
        assert all(one == other or not one & other for one, other in itertools.combinations(accepted, 2))
