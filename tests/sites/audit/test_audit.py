"""The audit records of a server and its sites: what is in them, and what of them cannot be changed unnoticed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import public
import pytest
import torch
import torch.nn.functional as F
from support.oracles.closed_forms import linear_clients, sgd
from support.sites import Carried, carry_of, joined, offers

import fedtorch as ft
from fedtorch import chained_log as log
from fedtorch.cli import main
from fedtorch.sites import AuditRecord, Policy, Remote, Roster
from fedtorch.sites.audit import audit
from fedtorch.sites.identity import identity, key_directory
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.secure.masked import masked as secure_masked
from fedtorch.trust import privacy, secure

DATA = linear_clients([5, 2, 9, 4, 17, 6])
NAMES = ["a", "b", "c"]


class Column(torch.nn.Linear):
    """A linear model of one output, as many as rows."""

    def __init__(self) -> None:
        super().__init__(3, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[..., 0]


def fedavg() -> ft.Algorithm:
    return ft.fedavg(sgd(0.1))


masked = Carried(fedavg, secure_masked(secure.Grid(30), minimum=2, dropouts=0))


class Place:
    """A server and three sites of one authority, each with a record."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.server = folder, identity.make_server(folder)
        self.sites = {name: identity.make_site(folder, name) for name in NAMES}
        self.roster = Roster(folder / "roster.json")
        for name, each in self.sites.items():
            self.roster.add(name, identity.fingerprint(each.certificate))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def record(self, name: str) -> AuditRecord:
        return AuditRecord(self.path(name), self.server if name == "server" else self.sites[name])

    def run(self, make: Callable[[], ft.Algorithm] = fedavg, rounds: int = 2, **more: Any) -> Remote:
        """A run on record, which ends."""
        policy, wait = more.pop("policy", {}), more.pop("wait", 10.0)
        brought = offers(DATA, make)
        own = {name: policy.get(name, Policy(minimum=1))._replace(carry=carry_of(make)) for name in brought}
        brought = {name: replace(each, policy=own[name]) for name, each in brought.items()}
        recorded = {"records": {name: self.record(name) for name in NAMES}, "record": self.record("server")}
        with joined(brought, identities=self.sites, carry=carry_of(make), **recorded, **more) as (sites, threads):
            sites.finish(ft.run(make(), sites, rounds=rounds))
            for thread in threads.values():
                thread.join(wait)
        return sites

    def verify(self, name: str, head: str | None = None) -> audit.Verdict:
        return audit.verify(self.path(name), certificate=self.server.authority, head=head)

    def events(self, name: str) -> list[dict[str, Any]]:
        return list(AuditRecord.entries(self.path(name)))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """After a run of two rounds; tests leave its records as they are."""
    made = Place(tmp_path_factory.mktemp("ran"))
    made.run(policy={"c": Policy(rounds=1, minimum=1)}, quorum=0.5)
    return made


def lines(place: Place, name: str = "a") -> list[bytes]:
    return place.path(name).read_bytes().splitlines(keepends=True)


def changed(ran: Place, tmp_path: Path, content: list[bytes], **by: Any) -> audit.Verdict:
    path = tmp_path / "changed.jsonl"
    path.write_bytes(b"".join(content))
    return audit.verify(path, **(by or {"certificate": ran.server.authority}))


def test_records_say_who_asked_what_of_whom(ran: Place) -> None:
    for name in ("server", *NAMES):
        verdict = ran.verify(name)
        assert verdict.message.startswith(f"OK: {len(lines(ran, name))} entries, 20"), verdict
        assert verdict.message.endswith(f"UTC, signed by {ran.record(name).identity.name!r}")
        if name != "server":
            assert audit.compare(ran.path("server"), ran.path(name)).holds
    site, server = ran.events("a"), ran.events("server")
    assert site[1]["policy"] == Policy(minimum=1).described()
    (begin,) = [entry for entry in site if entry["event"] == "begin"]
    assert begin["server"] == identity.fingerprint(ran.server.certificate)
    assert begin["fingerprint"]["algorithm"] == "fedavg"
    asked = [entry for entry in site if entry["event"] == "request"]
    assert [(entry["kind"], entry["round"], entry["clients"]) for entry in asked] == [("round", 0, 2), ("round", 1, 2)]
    (run,) = [entry for entry in server if entry["event"] == "run"]
    assert run["messages"] == "the server reads what every site sends"
    assert [entry["clients"] for entry in server if entry["event"] == "sites"] == [{"a": 2, "b": 2, "c": 2}]
    assert server[-1]["kind"] == "over"


