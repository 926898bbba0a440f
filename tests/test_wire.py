"""Payloads: round trips, sizes, what safetensors makes of them, every refusal, and hostile senders."""

from __future__ import annotations

import json
import math
import pickle
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

from fedtorch import _safetensors_header as headers, tree, wire


class Message(NamedTuple):
    value: Any
    weight: Any


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS_8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8]
INTEGERS += [torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool]
DTYPES = [*FLOATS, *FLOATS_8, torch.complex64, *INTEGERS]


def trees() -> list[tree.Tree]:
    base = torch.arange(12.0).reshape(3, 4)
    return [
        {"weight": base, "bias": torch.ones(3, dtype=torch.float64)},
        Message({"layer.0": {"weight": base}}, torch.tensor(3.0)),
        (base, (base.T, base[:, 1], base[::2]), torch.tensor(1).expand(5, 2)),
        {"view": base[1], "same": base, "again": base},
        {
            "nothing": None,
            "scalar": torch.tensor(True),
            "no rows": torch.zeros(0, 3),
            "none": torch.zeros(2, 0),
        },
        {'é"\\\n\t\x01\x7f/🌍': torch.zeros(2, dtype=torch.bfloat16), "": torch.ones(1, dtype=torch.int8)},
        {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES},
        {f"{i}": torch.zeros(i, dtype=DTYPES[i % len(DTYPES)]) for i in range(40)},
        torch.ones(2, 3),
        torch.zeros(()),
        {"parameter": torch.nn.Parameter(torch.ones(2)), "conjugate": torch.tensor([1 + 2j]).conj()},
        {},
        {"nothing": None, "inside": ({}, ())},
        None,
    ]


IDS = [str(i) for i in range(len(trees()))]


def equal(first: tree.Tree, second: tree.Tree) -> None:
    first, second = tree.flatten(first), tree.flatten(second)
    assert first.keys() == second.keys()
    for name, leaf in first.items():
        assert (leaf.shape, leaf.dtype) == (second[name].shape, second[name].dtype)
        bits = [x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (leaf, second[name])]
        assert torch.equal(*bits)


@pytest.mark.parametrize("sent", trees(), ids=IDS)
def test_round_trip(sent):
    payload = wire.encode(sent)
    got = wire.decode(payload, like=tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), sent))
    assert type(got) is type(sent) or isinstance(sent, torch.Tensor)
    equal(got, sent)
    copy = wire.decode(payload, like=sent)
    for leaf in tree.leaves(got):
        leaf.zero_()  # writable, and nobody else's
    equal(copy, sent)
    equal(wire.decode(payload, like=sent), sent)


@pytest.mark.parametrize("sent", trees(), ids=IDS)
def test_size_is_that_of_the_payload(sent):
    assert wire.size(sent) == len(wire.encode(sent))
    for count in (0, 1, 3):
        stacked = tree.map(lambda leaf, n=count: leaf.detach().expand(n, *leaf.shape), sent)
        assert wire.size_of(tree.row_layout(stacked)) == wire.size(sent)


def test_nothing_is_sent_without_leaves():
    assert wire.encode({"a": None}) == b""
    assert wire.size({"a": (None, {})}) == wire.size_of(tree.row_layout({})) == 0
    assert wire.decode(b"", like={"a": None}) == {"a": None}
    assert wire.decode(safetensors.torch.save({}), like={}) == {}
    assert wire.metadata(b"") == {}
    assert wire.metadata(wire.encode({}, {"rows": 0})) == {"rows": 0}


def test_size_is_cheap_and_bounded():
    wire.size_of.cache_clear()
    sent = {"weight": torch.zeros(3, 4)}
    assert wire.size(sent) == wire.size(tree.map(torch.ones_like, sent))
    assert wire.size_of(tree.row_layout(tree.expand(sent, 7))) == wire.size(sent)
    assert (wire.size_of.cache_info().misses, wire.size_of.cache_info().hits) == (1, 3)
    assert wire.size_of.cache_info().maxsize is not None


def test_row_size_needs_rows():
    with pytest.raises(ValueError, match=r"leaves \(K, \.\.\.\), but got a scalar in 'a\.b'"):
        wire.size_of(tree.row_layout({"a": {"b": torch.tensor(1.0)}}))


