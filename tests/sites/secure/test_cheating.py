"""A server that tells every client another story: what it can compute are sums of as many as the session says."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.cheating import Cheated, session, split

from fedtorch.sites.secure.messages import (
    ADVERT,
    COMPLAIN,
    CONFIRM,
    ENVELOPE,
    MASKED,
    NUMBER,
    PHASES,
    REVEAL,
    SHARES,
    Aborted,
    body_of,
    bundle,
    records,
    sign,
    split_words,
    unbundle,
    with_words,
)
from fedtorch.sites.secure.neighbours import Neighbourhoods, neighbourhoods
from fedtorch.sites.secure.parties import Client
from fedtorch.sites.secure.server import Server

SETTINGS = [
    (6, (), {"dropouts": 0.2}), (7, (), {}), (8, (), {}), (10, (), {}), (20, (), {}),
    pytest.param(50, (), {}, marks=pytest.mark.slow), pytest.param(100, (), {}, marks=pytest.mark.slow),
    (5, (5,), {"corrupt": 0.2, "dropouts": 0}), (10, (10,), {}), (20, (19, 20), {}),
]  # fmt: skip


def two_stories(made: Cheated, victim: int, phase: int, part: float = 0.5) -> list[frozenset[int]]:
    """What is learnt where half of all clients are told that the victim has dropped out before a phase."""
    view: Any = lambda k: 0
    for each in PHASES:
        hidden = {(1, victim)} if each == phase else ()
        if each == phase + 1:  # only now is there a difference, and an order to split by
            view = split(made, victim, part)
        made.phase(each, view, hidden)
    return made.learnt()


@pytest.mark.parametrize(("n", "corrupt", "settings"), SETTINGS)
def test_neighbours_that_are_told_two_lists_of_survivors(n: int, corrupt: tuple[int, ...], settings: Any) -> None:
    """The attack of two quorums: with the thresholds for a curious server it gets a client's very words."""
    graphs = {
        "curious": neighbourhoods(n, **{**settings, "corrupt": 0.1, "dropouts": 0.3}, adversary="curious"),
        "active": neighbourhoods(n, **settings),
    }
    alone = {}
    for adversary, graph in graphs.items():
        made = Cheated(session(n, graph, adversary=adversary), corrupt, views=2)
        learnt = two_stories(made, victim=1, phase=MASKED)
        alone[adversary] = frozenset({1}) in learnt
        if adversary == "active":
            assert all(len(each) >= made.session.honest > 1 for each in learnt)
    assert alone == {"curious": True, "active": False}


@pytest.mark.parametrize("phase", [ADVERT, SHARES, COMPLAIN, MASKED, CONFIRM])
@pytest.mark.parametrize(("n", "corrupt"), [(7, (7,)), (10, (3,)), pytest.param(20, (2, 9), marks=pytest.mark.slow)])
def test_two_stories_about_any_phase(n: int, corrupt: tuple[int, ...], phase: int) -> None:
    """Two lists of adverts (and so two graphs), of shares, of whom to mask with, of survivors, of confirmations."""
    for part in (0.4, 0.7) if n < 10 else (0.55,):
        made = Cheated(session(n), corrupt, views=2)
        learnt = two_stories(made, 1, phase, part)
        assert all(len(each) >= made.session.honest for each in learnt)
        assert made.session.honest >= (n + 2) // 4 + 1


def told(made: Cheated, payload: Any) -> Cheated:
    """The protocol with what clients are sent changed on the way."""
    for phase in PHASES:
        made.phase(phase, payload=payload)
    assert all(len(each) >= made.session.honest for each in made.learnt())
    return made


def done(n: int = 7, until: int = 6, **more: Any) -> Cheated:
    """A sum as it should be, up to a phase."""
    made = Cheated(session(n, **more))
    for phase in PHASES[:until]:
        made.phase(phase)
    return made


def why(made: Cheated, k: int) -> str:
    return str(made.ended.get(k, "it goes on"))


