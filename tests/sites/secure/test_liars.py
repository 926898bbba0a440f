"""Clients that break a secure sum: they are left out before anybody masks, or named; others' sum still comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cheating import Cheated, session

from fedtorch.sites.secure._disputes import settled
from fedtorch.sites.secure.messages import (
    ADVERT,
    COMPLAIN,
    CONFIRM,
    ENVELOPE,
    KEYS,
    MASKED,
    NUMBER,
    PHASES,
    REVEAL,
    SHARE,
    SHARES,
    Aborted,
    body_of,
    bundle,
    sign,
    unbundle,
)
from fedtorch.sites.secure.neighbours import Neighbourhoods, neighbourhoods
from fedtorch.sites.secure.parties import Client
from fedtorch.sites.secure.server import Server
from fedtorch.trust import privacy

Lie = Callable[[int, bytes], bytes]  # (phase, an honest body) -> the one that is signed
LOW_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    b"\xec" + b"\xff" * 30 + b"\x7f",
]


def lying(made: Cheated, k: int, lie: Lie) -> None:
    """Lets a client sign what it likes."""
    one, honest = made.honest[k], made.honest[k].answer

    def answer(phase: int, payload: bytes) -> bytes:
        message = honest(phase, payload)
        if phase == MASKED:
            return message
        return sign(made.session, phase, k, lie(phase, body_of(message)), made.signing[k])

    one.answer = answer  # type: ignore[method-assign]


def summed(made: Cheated, gone: dict[int, int] | None = None) -> list[int]:
    """The survivors of a sum which comes out and is right; clients may be gone from a phase on."""
    (server,) = made.views
    for phase in PHASES:
        for k in list(made.honest):
            if phase >= (gone or {}).get(k, phase + 1):
                del made.honest[k]
        made.phase(phase)
    assert torch.equal(server.total(), torch.stack([made.words(k) for k in server.survivors]).sum(0))
    return server.survivors


def at(wanted: int, lie: Callable[[bytes], bytes]) -> Lie:
    return lambda phase, body: lie(body) if phase == wanted else body


def broken_for(*whom: int) -> Lie:
    """Seals for some neighbours what they cannot open."""

    def lie(body: bytes) -> bytes:
        records = [list(record) for record in ENVELOPE.iter_unpack(body)]
        for record in records:
            record[1] = bytes(len(record[1])) if record[0] in whom else record[1]
        return b"".join(ENVELOPE.pack(*record) for record in records)

    return at(SHARES, lie)


@pytest.mark.parametrize("n", [4, 7, 10, 20])
def test_as_many_as_are_allowed_for_drop_out_anywhere(n: int) -> None:
    """Three tenths of all, before any phase, with the default thresholds."""
    for first in PHASES if n < 20 else (MASKED,):
        made = Cheated(session(n))
        gone = {k: min(first + k % 2, REVEAL) for k in range(1, round(0.3 * n) + 1)}
        assert summed(made, gone) == [k for k in range(1, n + 1) if gone.get(k, 9) > MASKED]


@pytest.mark.parametrize("low", LOW_ORDER, ids=["zero", "one", "of order two"])
@pytest.mark.parametrize("place", [0, 1])
def test_keys_of_low_order_are_refused_and_their_sender_named(low: bytes, place: int) -> None:
    made = Cheated(session(7))

    def lie(body: bytes) -> bytes:
        keys = list(KEYS.unpack(body))
        keys[place] = low
        return KEYS.pack(*keys)

    lying(made, 3, at(ADVERT, lie))
    assert summed(made) == [1, 2, 4, 5, 6, 7]
    assert made.views[0].guilty == {3: "keys of low order"}


def test_a_client_that_is_told_of_keys_of_low_order_does_without_their_sender() -> None:
    """By a server that passes them on: nothing is sealed for it, and it is in no sum."""
    made, plain = Cheated(session(7)), Cheated(session(7))
    plain.phase(ADVERT)
    bad = sign(made.session, ADVERT, 3, KEYS.pack(bytes(32), bytes(32), bytes(32)), made.signing[3])

    def told(phase: int, k: int, data: bytes) -> bytes:
        if phase == SHARES:
            return bundle([bad if each == plain.said[ADVERT][3] else each for each in unbundle(data)])
        return data

    for phase in PHASES:
        made.phase(phase, payload=told)
    shares = body_of(made.said[SHARES][1])
    assert [record[0] for record in ENVELOPE.iter_unpack(shares)] == [2, 4, 5, 6, 7]
    assert made.learnt() == []
    assert not made.said[CONFIRM]


def test_a_false_complaint_costs_one_honest_client_and_its_sender() -> None:
    made = Cheated(session(7))
    lying(made, 2, at(COMPLAIN, lambda body: NUMBER.pack(5)))
    assert summed(made) == [1, 3, 4, 6, 7]
    assert made.views[0].guilty == {}  # nobody else can tell which of the two has lied
    assert "too few" in str(made.ended[2])


def test_who_complains_about_more_than_can_lie_is_left_out_alone() -> None:
    made = Cheated(session(7))
    lying(made, 2, at(COMPLAIN, lambda body: NUMBER.pack(5) + NUMBER.pack(6)))
    assert summed(made) == [1, 3, 4, 5, 6, 7]
    assert list(made.views[0].guilty) == [2]


def test_who_deals_wrong_shares_is_left_out_before_anybody_masks() -> None:
    for whom, stay, named in (((5,), [1, 3, 4, 6, 7], []), ((4, 5, 6), [1, 3, 4, 5, 6, 7], [2])):
        made = Cheated(session(7))
        lying(made, 2, broken_for(*whom))
        assert summed(made) == stay
        assert list(made.views[0].guilty) == named


def test_a_complaint_about_who_has_sent_nothing_is_refused() -> None:
    made = Cheated(session(7))
    lying(made, 2, at(COMPLAIN, lambda body: NUMBER.pack(99)))
    assert summed(made) == [1, 3, 4, 5, 6, 7]
    assert list(made.views[0].guilty) == [2]


def test_shares_that_a_client_is_not_given_are_ignored_and_it_is_named() -> None:
    """Somebody has dropped out, so that both kinds of share are revealed; the liar's are all wrong."""

    def lie(body: bytes) -> bytes:
        return b"".join(SHARE.pack(owner, own, bytes(len(share))) for owner, own, share in SHARE.iter_unpack(body))

    made = Cheated(session(7))
    lying(made, 2, at(REVEAL, lie))
    assert summed(made, {7: MASKED}) == [1, 2, 3, 4, 5, 6]
    assert made.views[0].guilty == {2: "another share than it was given"}


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (at(CONFIRM, lambda body: bytes(32)), "another set of survivors than it was told"),
        (at(REVEAL, lambda body: body[SHARE.size :]), "other shares than those that are due"),
        (at(REVEAL, lambda body: b""), "other shares than those that are due"),
    ],
    ids=["confirms other survivors", "withholds one", "withholds all"],
)
def test_one_that_withholds_or_lies_late_is_as_one_that_dropped_out(lie: Lie, said: str) -> None:
    made = Cheated(session(7))
    lying(made, 2, lie)
    assert summed(made) == list(range(1, 8))
    assert made.views[0].guilty == {2: said}


