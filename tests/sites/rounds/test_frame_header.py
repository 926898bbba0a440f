"""The bytes of frames: counters behind a header that is the same in every round, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors.torch
import torch

from fedtorch import wire
from fedtorch.sites.rounds import _frame_header as header, frames as frames

TENSORS = {"x": torch.arange(3.0), "n": torch.arange(2)}
ABOUT = {"run": "a" * 32, "sequence": 2**61, "kept": 0, "keep": [0, 5], "round": 3, "clients": 2}


def changed(frame: bytes, **changes: Any) -> bytes:
    """A frame whose metadata say something else; None takes a value away."""
    stop = 8 + int.from_bytes(frame[:8], "little")
    said = json.loads(frame[8:stop])
    about = {**json.loads(said["__metadata__"]["fedtorch"]), **changes}
    said["__metadata__"]["fedtorch"] = json.dumps(about)
    coded = json.dumps(said, separators=(",", ":")).encode()
    return len(coded).to_bytes(8, "little") + coded + frame[stop:]


@pytest.mark.parametrize(
    "about",
    [
        ABOUT,
        {},
        {"sequence": -(2**63)},
        {"keep": []},
        {"sequence": 2**63},  # too large for a counter, as for `Frame.integer`
        {"sequence": True, "kept": 1.0, "keep": [True], "round": None},
        {"keep": [0.5], "kept": "7"},
    ],
)
def test_what_is_said_comes_back(about: dict[str, Any]) -> None:
    for _ in range(2):  # the second time its header is known
        frame = frames.read(frames.encode("round", TENSORS, **about), "a")
        assert frame.about == {"kind": "round", **about}
        types = {name: type(value) for name, value in frame.about.items()}
        assert types == {"kind": str, **{name: type(value) for name, value in about.items()}}
        got = frame.tree(TENSORS)
        assert all(torch.equal(got[name], TENSORS[name]) for name in TENSORS)


def test_the_header_is_the_same_in_every_round_and_known_by_all_of_its_bytes() -> None:
    first, later = frames.encode("round", TENSORS, **ABOUT), frames.encode("round", TENSORS, **ABOUT | {"sequence": 9})
    other = frames.encode("round", TENSORS, **ABOUT | {"clients": True})
    seen = [frames.read(frame, "a") for frame in (first, later, other)]
    assert seen[0].header is seen[1].header is not seen[2].header
    assert [frame.about["sequence"] for frame in seen] == [2**61, 9, 2**61]
    assert [frame.about["clients"] for frame in seen] == [2, 2, True]
    assert seen[2].about["clients"] is True


def test_what_a_reader_changes_is_not_in_the_next_frame() -> None:
    payload = frames.encode("round", TENSORS, **ABOUT)
    about = frames.read(payload, "a").about
    assert isinstance(about, dict)
    about["clients"], about["sequence"] = 7, 7
    about["keep"].append(7)
    assert frames.read(payload, "a").about == {"kind": "round", **ABOUT}


@pytest.mark.parametrize(
    "counters",
    [
        None,
        3,
        [3],
        [["sequence"]],
        [["sequence", None, 1]],
        [["run", None]],
        [["sequence", None], ["sequence", None]],
        [["sequence", -1]],
        [["sequence", True]],
        [["keep", 2**40]],
        [[["sequence"], None]],
        {"sequence": None},
    ],
)
def test_counters_that_are_none_are_refused(counters: Any) -> None:
    frame = frames.encode("round", TENSORS, **ABOUT)
    for _ in range(2):
        with pytest.raises(wire.PayloadError, match="'a': expected counters by name, but got"):
            frames.read(changed(frame, counters=counters), "a")


def test_a_counter_that_the_metadata_say_too_is_refused() -> None:
    with pytest.raises(wire.PayloadError, match="expected counters by name"):
        frames.read(changed(frames.encode("round", TENSORS, **ABOUT), sequence=1), "a")


def test_bytes_that_are_missing_or_too_many_are_refused() -> None:
    frame = frames.encode("round", TENSORS, **ABOUT)
    stop = 8 + int.from_bytes(frame[:8], "little")
    for known in (False, True):
        if known:
            frames.read(frame, "a")
        for wrong in (*(frame[: stop + cut] for cut in (0, 8, 39)), frame[:-8], frame + bytes(8)):
            with pytest.raises(wire.PayloadError, match=r"counters|bytes of numbers after the header, but got"):
                frames.read(wrong, "a").tree(TENSORS)


def test_counters_elsewhere_are_refused() -> None:
    """Behind the tensors, and at the end of a header that begins with the metadata, and nowhere else."""
    frame = frames.encode("round", TENSORS, **ABOUT)
    stop = 8 + int.from_bytes(frame[:8], "little")
    said = json.loads(frame[8:stop])
    about, field = said.pop("__metadata__"), said.pop("__counters__")
    more = {**field, "shape": [2, 3]}, {**field, "dtype": "F64"}, {**field, "data_offsets": [0, 48]}
    headers = [{"__metadata__": about, **said, "__counters__": each} for each in more]
    headers += [{"__metadata__": about, "__counters__": field, **said}, {**said, "__counters__": field}]
    headers += [{**said, "__counters__": field, "__metadata__": about}, {"__metadata__": about, **said}]
    for each in headers:
        coded = json.dumps(each, separators=(",", ":")).encode()
        with pytest.raises(wire.PayloadError, match=r"counters|kind of frame"):
            frames.read(len(coded).to_bytes(8, "little") + coded + frame[stop:], "a")


def test_any_library_reads_a_frame() -> None:
    read = safetensors.torch.load(frames.encode("round", TENSORS, **ABOUT))
    assert read.pop("__counters__").tolist() == [2**61, 0, 0, 5, 3]
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)


def test_no_tensor_is_called_as_the_counters_are() -> None:
    with pytest.raises(ValueError, match="other names than '__counters__'"):
        frames.encode("answer", {"__counters__": torch.ones(1)}, sequence=1)


@pytest.mark.parametrize("like", [{"x": torch.empty(4), "n": TENSORS["n"]}, {"x": TENSORS["x"]}, None])
def test_tensors_of_a_known_header_are_compared_with_what_is_expected(like: Any) -> None:
    frame = frames.read(frames.encode("round", TENSORS, **ABOUT), "a")
    for expected in (like, wire.Template(like)):
        with pytest.raises(wire.PayloadError, match=r"expected shape|the fields of the tree"):
            frame.tree(expected)


def test_a_header_of_another_library_is_read_the_same() -> None:
    """With the metadata at the end, where there are no counters."""
    frame = frames.encode("hello", TENSORS, clients=["x"])
    stop = 8 + int.from_bytes(frame[:8], "little")
    said = json.loads(frame[8:stop])
    coded = json.dumps({**{name: said[name] for name in TENSORS}, "__metadata__": said["__metadata__"]}).encode()
    read = frames.read(len(coded).to_bytes(8, "little") + coded + frame[stop:], "a")
    assert read.about == {"kind": "hello", "clients": ["x"]}
    assert torch.equal(read.tree(TENSORS)["x"], TENSORS["x"])


def test_few_headers_are_kept_and_none_that_is_long() -> None:
    long = frames.encode("round", None, text="x" * 2**15)
    for _ in range(2):
        assert frames.read(long, "a").text("text") == "x" * 2**15
    for number in range(3 * header._MOST_CACHED):
        frames.read(frames.encode("round", None, text=str(number)), "a")
    for kept in (header._READ, header._WRITTEN):
        assert len(kept) <= header._MOST_CACHED
    assert max(map(len, header._READ)) <= header._LONGEST