@pytest.mark.parametrize("more", [{"round": 1}, {"attempt": 1}, {"run": b"another"}, {"adversary": "curious"}], ids=str)
@pytest.mark.parametrize("phase", [SHARES, COMPLAIN, CONFIRM, REVEAL])
def test_messages_of_another_sum_are_not_taken_for_those_of_this_one(phase: int, more: dict[str, Any]) -> None:
    """Client 2's adverts (old keys), shares, heads and confirmations of another round, attempt, run or agreement."""
    other = done(**more).views[0]

    def replayed(at: int, k: int, data: bytes) -> bytes:
        if at != phase or k != 1:
            return data
        theirs = other.request(phase, k)
        if phase == COMPLAIN:
            return data[: ENVELOPE.size * 2] + theirs[ENVELOPE.size * 2 :]
        mine = unbundle(data)
        return bundle([*mine[:1], *unbundle(theirs)[1:]])

    made = told(Cheated(session(7)), replayed)
    if phase == COMPLAIN:
        assert len(records(body_of(made.said[COMPLAIN][1]), NUMBER)) == 4
        assert "lacks of" in why(made, 1) or "too few" in why(made, 1)
    else:
        assert "has signed in this session" in why(made, 1)
    assert 1 not in made.said[REVEAL]


def test_shares_that_are_swapped_between_clients_are_complained_about() -> None:
    """Client 1 is sent those for client 2, and those of client 3 as if of client 4; it masks with none of them."""
    plain = done(until=COMPLAIN - 1).views[0]

    def swapped(at: int, k: int, data: bytes) -> bytes:
        if at == COMPLAIN and k == 1:
            mine = [data[i : i + ENVELOPE.size] for i in range(0, len(data), ENVELOPE.size)]
            others = plain.request(COMPLAIN, 2)
            shares = {
                one[:8]: one for one in (others[i : i + ENVELOPE.size] for i in range(0, len(others), ENVELOPE.size))
            }
            of_3, of_4 = NUMBER.pack(3), NUMBER.pack(4)
            mine = [shares[of_3] if one[:8] == of_3 else one for one in mine]
            return b"".join(of_4 + mine[1][8:] if one[:8] == of_4 else one for one in mine)
        return data

    made = told(Cheated(session(7)), swapped)
    assert records(body_of(made.said[COMPLAIN][1]), NUMBER) == [(3,), (4,)]
    fresh = done(until=COMPLAIN - 1)
    with pytest.raises(ValueError, match="shares of neighbours of client 1, once each"):
        fresh.honest[1].answer(COMPLAIN, fresh.views[0].request(COMPLAIN, 1)[: ENVELOPE.size] * 2)


def heads_for(made: Cheated, heads: dict[int, bytes]) -> bytes:
    survivors = b"".join(map(NUMBER.pack, sorted(made.session.keys)))
    return bundle([survivors, *heads.values()])


def test_heads_that_are_forged_missing_or_do_not_list_a_client_keep_it_from_confirming() -> None:
    made = done(until=MASKED)
    heads = {k: split_words(made.session, message)[0] for k, message in made.said[MASKED].items() if k != 1}
    alone = with_words(made.session, 2, [3, 4, 5, 6], bytes(16), made.signing[2])[: len(heads[2])]
    for some, said in [
        ({**heads, 2: alone}, "kept them apart"),
        ({k: head for k, head in heads.items() if k != 2}, r"has not seen that of \[2\]"),
        ({**heads, 2: heads[2][:-1] + b"0"}, "has signed in this session"),
        ({**heads, 2: made.said[COMPLAIN][2]}, "phase 4, but got one of phase 3"),
        ({**heads, 2: heads[2] + b"words"}, "Expected at most"),
    ]:
        again = done(until=MASKED)
        with pytest.raises((Aborted, ValueError), match=said):
            again.honest[1].answer(CONFIRM, heads_for(again, some))


def test_whom_a_client_has_not_seen_is_in_no_sum_of_its() -> None:
    """Clients of no roster, of no advert, and itself left out; sums of too few; masks with too few, or strangers."""
    for phase, data, said in [
        (CONFIRM, bundle([b"".join(map(NUMBER.pack, (1, 2, 3, 4, 99)))]), "only clients that have begun"),
        (CONFIRM, bundle([b"".join(map(NUMBER.pack, (2, 3, 4, 5, 6)))]), "client 1 among the survivors"),
        (CONFIRM, bundle([b"".join(map(NUMBER.pack, (1, 2)))]), "smaller than the minimum 3"),
        (MASKED, b"".join(map(NUMBER.pack, (2, 3, 4))), "3 neighbours that have not left .* too few"),
        (MASKED, b"".join(map(NUMBER.pack, (2, 2, 2, 3, 4))), "3 neighbours that have not left .* too few"),
        (MASKED, b"".join(map(NUMBER.pack, (2, 3, 4, 99))), r"lacks those of \[99\]"),
        (REVEAL, b"", "Too few neighbours of client 1 have confirmed"),
    ]:
        made = done(until=phase - 1)
        with pytest.raises((Aborted, ValueError), match=said):
            made.honest[1].answer(phase, data)