@pytest.mark.parametrize("sent", trees(), ids=IDS)
def test_safetensors_reads_and_writes_the_same(sent):
    flat = {k: v.detach().resolve_conj().clone(memory_format=torch.contiguous_format) for k, v in tree.items(sent)}
    if flat:
        equal(safetensors.torch.load(wire.encode(sent)), flat)
        assert len(safetensors.torch.save(flat)) == wire.size(sent)
    equal(wire.decode(safetensors.torch.save(flat), like=sent), sent)


def test_same_tree_same_bytes():
    sent = {"a": torch.ones(2), "b": torch.ones(3, dtype=torch.int64), "c": torch.zeros(1, dtype=torch.bool)}
    shuffled = {name: sent[name].clone() for name in "cab"}
    facts = {"z": [1, {"y": None, "x": "é"}], "a": 0.5}
    assert wire.encode(sent, facts) == wire.encode(shuffled, dict(reversed(facts.items())))


def test_metadata():
    facts = {"client": "Straße 7 🌍", "rows": 12, "nested": {"list": [1, 2.5, None, True, '"\\']}}
    payload = wire.encode({"a": torch.ones(2)}, facts)
    assert wire.metadata(payload) == facts
    assert wire.metadata(wire.encode({"a": torch.ones(2)})) == {}
    equal(wire.decode(payload, like={"a": torch.empty(2)}), {"a": torch.ones(2)})
    assert set(safetensors.torch.load(payload)) == {"a"}
    with pytest.raises(wire.PayloadError, match="a header of at most 8 bytes, but got a header length of"):
        wire.metadata(payload, limit=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[1]",
            r"^payload of client 3 in round 5: expected a metadata that is a JSON object, but got \[1\]$",
        ),
        ('{"a": NaN}', "expected a metadata in JSON, but got the number NaN"),
        ('{"a": 1, "a": 2}', "but got the name 'a' twice"),
        ("{" * 10**5, "Expecting property name"),
        ('{"a":' * 10**5, "nested too deeply"),
    ],
)
def test_hostile_metadata(text, message):
    with pytest.raises(wire.PayloadError, match=message):
        wire.metadata(build({"__metadata__": {"fedtorch": text}}), client=3, round=5)


@pytest.mark.parametrize(
    ("sent", "facts", "error", "message"),
    [
        (
            {"a": torch.empty(1, dtype=torch.float8_e8m0fnu)},
            {},
            TypeError,
            "float8_e8m0fnu in 'a'; convert",
        ),
        ({"a": torch.eye(2).to_sparse()}, {}, TypeError, r"call \.to_dense\(\) first"),
        ({"__metadata__": torch.ones(1)}, {}, ValueError, "other than '__metadata__'"),
        ({"a": torch.ones(1), "b": {"c": [1.0]}}, {}, TypeError, "but got list"),
        ({}, {"a": math.nan}, ValueError, "not JSON compliant"),
        ({}, {"a": torch.ones(1)}, TypeError, "not JSON serializable"),
        ({}, {"a": "x" * 2**20}, ValueError, "bytes of metadata"),
    ],
)
def test_encode_refuses(sent, facts, error, message):
    with pytest.raises(error, match=message):
        wire.encode(sent, facts)