def test_where_too_few_shares_are_right_the_sum_ends_with_the_names_of_who_withheld() -> None:
    made = Cheated(session(7))
    for k in (2, 3, 6):
        lying(made, k, at(REVEAL, lambda body: body[SHARE.size :]))
    with pytest.raises(Aborted, match="client 2 has sent other shares than those that are due") as error:
        summed(made)
    assert error.value.members == (2, 3, 6)


def test_who_commits_to_shares_of_no_polynomial_is_named(monkeypatch: Any) -> None:
    """All neighbours can open them, and hold what it has committed to, so that it comes out at the end only."""
    split = Client._split

    def mixed(self: Client) -> dict[int, tuple[bytes, bytes]]:
        shares = split(self)
        if self.number != 2:
            return shares
        return dict(zip(shares, [*list(shares.values())[1:], next(iter(shares.values()))]))

    monkeypatch.setattr(Client, "_split", mixed)
    with pytest.raises(Aborted, match="client 2 has sent shares that do not give its committed secret") as error:
        summed(Cheated(session(7)))
    assert error.value.members == (2,)
    with pytest.raises(Aborted, match="client 2 has sent shares") as error:
        summed(Cheated(session(7)), {2: MASKED})
    assert error.value.members == (2,)


def test_with_every_liar_goes_one_honest_client_at_most() -> None:
    """Any disputes between liars and others, in which nobody honest is with more than all liars."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        liars = {1, 2, 3}
        pairs = {
            (liar, other)
            for liar in liars
            for other in range(1, 12)
            if other != liar and float(torch.rand((), generator=generator)) < 0.3
        }
        known, out = settled(pairs, colluding=3)
        assert known <= liars
        assert len(out - liars) <= len(out & liars)
        assert all(not out.isdisjoint(pair) for pair in pairs)


def test_sessions_whose_thresholds_let_the_server_cheat_are_refused() -> None:
    for graph, least in ((Neighbourhoods(6, 3), 4), (Neighbourhoods(6, 4, 2), 5), (Neighbourhoods(6, 7), 4)):
        agreed, signing = session(7, graph)
        with pytest.raises(ValueError, match=f"threshold from {least} to 6 for 6 neighbours"):
            Server(agreed)
        with pytest.raises(ValueError, match=f"threshold from {least} to 6 for 6 neighbours"):
            Client(agreed, 1, signing[1], privacy.from_seed(1))
    Server(session(7, Neighbourhoods(6, 3), adversary="curious")[0])
    with pytest.raises(ValueError, match="threshold from 9 to 8"):  # of ten honest at least, on a circle
        Server(session(20, Neighbourhoods(8, 5), minimum=10)[0])
    with pytest.raises(ValueError, match="adversary='active' or 'curious'"):
        neighbourhoods(10, adversary="none")  # type: ignore[arg-type]
