"""Hostile headers of safetensors are refused by the wire and by checkpoints, in no time, whatever they ask for."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
import torch

from fedtorch import _files as files, checkpoint, wire
from fedtorch._safetensors_header import DIGEST_AT

LIKE = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3])}
DATA = LIKE["b"].numpy().tobytes() + LIKE["a"].numpy().tobytes()
HONEST = {
    "b": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
}


def text(fields: object = HONEST, more: str = "") -> str:
    """The fields of a header without braces, and what is appended to them."""
    return json.dumps(fields, separators=(",", ":"))[1:-1] + more


def changed(name: str, **values: object) -> str:
    return text({**HONEST, name: {**HONEST[name], **values}})


DEEP = "[" * 10**5
HOSTILE: dict[str, tuple[str | bytes, int | None, bytes]] = {  # the fields, the header's length, the numbers
    "a length beyond the file": (text(), 10**6, DATA),
    "the longest length": (text(), 2**64 - 1, DATA),
    "a length that is negative where it is signed": (text(), 2**63, DATA),
    "no header": (text(), 0, DATA),
    "a header that is cut off": (text(), 40, DATA),
    "lists too deep": (text(more=f',"c":{DEEP}{"]" * 10**5}'), None, DATA),
    "lists without end": (text(more=f',"c":{DEEP}'), None, DATA),
    "objects too deep": (text(more=',"c":' + '{"d":' * 10**5 + "1" + "}" * 10**5), None, DATA),
    "a shape too deep": (text().replace("[2]", DEEP + "]" * 10**5), None, DATA),
    "offsets that overlap": (changed("a", data_offsets=[0, 8]), None, DATA[:8]),
    "a gap between offsets": (changed("a", data_offsets=[12, 20]), None, DATA + bytes(4)),
    "offsets below zero": (changed("b", data_offsets=[-8, 0]), None, DATA),
    "offsets beyond the numbers": (changed("a", data_offsets=[8, 2**40]), None, DATA),
    "offsets that go back": (changed("a", data_offsets=[16, 8]), None, DATA),
    "offsets that wrap around": (changed("a", data_offsets=[2**64 - 8, 2**64]), None, DATA),
    "three offsets": (changed("a", data_offsets=[8, 16, 16]), None, DATA),
    "a shape whose product wraps around": (changed("a", shape=[2**32, 2**32, 2]), None, DATA),
    "a shape below zero": (changed("a", shape=[-1, -2]), None, DATA),
    "a shape in parts": (changed("a", shape=[2.0]), None, DATA),
    "a shape of a truth": (changed("b", shape=[True]), None, DATA),
    "a shape of more numbers": (changed("a", shape=[2**20]), None, DATA),
    "a dtype of other sizes": (changed("a", dtype="F64"), None, DATA),
    "a dtype that is none": (changed("a", dtype="F31"), None, DATA),
    "a name twice": (text(more=f",{text({'a': HONEST['a']})}"), None, DATA),
    "a name twice by an escape": (
        text(more=f",{text({'a': HONEST['a']})}").replace(',"a":', ',"\\u0061":', 1),
        None,
        DATA,
    ),
    "metadata twice": (text(more=',"__metadata__":{"x":"1"},"__metadata__":{"x":"2"}'), None, DATA),
    "metadata that are no texts": (text(more=',"__metadata__":{"x":1}'), None, DATA),
    "another field": (text({**HONEST, "a": {**HONEST["a"], "more": 1}}), None, DATA),
    "a field too few": (text({**HONEST, "a": {"dtype": "F32", "shape": [2]}}), None, DATA),
    "half a letter": (text(more=',"\\ud800":1'), None, DATA),
    "bytes that are no UTF-8": (text().encode().replace(b'"a"', b'"\xff"'), None, DATA),
    "numbers that are missing": (text(), None, DATA[:-1]),
    "numbers that nothing says": (text(), None, DATA + b"\0"),
}


def header(start: str, fields: str | bytes, length: int | None, data: bytes) -> bytes:
    coded = start.encode() + (fields if isinstance(fields, bytes) else fields.encode()) + b"}"
    return (len(coded) if length is None else length).to_bytes(8, "little") + coded + data


def payload(fields: str | bytes, length: int | None, data: bytes) -> bytes:
    return header("{", fields, length, data)


def file(fields: str | bytes, length: int | None, data: bytes) -> bytes:
    """As a checkpoint, with a digest that fits."""
    whole = header(f'{{"__metadata__":{{"sha256":"{"0" * files.DIGITS}"}},', fields, length, data)
    digits = hashlib.sha256(whole[:DIGEST_AT] + whole[DIGEST_AT + files.DIGITS :]).hexdigest().encode()
    return whole[:DIGEST_AT] + digits + whole[DIGEST_AT + files.DIGITS :]


def test_the_honest_header_is_read_by_both(tmp_path: Path) -> None:
    (tmp_path / "honest").write_bytes(file(text(), None, DATA))
    for read in (wire.decode(payload(text(), None, DATA), LIKE), checkpoint.read(tmp_path / "honest")):
        assert all(torch.equal(read[name], LIKE[name]) for name in LIKE)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_payload_is_refused_in_no_time(kind: str) -> None:
    hostile, began = payload(*HOSTILE[kind]), time.process_time()
    for _ in range(2):  # nothing that is remembered of the first lets the second in
        with pytest.raises(wire.PayloadError):
            wire.decode(hostile, LIKE, client="ward 7")
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "another field"])  # which the library passes over
def test_a_hostile_checkpoint_is_refused_in_no_time(kind: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.safetensors").write_bytes(file(*HOSTILE[kind]))
    began = time.process_time()
    with pytest.raises(ValueError, match=r"hostile\.safetensors"):
        checkpoint.read(tmp_path / "hostile.safetensors")
    assert time.process_time() - began < 1.0