def build(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A payload with any header: bytes, text, or what JSON makes of a value."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


LIKE = {"delta": Message({"weight": torch.ones(2, 3)}, torch.ones(1, dtype=torch.bool))}
W, M = "delta.value.weight", "delta.weight"
WEIGHT = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
MASK = {"dtype": "BOOL", "shape": [1], "data_offsets": [24, 25]}
DATA = bytes(24) + b"\1"


def number(value: float) -> bytes:
    return wire.encode({W: torch.tensor([[1, 1, 1], [1, value, 1]]), M: torch.ones(1, dtype=torch.bool)})


def entries(weight: Any = None, mask: Any = None, data: bytes = DATA, **more: Any) -> bytes:
    """An honest payload of `LIKE` with changed entries in its header."""
    weight = WEIGHT | (weight or {}) if not isinstance(weight, int) else weight
    return build({W: weight, M: MASK | (mask or {}), **more}, data)


AT_W, AT_M = f", field '{W}': expected ", f", field '{M}': expected "
REFUSED = [
    ("x", ": expected bytes, but got str"),
    (bytearray(50), ": expected bytes, but got bytearray"),
    (None, ": expected bytes, but got NoneType"),
    (bytes(1001), ": expected at most 1000 bytes, but got 1001; raise the limit if that is right"),
    (b"", ": expected 8 bytes that count the header, but got 0 bytes in all"),
    (b"1234567", ": expected 8 bytes that count the header, but got 7 bytes in all"),
    (build({}, length=9), ": expected a header of at most 2 bytes, but got a header length of 9"),
    (
        build("", length=2**64 - 1),
        f": expected a header of at most 0 bytes, but got a header length of {2**64 - 1}",
    ),
    (build(b"\xff{}"), ": expected a header in UTF-8, but got invalid start byte at byte 0"),
    (build("hello"), ": expected a header in JSON, but got Expecting value: line 1 column 1 (char 0)"),
    (build("[" * 99), ": expected a header in JSON, but got Expecting value: line 1 column 100 (char 99)"),
    (build("[" * 900000), ": expected a header in JSON, but got one nested too deeply"),
    (build([1, 2]), ": expected a header that is a JSON object, but got [1, 2]"),
    (build('{"a": 1, "a": 1}'), ": expected a header in JSON, but got the name 'a' twice"),
    (build('{"a": Infinity}'), ": expected a header in JSON, but got the number Infinity"),
    (build({"__metadata__": [1]}), ": expected __metadata__ to map names to texts, but got [1]"),
    (build({"__metadata__": {"a": 1}}), ": expected __metadata__ to map names to texts, but got {'a': 1}"),
    (build({W: WEIGHT}), f": expected the fields of the tree, but got missing '{M}' and extra none"),
    (
        entries(**{f"{i}\n": MASK for i in range(5)}),
        r": expected the fields of the tree, but got missing none and extra '0\n', '1\n', '2\n', 2 more",
    ),
    (entries(weight=1), AT_W + "dtype, shape and data_offsets, but got 1"),
    (
        entries(mask={"more": 1}),
        AT_M + "dtype, shape and data_offsets, but got "
        "{'data_offsets': [24, 25], 'dtype': 'BOOL', 'more': 1, 'shape': [1]}",
    ),
    (entries({"dtype": "F64"}), AT_W + "dtype torch.float32, but got torch.float64"),
    (entries({"dtype": "os"}), AT_W + "dtype torch.float32, but got 'os'"),
    (entries({"dtype": []}), AT_W + "dtype torch.float32, but got []"),
    (entries({"shape": [2, 4]}), AT_W + "shape (2, 3), but got (2, 4)"),
    (entries({"shape": [2.0, 3]}), AT_W + "shape (2, 3), but got (2.0, 3)"),
    (entries({"shape": "2"}), AT_W + "shape (2, 3), but got '2'"),
    (entries(mask={"shape": [True]}), AT_M + "shape (1,), but got (True,)"),
    (entries({"data_offsets": [0, 23]}), AT_W + "two offsets 24 bytes apart, but got [0, 23]"),
    (entries(mask={"data_offsets": [24, 25, 26]}), AT_M + "two offsets 1 bytes apart, but got [24, 25, 26]"),
    (
        entries(mask={"data_offsets": [25, 26]}),
        AT_M + "no gap or overlap before it, a start at 24, but got 25",
    ),
    (entries(mask={"data_offsets": [3, 4]}), AT_M + "no gap or overlap before it, a start at 24, but got 3"),
    (entries({"data_offsets": [-24, 0]}), AT_W + "no gap or overlap before it, a start at 0, but got -24"),
    (entries(data=DATA[:-1]), ": expected 25 bytes of numbers after the header, but got 24"),
    (entries(data=DATA + b"1"), ": expected 25 bytes of numbers after the header, but got 26"),
    (entries(data=DATA[:-1] + b"\2"), AT_M + "booleans stored as 0 and 1, but got the byte 2"),
    (number(math.nan), AT_W + "finite numbers, but got 1 NaN or Inf of 6"),
    (number(-math.inf), AT_W + "finite numbers, but got 1 NaN or Inf of 6"),
]


@pytest.mark.parametrize(("payload", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refusals_name_client_round_and_field(payload, message):
    with pytest.raises(wire.PayloadError) as error:
        wire.decode(payload, LIKE, client="ward-7", round=3, limit=1000 if payload == bytes(1001) else 10**6)
    assert str(error.value) == "payload of client 'ward-7' in round 3" + message


def test_nested_headers_are_refused_whatever_their_depth():
    for depth in [*range(1, 1100, 7), 10**5]:
        nested = "[" * depth + "]" * depth
        for header in (nested, json.dumps({W: 0, M: MASK}).replace("0", nested, 1)):
            with pytest.raises(wire.PayloadError):
                wire.decode(build(header), LIKE)


def test_messages_are_short():
    long = "x" * 10**5
    for header in (
        {long: 1},
        {W: long, M: MASK},
        {"__metadata__": long},
        {W: WEIGHT | {"shape": [1] * 10**5}, M: 1},
    ):
        with pytest.raises(wire.PayloadError) as error:
            wire.decode(build(header), LIKE)
        assert len(str(error.value)) < 400


def test_not_finite_is_accepted_on_request():
    got = wire.decode(number(math.nan), LIKE, finite=False)
    assert got["delta"].value["weight"].isnan().sum() == 1


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOATS_8, torch.complex64])
def test_every_float_is_checked(dtype):
    sent = torch.tensor([1.0, math.nan]).to(dtype)
    with pytest.raises(wire.PayloadError, match=r"^payload, field '': expected finite"):
        wire.decode(wire.encode(sent), sent)


def test_the_receiver_is_told_of_its_own_mistakes():
    with pytest.raises(TypeError, match=r"torch\.float8_e8m0fnu in 'a'"):
        wire.decode(b"", like={"a": torch.empty(1, dtype=torch.float8_e8m0fnu)})


EXECUTED: list[str] = []


class Bomb:
    """Executes when unpickled."""

    def __reduce__(self):
        return EXECUTED.append, ("unpickled",)


def hostile(draw: random.Random, header: dict[str, Any], data: bytes) -> tuple[str, Any]:
    """One hostile payload and its kind, from the header and the data of an honest one."""
    payload = build(header, data)
    names = list(header)
    name = draw.choice(names)
    entry = header[name]
    start, stop = entry["data_offsets"]
    junk = [
        None,
        True,
        -1,
        0,
        1.5,
        2**63,
        10**400,
        "",
        "x",
        "\ud800",
        [],
        [0],
        [[]],
        {},
        {"a": {}},
        "__metadata__",
    ]

    def changed(**values: Any) -> bytes:
        return build(header | {name: entry | values}, data)

    def flipped() -> bytes:
        flips = bytearray(payload)
        for _ in range(draw.choice([1, 1, 1, 2, 8])):
            flips[draw.randrange(len(flips))] ^= 1 << draw.randrange(8)
        return bytes(flips)

    def special() -> bytes:
        place, numbers = 4 * draw.randrange(6), bytearray(data)
        pattern = draw.choice([0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800001])  # NaN, Inf, -Inf, signalling NaN
        numbers[place : place + 4] = pattern.to_bytes(4, "little")
        return build(header, bytes(numbers))

    def nested() -> bytes:
        depth, opening = draw.choice([1, 3, 50, 900, 990, 1000, 1100]), draw.choice(["[", '{"a":'])
        closing = draw.choice(["", "]" * depth, "}" * depth])
        return build(draw.choice(["%s", '{"__metadata__":%s}', '{"a":%s}']) % (opening * depth + closing), data)

    def length() -> int:
        return draw.choice([0, 1, 2**31, 2**63, 2**64 - 1, len(payload)])

    bomb = pickle.dumps(Bomb())
    dtypes = {"F64", "F32", "I32", "U32", "F4", "Q", "os.system"} - {entry["dtype"]}
    not_json = ["", " ", "{", "}", "NaN", "{'a': 1}", '{"a":}', "\ufeff{}", "1" * 5000]
    not_bytes = [None, 1, "x", bytearray(payload), memoryview(payload), [payload], LIKE]
    not_texts = [None, True, 1, "x", [], [1], {"a": 1}, {"a": None}, {"a": {}}]
    twice = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}"
    one_before = [start - 1, stop - 1] if start else [1, stop + 1]
    kinds = {
        "truncated": lambda: payload[: draw.randrange(len(payload))],
        "flipped": flipped,
        "spliced": lambda: payload[: draw.randrange(len(payload))] + payload[draw.randrange(len(payload)) :],
        "noise": lambda: draw.randbytes(draw.randrange(64)),
        "noisy header": lambda: build(draw.randbytes(draw.randrange(64)), data),
        "shape": lambda: changed(shape=[draw.randrange(-1, 4) for _ in range(draw.randrange(4))] + [7]),
        "dtype": lambda: changed(dtype=draw.choice([*sorted(dtypes), *junk])),
        "not finite": special,
        "oversized": lambda: build(header, data + bytes(2000)),
        "extra": lambda: build(header | {draw.choice(["x", "", "\ud800", "__class__"]): entry}, data),
        "missing": lambda: build({other: header[other] for other in names if other != name}, data),
        "renamed": lambda: build({k + draw.choice(["x", " "]): v for k, v in header.items()}, data),
        "header length": lambda: build(header, data, length()),
        "not JSON": lambda: build(draw.choice(not_json), data),
        "nested": nested,
        "twice": lambda: build(twice, data),
        "overlap": lambda: changed(data_offsets=one_before),
        "offsets": lambda: changed(data_offsets=draw.choices([*junk, start, stop], k=draw.randrange(4))),
        "beyond": lambda: changed(data_offsets=[start + 10**6, stop + 10**6]),
        "metadata": lambda: build({"__metadata__": draw.choice(not_texts)} | header, data),
        "junk": lambda: changed(**{draw.choice([*entry, "more"]): draw.choice(junk)}),
        "entry": lambda: build(header | {name: draw.choice(junk)}, data),
        "not bytes": lambda: draw.choice(not_bytes),
        "pickle": lambda: draw.choice([bomb, build(header, bomb), build(bomb)]),
    }
    kind = draw.choice(list(kinds))
    return kind, kinds[kind]()