def test_what_leaves_a_site_is_on_its_record_once(ran: Place) -> None:
    (entry,) = [event for event in ran.events("a") if event["event"] == "leaves"]
    assert [*entry["fields"][0]] == [
        "change.value.weight, change.value.bias",
        "a site's sum",
        "exact",
        "the server",
    ]


def test_refusals_are_on_both_sides(ran: Place) -> None:
    (refusal,) = [entry for entry in ran.events("c") if entry["event"] == "refusal"]
    (missing,) = [entry for entry in ran.events("server") if entry["event"] == "missing"]
    assert refusal["reason"] == "the site has answered 1 round, and does not answer more" == missing["reasons"]["c"]


def test_a_refused_run_is_on_record(place: Place) -> None:
    with pytest.raises(RuntimeError, match="does not run"):
        place.run(settings={"lr": 1})
    refused = [entry["refused"] for name in NAMES for entry in place.events(name) if entry["event"] == "begin"]
    assert refused, "at one site at least: the server waits for no other after the first refusal"
    assert all("does not run 'it'" in each for each in refused)


def test_there_are_no_rows_and_no_models(ran: Place) -> None:
    """All values are numbers that count, texts of a few dozen characters, and digests."""
    assert max(len(line) for line in lines(ran)[1:]) < 2000

    def numbers(value: Any) -> Iterator[float]:
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from numbers(part)
        if isinstance(value, float):
            yield value

    assert {number for name in ("server", *NAMES) for entry in ran.events(name) for number in numbers(entry)} == {0.5}


def test_epsilon_is_on_record(place: Place) -> None:
    def make() -> ft.Algorithm:
        more = {"entropy": privacy.from_seed(1), "loss": F.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.1)}
        private = privacy.example_level(
            Column(), clip=1.0, noise=2.0, sampling_rate=0.5, steps=1, delta=1e-3, ghost=False, **more
        )
        return ft.fedavg(private)

    place.run(make)
    spent = [entry["epsilon"] for entry in place.events("a") if entry["event"] == "answer"]
    assert len(spent) == 2
    assert 0 < spent[0] < spent[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda all: [*all[:4], all[4].replace(b'"round":0', b'"round":7'), *all[5:]], "entry 5 was changed (its sig"),
        (lambda all: [*all[:4], b"{}\n", *all[5:]], "line 5 is no entry of a log"),
        (lambda all: [*all[:4], *all[6:]], "entries 5 to 6 are missing"),
        (lambda all: [*all[:4], *all[5:]], "entry 5 is missing"),
        (lambda all: [*all[:4], all[5], all[4], *all[6:]], "entry 5 stands behind entry 6: entries were moved"),
        (lambda all: [*all[:5], all[4], *all[5:]], "entry 5 is there twice"),
        (lambda all: all[1:], "does not begin with the certificate"),
        (lambda all: [*all[:4], all[4].replace(b',"round"', b', "round"'), *all[5:]], "line 5 is no entry of a log"),
        (lambda all: [b"x" * 100_000], "does not begin with the certificate"),
        (lambda all: [*all, b"x" * 100_000], "is no entry of a log"),
    ],
)
def test_what_was_changed_is_found(ran: Place, tmp_path: Path, change: Any, message: str) -> None:
    verdict = changed(ran, tmp_path, change(lines(ran)))
    assert not verdict.holds
    assert verdict.message.startswith("FAILED: ")
    assert message in verdict.message


