"""Private set intersection: the rows that a plain intersection gives, and what is refused."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest
import torch

from fedtorch import wire
from fedtorch.protocol.halves import Half, Receive, Send, decode, drive, encode, together
from fedtorch.vfl.rows import alignment
from fedtorch.vfl.rows.alignment import Holder, Points, Positions, intersect
from fedtorch.vfl.rows.daily_limit import DailyLimit
from fedtorch.vfl.rows.parties import Party

LISTS = {
    "registry": ["e", "a", "ü", "d", "b"],
    "clinic": ["b", "x", "a", "e", "d"],
    "laboratory": ["d", "q", "e", "b", "y", "ü"],
}


def common(required: list[str] | None = None) -> list[str]:
    needed = [set(LISTS[name]) for name in (required if required is not None else ["clinic", "laboratory"])]
    return sorted(i for i in LISTS["registry"] if all(i in own for own in needed))


@pytest.mark.parametrize("required", [None, ["clinic"], []])
def test_intersection_is_the_plain_one(required: list[str] | None) -> None:
    found = intersect(LISTS, "registry", required)
    for (name, own), rows in zip(LISTS.items(), found.rows):
        expected = [i if i in own else None for i in common(required)]
        assert [None if row < 0 else own[row] for row in rows.tolist()] == expected, name


def aligned(lists: dict[str, list[str]], required: list[str]) -> dict[str, list[str | None]]:
    """The identifiers in the common order as each party has them, None where it lacks one."""
    leader, *members = lists
    halves = {leader: Holder(lists[leader], leader).leading(members, required)}
    rows, _ = together(halves | {name: Holder(lists[name], name).following(leader) for name in members})
    return {name: [None if row < 0 else lists[name][row] for row in rows[name].tolist()] for name in lists}


def test_common_order_hides_the_leaders_order() -> None:
    """A table that is sorted by the label has another order, and a row that a member lacks is at any place."""
    names = [f"p{i:02}" for i in range(30)]
    by_label = names[1::2] + names[::2]
    lists = {"leader": by_label, "b": names[::-1], "c": names[:15]}
    of_all = aligned(lists, ["b", "c"])
    assert of_all["leader"] == of_all["b"] == of_all["c"] == names[:15]
    orders = [aligned(lists, ["b"]) for _ in range(2)]
    for found in orders:
        assert sorted(filter(None, found["leader"])) == names
        assert found["b"] == found["leader"]
        assert found["c"] == [name if name in lists["c"] else None for name in found["b"]]
        assert found["leader"] not in (names, by_label)  # by chance with probability 2/30!
    assert orders[0]["leader"] != orders[1]["leader"]


def test_bytes_are_those_of_the_messages() -> None:
    points = lambda n: len(wire.encode(Points(torch.zeros(n, 32, dtype=torch.uint8)), {"rows": n}))
    positions = len(wire.encode(Positions(torch.zeros(3, dtype=torch.int64)), {"rows": 3}))
    expected = sum(points(n) + 2 * points(5) + positions for n in (5, 6))
    assert intersect(LISTS, "registry").bytes == expected


def test_only_bytes_pass_between_threads_that_share_nothing_else() -> None:
    """The sides as they run in processes of their own."""
    lines: dict[tuple[str, str], queue.Queue[bytes]] = {}
    lock = threading.Lock()

    def line(sender: str, receiver: str) -> queue.Queue[bytes]:
        with lock:
            return lines.setdefault((sender, receiver), queue.Queue())

    def run(name: str, half: Half) -> torch.Tensor:
        send = lambda step: line(name, step.to).put(encode(step))
        return drive(half, send, lambda step: decode(line(step.sender, name).get(timeout=30), step, step.sender))

    found: dict[str, torch.Tensor] = {}

    def side(name: str) -> None:
        if name == "registry":
            found[name] = run(name, Holder(LISTS[name], name).leading(["clinic", "laboratory"]))
        else:
            found[name] = run(name, Holder(LISTS[name], name).following("registry"))

    threads = [threading.Thread(target=side, args=(name,)) for name in LISTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, rows in zip(LISTS, intersect(LISTS, "registry").rows):
        assert torch.equal(found[name], rows)


def test_blinded_points_do_not_identify_rows() -> None:
    """Two holders' points of the same identifiers differ, and a holder's order is not that of its rows."""
    many = [str(i) for i in range(30)]
    first, second = Holder(many, "a"), Holder(many, "b")
    seen = [{bytes(x.tolist()) for x in holder.own_points().x} for holder in (first, second)]
    assert not seen[0] & seen[1]
    assert first.order != list(range(30))  # by chance with probability 1/30!
    # Both have raised to both secrets: now they agree.
    twice = [{bytes(x.tolist()) for x in b.blind(a.own_points()).x} for a, b in ((first, second), (second, first))]
    assert twice[0] == twice[1]


def test_hashes_are_points_of_the_curve() -> None:
    """y² = x³ − 3x + b over the field, whose constants are those of FIPS 186."""
    p = 2**256 - 2**224 + 2**192 + 2**96 - 1
    b = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
    for text in ("", "a", "ü", "4711"):
        numbers = alignment._hash_to_point(text).public_numbers()
        assert (numbers.y**2 - (numbers.x**3 - 3 * numbers.x + b)) % p == 0


@pytest.mark.parametrize(("lists", "message"), [
    ({"a": ["x", "y", "x"], "b": ["x"]}, "distinct identifiers at 'a', but rows 0 and 2"),
    ({"a": ["x", "y"], "b": ["z"]}, "Expected rows that 'a' and .'b'. share, but got none"),
    ({"a": [], "b": ["z"]}, "but got none"),
    ({"c": ["x"]}, "Expected a leader among"),
])  # fmt: skip
def test_lists_that_cannot_be_aligned(lists: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        intersect(lists, "a")


def test_alignment_refusals() -> None:
    with pytest.raises(TypeError, match="Expected strings as identifiers of 'a', but got int in row 1"):
        Holder(["x", 3], "a")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="Expected required members among"):
        intersect(LISTS, "registry", ["bank"])
    leader, member = Holder(["x", "y"], "leader"), Holder(["x"], "b")
    off = Points(torch.full((2, 32), 255, dtype=torch.uint8))  # larger than the field
    with pytest.raises(ValueError, match=r"Expected x-coordinates of points of P-256"):
        member.blind(off)
    with pytest.raises(ValueError, match="Expected 2 points back from 'b', but got 1"):
        leader.places("b", member.own_points(), member.own_points())
    for wrong in ([1], [-2], [0, 0]):
        with pytest.raises(ValueError, match="Expected distinct positions below 1"):
            member.rows(Positions(torch.tensor(wrong)))
    expected = Receive("b", Points(torch.zeros(0, 32, dtype=torch.uint8)), rows=True)
    bad = wire.encode(Points(torch.zeros(2, 32, dtype=torch.uint8)), {"rows": 3})
    with pytest.raises(wire.PayloadError, match="expected shape"):
        decode(bad, expected, "b")
    for rows in (-1, True, 10_000_001):
        with pytest.raises(wire.PayloadError, match="expected a number of rows up to 10000000"):
            decode(wire.encode(off, {"rows": rows}), expected, "b")
    assert torch.equal(decode(encode(Send("a", off, rows=True)), expected, "b").x, off.x)


def test_claimed_sizes_allocate_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million rows announced by a payload of none: refused before there is any room for them."""
    made: list[torch.Size] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
    expected = Receive("b", Points(empty(0, 32, dtype=torch.uint8)), rows=True)
    with pytest.raises(wire.PayloadError, match="expected shape"):
        decode(wire.encode(Points(empty(0, 32, dtype=torch.uint8)), {"rows": 10_000_000}), expected, "b")
    assert all(leaf.is_meta for leaf in made if leaf.numel() > 1000)