@pytest.mark.parametrize("count", [6_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_hostile_payloads_are_refused_or_valid(count):
    draw = random.Random(0)
    likes = [LIKE, {"a": torch.ones(2, 3), "b": torch.ones((), dtype=torch.float64), "c": torch.zeros(0, 2)}]
    headers = [
        {W: WEIGHT, M: MASK},
        {
            "a": WEIGHT,
            "b": {"dtype": "F64", "shape": [], "data_offsets": [24, 32]},
            "c": {"dtype": "F32", "shape": [0, 2], "data_offsets": [32, 32]},
        },
    ]
    honest = [DATA, torch.ones(2, 3).numpy().tobytes() + torch.ones(1, dtype=torch.float64).numpy().tobytes()]
    for like, header, data in zip(likes, headers, honest):
        wire.decode(build(header, data), like, limit=1000)
    refused: Counter[str] = Counter()
    valid: Counter[str] = Counter()
    for i in range(count):
        like = likes[i % 2]
        kind, payload = hostile(draw, headers[i % 2], honest[i % 2])
        try:
            got = wire.decode(payload, like, client=i, round=i % 7, limit=1000)
        except wire.PayloadError:
            refused[kind] += 1
            continue
        valid[kind] += 1
        for leaf, expected in zip(tree.leaves(got), tree.leaves(like)):
            assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
            assert leaf.isfinite().all()
    assert not EXECUTED
    assert set(valid) <= {"flipped", "spliced", "offsets", "junk"}, "the others never happen to be right"
    assert len(refused) == 24
    assert min(refused.values()) > count / 200


@pytest.mark.parametrize("stride", [0, 4])
def test_a_single_number_travels_whatever_its_strides(stride: int) -> None:
    one = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).as_strided((1,), (stride,), 2)
    assert wire.decode(wire.encode(one), like=one).tolist() == [3.0]


@pytest.mark.parametrize("sent", trees(), ids=IDS)
@pytest.mark.parametrize("facts", [None, {"round": 3, "ß": "\n"}], ids=["tensors alone", "metadata"])
def test_the_header_is_the_json_of_all_fields(sent: tree.Tree, facts: dict[str, Any] | None) -> None:
    payload = wire.encode(sent, facts)
    if not payload:
        return
    stop = 8 + int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8:stop])
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    assert payload[8:stop] == text + b" " * (-len(text) % 8)
    assert next(iter(header)) == "__metadata__" or not facts