def test_confirmations_that_are_forged_too_few_or_of_nobody_open_nothing() -> None:
    made = done(until=CONFIRM)
    right = [message for k, message in made.said[CONFIRM].items() if k != 1]
    twice = sign(made.session, CONFIRM, 2, bytes(32), made.signing[2])  # of other survivors
    sybil = sign(made.session, CONFIRM, 99, body_of(right[0]), Ed25519PrivateKey.generate())
    for messages, said in [
        (right[:3], "it needs 4"),
        ([right[0]] * 6, "it needs 4"),
        ([*right[1:4], twice], r"\[2\] were told of other survivors"),
        ([*right[:3], made.said[CONFIRM][1]], "it needs 4"),  # its own is none of a neighbour
        ([*right[:3], sybil], "one of the session's clients, but got one of client 99"),
        ([*right[:3], right[3][:-1] + b"0"], "has signed in this session"),
        ([*right[:3], made.said[MASKED][5][:-16]], "message of at most|phase"),
    ]:
        again = done(until=CONFIRM)
        with pytest.raises((Aborted, ValueError), match=said):
            again.honest[1].answer(REVEAL, bundle(messages))
    assert len(made.honest[1].answer(REVEAL, bundle([*right[:4], twice]))) > 64  # one that lies changes nothing


def test_clients_that_are_invented_are_nobody_s_neighbours() -> None:
    """Adverts that are signed by a key of no roster, under a new number or another client's."""
    stranger = sign(session(7)[0], ADVERT, 99, bytes(96), Ed25519PrivateKey.generate())
    taken = sign(session(7)[0], ADVERT, 3, bytes(96), Ed25519PrivateKey.generate())
    for message, said in ((stranger, "client 99"), (taken, "client 3 has signed")):
        made = done(until=ADVERT)
        adverts = unbundle(made.views[0].request(SHARES, 1))
        with pytest.raises(ValueError, match=said):
            made.honest[1].answer(SHARES, bundle([*adverts[1:], message]))
        assert not Server(made.session).take(ADVERT, message)


def test_what_is_learnt_where_all_are_neighbours_is_the_sum_of_those_that_were_confirmed(monkeypatch: Any) -> None:
    """A server that lets seven of ten mask among themselves, and names ten: without heads it gets the sum of seven."""
    few = range(1, 8)

    def apart(at: int, k: int, data: bytes) -> bytes:
        if at == MASKED and k in few:
            return b"".join(NUMBER.pack(other) for other in few if other != k)
        return data

    for heads in (False, True):
        made = Cheated(session(10, Neighbourhoods(9, 6, 1)))
        for server in made.views:  # it takes what it has asked for
            monkeypatch.setattr(server, "_wrong", lambda *message: "")
        with monkeypatch.context() as patch:
            if not heads:
                patch.setattr(Client, "_check_mutual", lambda self, heads: None)
            for phase in PHASES[:2]:
                made.phase(phase)
            made.views[0]._sealed = {
                k: {int(to): tuple(rest) for to, *rest in records(body_of(message), ENVELOPE)}
                for k, message in made.said[SHARES].items()
            }
            for phase in PHASES[2:]:
                made.phase(phase, payload=apart)
        assert made.learnt() == ([] if heads else [frozenset(few)])


@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_stories_that_change_at_random_from_phase_to_phase(count: int) -> None:
    """What two stories hide, and who is told which; with the threshold for a curious server a client alone is open."""
    generator, alone = random.Random(0), 0
    for trial in range(count):
        n, bad = generator.choice([(7, 1), (8, 1), (10, 1)])
        adversary: Any = ("active", "curious")[trial % 2]
        graph = neighbourhoods(n, adversary=adversary)
        made = Cheated(session(n, graph, adversary=adversary), generator.sample(range(1, n + 1), bad), views=2)
        told = {k: generator.randrange(2) for k in made.session.keys}
        for phase in PHASES:
            hidden = {(view, k) for view in range(2) for k in made.session.keys if generator.random() < 0.03}
            if generator.random() < 0.05:
                told = {k: generator.randrange(2) for k in told}
            made.phase(phase, told.__getitem__, hidden)
        least = min(map(len, made.learnt()), default=n)
        assert adversary == "curious" or least >= made.session.honest
        alone += least == 1
    assert alone > 0