def test_repeated_and_excess_points_are_refused() -> None:
    leader, member = Holder(["x", "y"], "leader"), Holder(["x", "y", "z"], "b", most=5)
    theirs, sent = member.own_points(), leader.own_points()
    returned = member.blind(sent)
    with pytest.raises(ValueError, match="Expected distinct points of 'b', but got 1 twice"):
        leader.places("b", theirs, Points(returned.x[[0, 0]]))
    with pytest.raises(ValueError, match="Expected distinct points of 'b', but got 1 twice"):
        leader.places("b", Points(theirs.x[[0, 1, 0]]), returned)
    member.blind(sent)
    with pytest.raises(ValueError, match="at most 1 more points at 'b', but got 2; raise most="):
        member.blind(sent)


def test_daily_limit_counts_across_alignments(tmp_path: Path) -> None:
    """A list of guesses costs what it is long, whoever asks, and however often the member begins anew."""
    now = [1e9]
    allowed = lambda: DailyLimit(tmp_path / "guesses.json", 4, lambda: now[0])
    member = lambda: Holder(["x", "y", "z"], "b", limit=allowed())
    points = Holder(["x", "q", "r"], "leader").own_points()
    member().blind(points)
    with pytest.raises(ValueError, match=r"at most 1 identifiers to be tested at 'b' now, .* but got 3; wait 12"):
        member().blind(points)
    now[0] -= 3 * 86_400
    with pytest.raises(ValueError, match="at most 1 identifiers"):
        member().blind(points)
    now[0] += 3 * 86_400 + 43_201
    member().blind(points)
    with pytest.raises(ValueError, match="but got 5; split the list, or agree on more"):
        allowed().take(5, "b")
    (tmp_path / "guesses.json").write_text("[]")
    with pytest.raises(ValueError, match="Expected a count of identifiers in"):
        member().blind(points)


