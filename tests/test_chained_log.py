"""Hash-chained logs: what is appended stays as it was, by several writers and after kills; what was changed shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedtorch import chained_log as log
from fedtorch.chained_log import ChainedLog, Entry, Facts


def sign(content: bytes) -> str:
    return log.digest(b"secret" + content)


def verifies(content: bytes, signature: str) -> bool:
    return sign(content) == signature


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A signed log of five entries."""
    made = ChainedLog(tmp_path / "log.jsonl", {"event": "opened"}, sign)
    assert [made.append({"event": "round", "number": i}) for i in range(4)] == [2, 3, 4, 5]
    return made.path


def test_entries_are_read_as_they_were_written(path: Path) -> None:
    entries = list(log.read(path))
    assert [entry.number for entry in entries] == [1, 2, 3, 4, 5]
    assert entries[3].content["number"] == 2
    assert entries[1].content["previous"] == entries[0].digest == log.digest(path.read_bytes().splitlines(True)[0])
    assert log.faults(log.read(path), verifies) == []
    again = ChainedLog(path, {"event": "opened"}, sign)
    assert (again.entries, again.head, again.digest_at(3)) == (5, entries[-1].digest, entries[2].digest)
    assert again.digest_at(9) == ""
    assert path.stat().st_mode & 0o777 == 0o600


CHANGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "changed": (lambda lines: [*lines[:2], lines[2].replace(b'"number":1', b'"number":7'), *lines[3:]], "was changed"),
    "spaced": (lambda lines: [lines[0].replace(b":", b": "), *lines[1:]], "line 1 is no entry of a log"),
    "removed": (lambda lines: lines[:2] + lines[3:], "entry 3 is missing"),
    "two removed": (lambda lines: lines[:1] + lines[3:], "entries 2 to 3 are missing"),
    "twice": (lambda lines: [*lines, lines[1]], "entry 2 is there twice"),
    "moved": (lambda lines: [*lines[:2], lines[3], lines[2], lines[4]], "entries were moved"),
    "unsigned": (
        lambda lines: [*lines[:4], log.canonical({**json.loads(lines[4]), "signature": ""}) + b"\n"],
        "has no signature",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_shows(name: str, path: Path) -> None:
    change, said = CHANGES[name]
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    found = log.faults(log.read(path), verifies)
    assert any(said in fault for fault in found), found


def test_without_a_key_the_hashes_show_a_change(tmp_path: Path) -> None:
    made = ChainedLog(tmp_path / "log", {"event": "opened"})
    for i in range(3):
        made.append({"number": i})
    lines = made.path.read_bytes().splitlines(keepends=True)
    made.path.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"number":1', b'"number":7'), lines[3]]))
    (fault,) = log.faults(log.read(made.path))
    assert fault.startswith("entry 3 was changed, or entry 4")


def test_half_a_line_is_set_aside_and_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"entry":6,"e')
    assert log.faults(log.read(path), verifies) == []
    assert log.is_partial(list(log.read(path))[-1])
    again = ChainedLog(path, {"event": "opened"}, sign)
    assert "was incomplete (13 bytes)" in caplog.text
    aside = path.with_name("log.jsonl.partial")
    assert (aside.read_bytes(), aside.stat().st_mode & 0o777) == (b'{"entry":6,"e\n', 0o600)
    repaired = list(log.read(path))[-1].content
    assert (repaired["event"], repaired["removed_bytes"], again.entries) == (log.REPAIRED, 13, 6)
    assert log.faults(log.read(path), verifies) == []


def test_writers_take_turns(path: Path) -> None:
    seen: list[int] = []
    first, second = (
        ChainedLog(path, {}, sign, take=taken) for taken in (lambda entry: seen.append(entry.number), None)
    )
    assert seen == [1, 2, 3, 4, 5]
    assert second.append({"event": "other"}) == 6
    with first.exclusive():
        assert seen[-1] == 6
        assert first.append({"event": "inside"}) == 7
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [second.append({"event": "thread"}) for _ in range(5)], range(4)))
    assert first.append({"event": "last"}) == 28
    assert seen == list(range(1, 29))
    assert log.faults(log.read(path), verifies) == []


def test_a_log_that_is_followed_is_checked(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)

    def refuse(entry: Entry) -> None:
        if entry.content.get("number") == 1:
            raise KeyError("noise")

    with pytest.raises(ValueError, match=r"Line 3 of .* cannot be used: 'noise'"):
        ChainedLog(path, {}, take=refuse)
    wrong = {
        "Line 3 of .*: it does not follow the line before": lines[:2] + lines[3:],
        "Line 1 of .*: it does not follow the line before": lines[1:],
        "Line 2 of .*: it is no entry of a log": [lines[0], b"\xff\n"],
    }
    for said, text in wrong.items():
        path.write_bytes(b"".join(text))
        with pytest.raises(ValueError, match=said):
            ChainedLog(path, {}, take=lambda entry: None)