def test_a_header_written_by_others_is_read_in_full() -> None:
    like = {"a": torch.arange(2.0), "b": torch.arange(3)}
    data = like["a"].numpy().tobytes() + like["b"].numpy().tobytes()  # in another order than ours, and with spaces
    fields = {
        "a": {"shape": [2], "dtype": "F32", "data_offsets": [0, 8]},
        "__metadata__": {"fedtorch": '{"rows":1}', "else": "here"},
        "b": {"dtype": "I64", "shape": [3], "data_offsets": [8, 32]},
    }
    header = json.dumps(fields).encode()
    payload = len(header).to_bytes(8, "little") + header + data
    equal(wire.decode(payload, like), like)
    assert wire.metadata(payload) == {"rows": 1}


@pytest.mark.parametrize("about", ['{"fedtorch":"{}","fedtorch":"{}"}', '{"fedtorch":1}', "[]", "NaN", '{"a":'])
def test_metadata_before_the_expected_fields_is_checked(about: str) -> None:
    like = {"a": torch.ones(1)}
    ours = wire.encode(like)
    stop = 8 + int.from_bytes(ours[:8], "little")
    header = b'{"__metadata__":' + about.encode() + b"," + ours[9:stop]
    with pytest.raises(wire.PayloadError, match="expected"):
        wire.decode(len(header).to_bytes(8, "little") + header + ours[stop:], like)