def test_lists_that_are_too_long_are_refused_unread() -> None:
    half = Holder(["x"], "b", most=2).following("leader")
    next(half)
    asked = half.send(None)
    assert isinstance(asked, Receive)
    assert asked.most == 2
    with pytest.raises(wire.PayloadError, match="expected a number of rows up to 2, but got 3"):
        decode(encode(Send("b", Holder(["x", "y", "z"], "leader").own_points(), rows=True)), asked, "leader")


def test_digest_is_equal_for_the_same_rows() -> None:
    """Whatever their own orders; not where the leader tells one of them others, nor where a party lacks a row."""
    lists = {"leader": list("hgfedcba"), "b": list("abcdefx"), "c": list("yhgfedcb")}
    holders = {name: Holder(rows, name) for name, rows in lists.items()}
    halves = {"leader": holders["leader"].leading(["b", "c"])}
    halves |= {name: holders[name].following("leader") for name in ("b", "c")}
    rows = together(halves)[0]
    assert len({holders[name].digest(rows[name]) for name in lists}) == 1
    assert holders["b"].digest(rows["b"].flip(0)) != holders["c"].digest(rows["c"])
    with pytest.raises(ValueError, match="rows that 'b' has, but it lacks 1; require all members"):
        holders["b"].digest(torch.tensor([0, -1]))
    assert Holder(["ab", "c"], "b").digest(torch.arange(2)) != Holder(["a", "bc"], "b").digest(torch.arange(2))


def test_identifiers_are_compared_in_a_normal_form() -> None:
    composed, apart = "Zo\u00eb", "Zoe\u0308"
    found = intersect({"clinic": ["b", composed], "laboratory": [apart, "c"]}, leader="clinic").rows
    assert [rows.tolist() for rows in found] == [[1], [0]]
    with pytest.raises(ValueError, match="distinct identifiers at 'a', but rows 0 and 1"):
        Holder([composed, apart], "a")
    party = Party("a", [composed, apart], torch.eye(2))
    assert party.distinct().identifiers == [composed]
    with pytest.raises(ValueError, match="Expected Unicode text as identifiers of 'a', but got half a surrogate pair"):
        Holder(["x\udcff"], "a")
