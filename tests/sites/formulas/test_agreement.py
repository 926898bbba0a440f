"""Sites with frames agree on a design, and run by it what they would in one process."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch
from support.formulas.agreeing import FRAMES, REQUEST
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import ROUNDING, distance, same_bits

import fedtorch as ft
from fedtorch.data.agreement.server import agreed
from fedtorch.data.agreement.site import Answers
from fedtorch.models import hierarchical
from fedtorch.sites import AuditRecord, Policy, Remote, SiteConfiguration, agree
from fedtorch.sites.audit import audit
from fedtorch.sites.identity import identity
from fedtorch.sites.rounds import frames as frames, sites as meeting
from fedtorch.sites.rounds.configuration import read_configuration
from fedtorch.sites.rounds.site import Site

FORMULA = REQUEST.formula
NAMES = list("abc")
ASK: dict[str, Any] = {"client": "clinic", "other": {"sex": "x"}}


def regression(design: ft.data.Design, sd: float = 2.0) -> ft.Algorithm:
    """What sites offer."""
    return ft.ep(hierarchical.regression(design, sd=sd, noise=1.0))


def brings(frame: Any, **more: Any) -> SiteConfiguration:
    return SiteConfiguration.of_frame(frame, "clinic", {"it": regression}, policy=Policy(**more))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def loopback(folder: Path | None = None, **policies: Any) -> Loopback:
    brought = {name: brings(frame, **policies.get(name, {})) for name, frame in FRAMES.items()}
    return Loopback(brought, folder)


def expected() -> ft.data.Design:
    return agreed(REQUEST, {name: Answers(frame) for name, frame in FRAMES.items()})


def test_sites_agree_on_the_bits_of_one_process_and_run_by_them() -> None:
    host = loopback()
    design = agree(host, NAMES, FORMULA, **ASK)
    assert design.to_json() == expected().to_json()
    here = ft.data.from_frame(
        pandas.concat(FRAMES.values()), client="clinic", formula=FORMULA, minimum=10, other=ASK["other"]
    )
    there = Remote(host, NAMES, "it", {"sd": 3.0}, quorum=1.0)
    for k, name in enumerate(NAMES):
        assert same_bits(host.sites[name].configuration.data.rows, here[k])
    runs = [ft.run(regression(design, 3.0), population, rounds=2) for population in (there, ft.InProcess(here))]
    assert distance(runs[0].server, runs[1].server) < ROUNDING
    saved = bytes(runs[0].state_dict()["design"].tolist()).decode()
    assert ft.data.Design.from_json(saved) == design


def test_a_summary_prints_the_round_numbers_that_sites_have_agreed_on() -> None:
    host = loopback()
    design = agree(host, NAMES, "y ~ age + (1 | clinic)", client="clinic", scales={"y": (6, 2)})
    scale = design.encoding.standard["age"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rounds that are too few
        run = ft.run(regression(design), Remote(host, NAMES, "it"), rounds=2)
        table = run.summary(tolerance=torch.inf)
    assert str(table).endswith(f"scaled by y: 6 ± 2; age: {scale.mean:g} ± {scale.sd:g}")
    together = pandas.concat(FRAMES.values())
    exact = ft.data.from_frame(together, client="clinic", formula="y ~ age + (1 | clinic)")
    assert exact.design is not None
    assert exact.design.constants == ()
    assert exact.design.encoding.standard["age"] == pytest.approx(
        (together["age"].mean(), together["age"].std()), rel=1e-12
    )


def test_nothing_of_single_rows_is_in_what_sites_send() -> None:
    host, sent = loopback(), list[bytes]()
    host.after = lambda name, reply: sent.append(reply) or reply
    agree(host, NAMES, FORMULA, **ASK)
    every = b"".join(sent).decode(errors="replace")
    assert "rare" not in every
    for frame in FRAMES.values():
        assert not any(repr(float(value)) in every for column in ("age", "sbp", "y") for value in frame[column])


def test_a_site_that_comes_later_gets_the_design(tmp_path: Path) -> None:
    host = loopback()
    design = agree(host, ["a", "b"], FORMULA, **ASK)
    rest = r"and the other 2 have complete rows by the design \w{8}; .* its design, sites.agree\(host, \['c'\], design"
    with pytest.raises(ValueError, match=f"'c' has a frame without a design yet, {rest}"):
        Remote(host, NAMES, "it", timeout=1.0)
    assert agree(host, ["c"], design) == design
    assert Remote(host, NAMES, "it").names == tuple(NAMES)


def test_a_column_of_another_kind_is_in_the_log_of_its_site(caplog: pytest.LogCaptureFixture) -> None:
    """Which the site alone could not know: the server compares what all of them say."""
    host = loopback()
    host.brought["b"] = brings(FRAMES["b"].assign(age=FRAMES["b"]["age"].astype(str)))
    host.start("b")
    with pytest.raises(ValueError, match="column 'age' of one kind at all sites, but 'b' has text, and the other 2"):
        agree(host, NAMES, "y ~ age + (1 | clinic)", client="clinic")
    (line,) = [each.getMessage() for each in caplog.records if each.name.endswith("_site_log")]
    assert line.endswith("write it as C(age); waiting for a run")
    assert host.dropped == {}
    host.brought["b"] = brings(FRAMES["b"])
    host.start("b")
    agree(host, NAMES, "y ~ age + (1 | clinic)", client="clinic")
    assert Remote(host, NAMES, "it").names == tuple(NAMES)


def test_a_site_that_connects_anew_while_others_make_their_rows_is_taken_in() -> None:
    host, kept = loopback(), set[str]()

    def after(name: str, reply: bytes) -> bytes:
        if name == "a" and host.sites["a"].configuration.data.design is not None and not kept:
            kept.add(name)
            host.frames.append(("a", host.sites["a"].hello()))  # on a new stream, with the rows that it has made
        return reply

    host.after = after
    agree(host, NAMES, "y ~ age + (1 | clinic)", client="clinic")
    assert kept
    assert host.dropped == {}


def test_a_site_that_is_started_again_has_its_rows(tmp_path: Path) -> None:
    host = loopback(tmp_path)
    agree(host, NAMES, FORMULA, **ASK)
    before = host.sites["b"].configuration.data
    host.kill("b"), host.start("b")
    after = host.sites["b"].configuration.data
    assert after.design is not None
    assert same_bits(before.rows, after.rows)
    assert Remote(host, NAMES, "it").names == tuple(NAMES)


def test_sites_without_a_design_are_no_population() -> None:
    with pytest.raises(ValueError, match=r"agreed on a design, but \['a', 'b', 'c'\] have frames and none"):
        Remote(loopback(), NAMES, "it")


def test_a_server_with_another_design_than_its_sites_is_refused() -> None:
    host = loopback()
    design = agree(host, NAMES, FORMULA, **ASK)
    (name, spline), *_ = design.encoding.splines.items()
    moved = {name: spline._replace(lower=spline.lower - 1.0)}
    other = replace(design, encoding=replace(design.encoding, splines=moved))
    run = ft.Run(regression(other), Remote(host, NAMES, "it"))
    with pytest.raises(RuntimeError, match="under 'it' the site runs "):
        run.step()


def test_without_a_design_an_algorithm_is_not_run() -> None:
    host, asked = loopback(), list[bytes]()
    agree(host, NAMES, FORMULA, **ASK)
    host.before = lambda name, frame: name != "b" or asked.append(frame) or True
    ft.run(regression(expected()), Remote(host, NAMES, "it"), rounds=1)
    forgetful = Site(host.brought["b"])
    answers = [forgetful.answer(frame) for frame in asked]
    reason = frames.read(answers[-1] or b"", "b").text("reason")
    assert "have not agreed on a design yet; begin with sites.agree" in reason


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"minimum": 20}, "from site 'b': the site tells nothing of fewer than 20 rows, but was asked for 10"),
        (
            {"columns": ("y", "age")},
            r"from site 'b': the site's policy lets formulas read .* not \['sbp', 'sex'\]",
        ),
        ({"designs": 0}, "from site 'b': the site has made rows by 0 designs"),
    ],
)
def test_a_site_keeps_to_its_policy(policy: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        agree(loopback(b=policy), NAMES, FORMULA, **ASK)


def test_a_server_and_a_site_refuse_code_each_of_its_own() -> None:
    host = loopback()
    asked = "y ~ I(__import__('os').getpid())"
    with pytest.raises(ValueError, match=r"Expected column names, .* but got the function I"):
        agree(host, NAMES, asked, **ASK)
    question = {"step": "describe", "formula": asked, "minimum": 10, "declared": [], "also": [], "offset": []}
    reply = host.sites["a"].answer(frames.encode("agree", sequence=1, question=question))
    assert reply is not None
    assert "Expected column names" in frames.read(reply, "a").names("answer")["refused"]


def test_the_records_of_both_sides_have_the_questions_and_fit_each_other(tmp_path: Path) -> None:
    server, site = identity.make_server(tmp_path), identity.make_site(tmp_path, "a")
    paths = [tmp_path / "server.jsonl", tmp_path / "a.jsonl"]
    host = loopback()
    host.sites["a"] = Site(host.brought["a"], None, site, AuditRecord(paths[1], site))
    agree(host, NAMES, FORMULA, record=AuditRecord(paths[0], server), **ASK)
    verdict = audit.compare(*paths)
    assert verdict.message == "OK: 'server.fedtorch' and 'a' agree on 1 runs and agreements", verdict
    asked = [entry for entry in AuditRecord.entries(paths[1]) if entry["event"] == "request"]
    assert [entry["question"]["step"] for entry in asked] == ["describe", "confirm", "make"]
    assert asked[0]["question"]["formula"] == FORMULA


def test_a_site_that_brings_rows_says_so() -> None:
    host = loopback()
    rows = ft.data.from_tensors([(torch.eye(2), torch.ones(2))], names=["b"])
    host.brought["b"] = SiteConfiguration(rows, {"it": regression})
    host.start("b")
    with pytest.raises(ValueError, match="'b': the site has rows, but no frame for a formula"):
        agree(host, NAMES, FORMULA, **ASK)


def test_missing_cells_are_named_by_their_column() -> None:
    host = loopback()
    holes = FRAMES["b"].assign(age=FRAMES["b"]["age"].where(numpy.arange(80) > 2))
    host.brought["b"] = brings(holes)
    host.start("b")
    with pytest.raises(
        ValueError, match="from site 'b': the site's column 'age' has missing cells; leave such rows out"
    ):
        agree(host, NAMES, FORMULA, **ASK)


@pytest.mark.parametrize("kind", ["csv", "parquet", "function", "path"])
def test_a_file_of_a_site_names_its_frame(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("patients.parquet" if kind == "parquet" else "patients.csv")
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        FRAMES["a"].to_parquet(path)
    else:
        FRAMES["a"].to_csv(path, index=False)
    frame = {"function": "lambda: pandas.read_csv(path)", "path": "pathlib.Path(path)"}.get(kind, "path")
    lines = ["import pandas, pathlib", f"path = {str(path)!r}", f"frame, client = {frame}, 'clinic'"]
    (tmp_path / "my_data.py").write_text("\n".join([*lines, "algorithms = {'it': lambda design: None}"]))
    configuration = read_configuration(tmp_path / "my_data.py")
    assert configuration.data.names == ("a",)
    assert configuration.data.counts.tolist() == [60]
    assert configuration.frame["sex"].tolist() == FRAMES["a"]["sex"].tolist()