def test_refusals(path: Path) -> None:
    used = ChainedLog(path, {"event": "opened"}, sign)
    with pytest.raises(ValueError, match=r"Expected no field \['entry', 'time'\] in an entry"):
        used.append({"entry": 3, "time": 4})
    with pytest.raises(ValueError, match="Expected an entry of at most 65536 bytes"):
        used.append({"event": "x" * log.LONGEST})
    with pytest.raises(ValueError, match="not JSON compliant"):
        used.append({"loss": float("nan")})
    assert used.append({"event": "after"}) == 6
    cut = path.read_bytes()[:200]
    for lose in (lambda: path.write_bytes(cut), path.unlink):
        lose()
        with pytest.raises(ValueError, match="only to grow, but it is lost, or shorter"):
            used.append({"event": "next"})
    path.write_text("my only copy\n")
    with pytest.raises(ValueError, match="to end with an entry of a log"):
        ChainedLog(path, {"event": "opened"}, sign)
    path.write_text("no end of line" * log.LONGEST)
    with pytest.raises(ValueError, match="Expected a log of lines"):
        ChainedLog(path, {"event": "opened"}, sign)


def test_a_full_disk_leaves_a_durable_log_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ChainedLog(tmp_path / "log", {"event": "opened"}, durable=True)
    whole = made.path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            made.append({"event": "next"})
    assert made.path.read_bytes() == whole
    assert made.append({"event": "next"}) == 2
    assert log.faults(log.read(made.path)) == []


def test_chained_contents_show_a_change() -> None:
    contents = log.chained([{"round": i} for i in range(4)])
    assert log.faults(log.entries_of(json.loads(json.dumps(contents)))) == []
    contents[2]["round"] = 9
    assert log.faults(log.entries_of(contents)) != []
    assert log.faults(log.entries_of([{"round": 1}, "text", None])) == [
        "line 1 is no entry of a log: it was changed",
        "line 2 is no entry of a log: it was changed",
        "line 3 is no entry of a log: it was changed",
    ]


def known(path: Path | None) -> tuple[Facts, list[dict[str, Any]]]:
    seen = list[dict[str, Any]]()
    return Facts(
        path, "numbers", lambda fact: seen.append({name: fact[name] for name in fact.keys() & {"number"}})
    ), seen


def test_facts_are_known_to_all_who_have_the_log(tmp_path: Path) -> None:
    (one, first), (other, second), (alone, third) = (
        known(path) for path in (tmp_path / "facts", tmp_path / "facts", None)
    )
    long = "ü" * log.LONGEST
    for facts, number in ((one, 1), (other, long), (one, 3), (alone, 4)):
        with facts.alone():
            facts.add({"number": number})
    with other.alone():
        assert first == second == [{"number": 1}, {"number": long}, {"number": 3}]
    assert third == [{"number": 4}]


def test_a_fact_that_was_cut_off_is_not_known_and_hides_no_later_one(tmp_path: Path) -> None:
    (facts, seen), long = known(tmp_path / "facts"), "x" * log.LONGEST
    for number in (1, long):
        with facts.alone():
            facts.add({"number": number})
    lines = (tmp_path / "facts").read_bytes().splitlines(keepends=True)
    for kept in (2, 3, len(lines) - 1):
        (tmp_path / "facts").write_bytes(b"".join(lines[:kept]) + lines[kept][:-9])
        again, seen = known(tmp_path / "facts")
        for number in (2, 2 * long):
            with again.alone():
                again.add({"number": number})
        assert seen == [{"number": 1}, {"number": 2}, {"number": 2 * long}]
        assert known_again(tmp_path / "facts") == seen


def known_again(path: Path) -> list[dict[str, Any]]:
    facts, seen = known(path)
    facts.open()
    return seen


@pytest.mark.parametrize(
    "damage", [lambda whole: b"", lambda whole: whole.replace(b":3", b":4"), lambda whole: b"{}\n"]
)
def test_damaged_facts_are_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "facts"
    facts, _ = known(path)
    with facts.alone():
        facts.add({"number": 3})  # in the last entry, whose digest no other has
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="facts"), known(path)[0].alone():
        pass
    with pytest.raises(ValueError, match="begins otherwise"):
        Facts(ChainedLog(tmp_path / "other", {"event": "other"}, log.digest).path, "numbers", print).open()