def test_an_entry_of_the_same_key_in_another_place_is_found(place: Place) -> None:
    """The holder of the key goes back to an old copy of the file: what it had written since is contradicted."""
    record = place.record("a")
    record.note("one")
    old = place.path("a").read_bytes()
    record.note("two")
    place.path("b").write_bytes(old)
    other = AuditRecord(place.path("b"), place.sites["a"])
    other.note("another two")
    other.note("three")
    mixed = [*lines(place, "a")[:3], *lines(place, "b")[3:]]
    place.path("c").write_bytes(b"".join(mixed))
    verdict = place.verify("c")
    assert verdict.message.startswith("FAILED: entry 3 was changed, or entry 4, which has the hash")


def test_a_record_of_another_key_is_found(ran: Place, tmp_path: Path) -> None:
    """Also where it calls itself like the site, and where it shows the site's certificate."""
    forger = identity.make_server(tmp_path / "forger")
    posing: Identity = identity.make_site(tmp_path / "forger", "a")
    path = tmp_path / "posing.jsonl"
    AuditRecord(path, posing)
    for by in ({"certificate": ran.server.authority}, {"roster": ran.roster.path}):
        assert "FAILED: signed by another key" in audit.verify(path, **by).message  # type: ignore[arg-type]
    assert audit.verify(path, certificate=forger.authority).holds
    stolen = posing._replace(certificate=ran.sites["a"].certificate)
    with pytest.raises(ValueError, match="Expected the key of the certificate"):
        AuditRecord(tmp_path / "stolen.jsonl", stolen)
    assert changed(ran, tmp_path, lines(ran), roster=ran.roster.path).holds
    assert changed(ran, tmp_path, lines(ran), certificate=ran.sites["a"].certificate).holds
    assert "FAILED: signed by another key" in changed(ran, tmp_path, lines(ran), certificate=posing.certificate).message
    assert "nobody vouches" in audit.verify(ran.path("a")).message
    with pytest.raises(ValueError, match="of another key; begin another file"):
        AuditRecord(ran.path("a"), ran.sites["b"])


def test_a_site_certificate_vouches_for_nobody_else(ran: Place, tmp_path: Path) -> None:
    assert not changed(ran, tmp_path, lines(ran, "b"), certificate=ran.sites["a"].certificate).holds


def test_a_cut_end_is_found_by_a_noted_head_and_by_the_other_side(ran: Place, tmp_path: Path) -> None:
    head, cut = ran.record("a").head, lines(ran)[:-3]
    assert changed(ran, tmp_path, cut).holds  # the file alone does not show it
    verdict = changed(ran, tmp_path, cut, certificate=ran.server.authority, head=head)
    assert verdict.message == f"FAILED: entries {len(cut) + 1} to {len(cut) + 3} are missing at the end"
    assert ran.verify("a", head).holds
    assert "is not the one noted" in ran.verify("a", f"2:{head.partition(':')[2]}").message
    verdict = audit.compare(tmp_path / "changed.jsonl", ran.path("server"))
    assert "is an answer that 'a' has no record of" in verdict.message
    shorter = [line for line in lines(ran, "server") if json.loads(line)["entry"] < len(lines(ran, "server")) - 3]
    (tmp_path / "server.jsonl").write_bytes(b"".join(shorter))
    assert (
        "is a request that 'server.fedtorch' has no record of"
        in audit.compare(tmp_path / "server.jsonl", ran.path("a")).message
    )


def test_records_of_the_same_side_cannot_be_compared(ran: Place, place: Place) -> None:
    with pytest.raises(ValueError, match="of a server and of a site"):
        audit.compare(ran.path("a"), ran.path("b"))
    place.run(rounds=1)
    assert "have no run in common" in audit.compare(ran.path("server"), place.path("a")).message


def test_half_a_line_is_removed_and_said(place: Place) -> None:
    place.record("a").note("one")
    whole = place.path("a").read_bytes()
    place.path("a").write_bytes(whole + b'{"entry":3,"ev')
    verdict = place.verify("a")
    assert verdict.holds
    assert "last line is incomplete" in verdict.remarks[0]
    place.record("a").note("two")
    assert place.verify("a") == place.verify("a")._replace(remarks=())
    repaired = place.events("a")[2]
    assert (repaired["event"], repaired["removed_bytes"]) == ("repaired", 14)
    place.path("b").write_bytes(b'{"cert')  # killed while the file was made
    place.record("b")
    assert place.verify("b").holds