def test_no_memory_is_kept_of_layouts_with_long_names() -> None:
    kept = lambda: headers._fields_of.cache_info().currsize
    before = kept()
    wire.encode({"x" * 2**17: torch.ones(1)})
    assert kept() == before


def with_metadata(payload: bytes) -> bytes:
    """The same payload with metadata in front of its header, as `encode` writes them."""
    stop = 8 + int.from_bytes(payload[:8], "little")
    return build(b'{"__metadata__":{"fedtorch":"{\\"rows\\":1}"},' + payload[9:stop], payload[stop:])


@pytest.mark.parametrize(
    "payload", [payload for payload, _ in REFUSED if isinstance(payload, bytes) and W in str(payload)]
)
def test_a_payload_that_was_opened_is_refused_for_the_same_reason(payload):
    marked = with_metadata(payload)
    for _ in range(2):  # the second time its header is known
        about, opened = wire.open_payload(marked)
        assert about == {"rows": 1}
        assert opened is not None
        with pytest.raises(wire.PayloadError) as first:
            wire.decode(marked, LIKE, client=1)
        with pytest.raises(wire.PayloadError) as second:
            wire.decode(marked, wire.Template(LIKE), client=1, opened=opened)
        assert str(first.value) == str(second.value)


@pytest.mark.parametrize("sent", trees(), ids=IDS)
def test_a_payload_that_was_opened_is_read_by_a_template(sent):
    payload = wire.encode(sent, {"kind": "answer"})
    about, opened = wire.open_payload(payload)
    assert about == {"kind": "answer"} == wire.metadata(payload)
    got = wire.decode(payload, wire.Template(sent), opened=opened)
    assert tree.map(lambda leaf: 0, got) == tree.map(lambda leaf: 0, sent)
    equal(got, sent)


@pytest.mark.parametrize(
    "rest", ["", ",", "}}", "},", ',"a":1', ',"a":1,"a":1}', ',"__metadata__":{}}', ',"a":NaN}', ',"a":' + "[" * 10**5]
)
def test_what_follows_the_metadata_has_to_be_json_every_time(rest):
    honest = build('{"__metadata__":{"fedtorch":"{}"},"a":1}')
    for _ in range(2):
        assert wire.metadata(honest) == {}
        with pytest.raises(wire.PayloadError, match="expected a header in JSON"):
            wire.metadata(build('{"__metadata__":{"fedtorch":"{}"}' + rest))


def test_complex128_travels_as_pairs_of_real_numbers() -> None:
    sent = {
        "matrix": torch.complex(torch.arange(6.0).double(), -torch.arange(6.0).double()).reshape(2, 3),
        "one": torch.tensor(1 - 2j, dtype=torch.complex128),
        "none": torch.zeros(0, 2, dtype=torch.complex128),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
        "single": torch.tensor([3 + 4j]),
    }
    payload = wire.encode(sent)
    assert len(payload) == wire.size(sent)
    read = safetensors.torch.load(payload)
    assert (read["matrix"].dtype, read["matrix"].shape) == (torch.float64, (2, 3, 2))
    for name, value in wire.decode(payload, like=sent).items():
        assert value.dtype == sent[name].dtype
        assert torch.equal(value, sent[name].resolve_conj())
    with pytest.raises(wire.PayloadError, match=r"field 'matrix': expected shape \(2, 2, 2\), but got \(2, 3, 2\)"):
        wire.decode(payload, like={**sent, "matrix": torch.zeros(2, 2, dtype=torch.complex128)})
    with pytest.raises(wire.PayloadError, match="field 'a': expected finite numbers, but got 1 NaN or Inf of 1"):
        wire.decode(
            wire.encode({"a": torch.tensor([1 + math.nan * 1j], dtype=torch.complex128)}), {"a": sent["one"][None]}
        )