def test_a_file_that_is_no_record_is_refused(place: Place) -> None:
    place.path("a").write_text("my only copy\n")
    with pytest.raises(ValueError, match="to end with an entry of a log"):
        place.record("a")
    place.path("b").write_text("my only copy, without an end of line" * 4000)
    with pytest.raises(ValueError, match="Expected a log"):
        place.record("b")
    assert place.path("b").stat().st_size == 36 * 4000


def test_several_runs_write_one_record_at_once(place: Place) -> None:
    def write(_: int) -> None:
        record = place.record("server")
        for number in range(20):
            record.note("asked", run="r", round=number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    verdict = place.verify("server")
    assert verdict.holds
    assert verdict.message.startswith("OK: 81 entries")


def test_a_record_that_is_cut_or_lost_while_it_is_used_is_refused(place: Place) -> None:
    record = place.record("a")
    record.note("one")
    os.truncate(place.path("a"), 50)
    with pytest.raises(ValueError, match="only to grow"):
        record.note("two")
    place.path("a").unlink()
    with pytest.raises(ValueError, match="only to grow"):
        record.note("two")


def test_what_cannot_be_recorded_is_not_answered(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of site "a" is full from its first answer on; nothing of it leaves the site."""
    note = AuditRecord.note

    def full(self: AuditRecord, event: str, **about: Any) -> None:
        if self.identity.name == "a" and event == "answer":
            raise OSError("no space left on device")
        note(self, event, **about)

    monkeypatch.setattr(AuditRecord, "note", full)
    sites = place.run(rounds=1, quorum=0.5)
    assert sites.troubles == {"a": "the site failed with OSError; see what it says itself"}


def test_a_run_whose_begin_cannot_be_recorded_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of site "a" has no room for that entry, and has for those after it."""
    note = AuditRecord.note

    def full(self: AuditRecord, event: str, **about: Any) -> None:
        if self.identity.name == "a" and event == "begin" and "refused" not in about:
            raise OSError("no space left on device")
        note(self, event, **about)

    monkeypatch.setattr(AuditRecord, "note", full)
    sites = place.run(rounds=1, quorum=0.5, wait=1.0)  # site "a" waits for another run
    assert sites.troubles == {"a": "the site could not begin: OSError; see what it says itself"}
    assert "answer" not in [entry["event"] for entry in place.events("a")]


def test_a_full_disk_leaves_whole_lines(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    record, size = place.record("a"), place.path("a").stat().st_size
    opened = Path.open

    class Full:
        """A file of which half is written."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, line: bytes) -> None:
            self.file.write(line[:10])
            self.file.flush()
            raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Full(opened(path, mode)) if mode == "ab" else opened(path, mode))
        with pytest.raises(OSError, match="no space"):
            record.note("one")
    assert place.path("a").stat().st_size == size
    record.note("two")
    assert place.verify("a").message.startswith("OK: 2 entries")


def test_long_fields_become_digests(place: Place) -> None:
    place.record("a").note("begin", settings={"x": "y" * 10_000_000}, run="r")
    entry = place.events("a")[-1]
    assert entry["settings"]["bytes"] == 10_000_009
    assert entry["run"] == "r"
    assert place.path("a").stat().st_size < 5000


def test_a_server_of_another_authority_begins_no_run(place: Place, tmp_path: Path) -> None:
    other = identity.make_server(tmp_path / "other")
    place.server = other
    with pytest.raises(RuntimeError, match="has not signed the content with which it begins the run"):
        place.run()
    place.server = place.sites["b"]  # a member's certificate is none for servers
    with pytest.raises(ValueError, match="of another key"):
        place.record("server")
    place.path("server").unlink()
    with pytest.raises(RuntimeError, match="has not signed the content with which it begins the run"):
        place.run()


def test_a_server_cannot_begin_something_else_than_it_signs(place: Place) -> None:
    record, site_record = place.record("server"), place.record("a")
    statement = record.statement({"algorithm": "averaging"})
    assert site_record.server_of({"algorithm": "averaging"}, statement) == identity.fingerprint(
        place.server.certificate
    )
    for about, said in (({"algorithm": "other"}, statement), ({"algorithm": "averaging"}, {"certificate": "x"})):
        with pytest.raises(ValueError, match="has not signed"):
            site_record.server_of(about, said)


def test_masked_rounds_are_on_record_with_one_sync_a_round(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = list[Path]()
    sync = log.ChainedLog.sync

    def counted(self: log.ChainedLog) -> None:
        syncs.append(self.path)
        sync(self)

    for name in ("server", *NAMES):
        place.record(name)
    roster = key_directory.sign_roster(place.folder, place.roster)
    policy = {name: Policy(remember_sums=False, minimum=1) for name in NAMES}
    counts = []
    for rounds in (1, 4):
        syncs.clear()
        with monkeypatch.context() as patch:
            patch.setattr(log.ChainedLog, "sync", counted)
            place.run(masked, rounds=rounds, roster=roster, policy=policy)
        counts.append([syncs.count(place.path(name)) for name in ("server", "a")])
    assert [four - one for one, four in zip(*counts)] == [3, 3]
    (run, _) = [entry for entry in place.events("server") if entry["event"] == "run"]
    assert "sums under masks" in run["messages"]
    assert {"keys", "round", "phase"} <= {entry.get("kind") for entry in place.events("a")}
    for name in NAMES:
        assert audit.compare(place.path("server"), place.path(name)).holds


def test_a_checkpoint_knows_how_much_was_on_record(place: Place) -> None:
    record = place.record("server")
    with joined(offers(DATA, fedavg), record=record) as (sites, _):
        run = ft.Run(fedavg(), sites)
        run.step()
        saved = run.state_dict()
        run.load_state_dict(saved)
        place.path("server").write_bytes(b"".join(lines(place, "server")[:-1]))
        with pytest.raises(ValueError, match=r"entries \d+ to \d+ are missing at the end"):
            run.load_state_dict(saved)
    with joined(offers(DATA, fedavg)) as (sites, _), pytest.raises(ValueError, match="Expected record="):
        ft.Run(fedavg(), sites).load_state_dict(saved)


def test_the_command_says_ok_or_failed_and_why(ran: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = tmp_path / "authority.pem"
    authority.write_bytes(ran.server.authority)
    files = [str(ran.path(name)) for name in ("server", "a", "b")]
    assert main(["record", "verify", *files, "--certificate", str(authority)]) == 0
    said = capsys.readouterr().out
    assert said.count("  OK: ") == 5
    assert "'server.fedtorch' and 'b' agree on 1 run" in said
    assert main(["record", "verify", files[1]]) == 1
    assert "FAILED: nobody vouches" in capsys.readouterr().out
    cut = tmp_path / "a.jsonl"
    cut.write_bytes(b"".join(lines(ran)[:-3]))
    assert main(["record", "verify", str(cut), "--roster", str(ran.roster.path)]) == 0
    assert main(["record", "verify", files[0], str(cut), "--certificate", str(authority)]) == 1
    assert "is an answer that 'a' has no record of" in capsys.readouterr().out
    head = ran.record("a").head
    assert main(["record", "verify", str(cut), "--certificate", str(authority), "--head", head]) == 1
    assert "are missing at the end" in capsys.readouterr().out
    assert main(["record", "verify", *files, "--certificate", str(authority), "--head", head]) == 1
    assert "Expected one audit record" in capsys.readouterr().err


def test_the_page_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (public.HERE / "howto" / "audit.md").read_text()
    names: dict[str, Any] = {}
    outputs = []
    for cell in public.CELL.findall(page):
        lines = [line for line in cell.splitlines() if not public.NOT_PYTHON.match(line)]
        exec(compile("\n".join(lines), "audit.md", "exec"), names)
        outputs.append((capsys.readouterr().out, names.get("code")))
    assert "refusal {'reason': 'the site has answered 2 rounds, and does not answer more'}" in outputs[1][0]
    assert (outputs[2][0].count("  OK: "), outputs[2][1]) == (5, 0)
    assert "was changed (its signature does not fit" in outputs[3][0]
    assert outputs[3][1] == 1
