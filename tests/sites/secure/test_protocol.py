"""The messages of a secure sum, for whoever carries them: bytes in, bytes out, bounded, and nothing wrong is taken."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedtorch.sites.secure.messages import (
    ADVERT,
    COMPLAIN,
    CONFIRM,
    MASKED,
    PHASES,
    SHARES,
    Aborted,
    Session,
    bundle,
    most_down,
    most_up,
    session_of,
    split_words,
    unbundle,
    verified,
)
from fedtorch.sites.secure.neighbours import Neighbourhoods
from fedtorch.sites.secure.parties import Client
from fedtorch.sites.secure.server import Server
from fedtorch.sites.secure.simulation import secure_sum
from fedtorch.trust import privacy, secure

CLIENTS, GRAPH, SIZE = 8, Neighbourhoods(4, 3), 5
WORDS = torch.randint(-100, 100, (CLIENTS, SIZE), generator=torch.Generator().manual_seed(0))


class Parties(NamedTuple):
    """A session and its clients."""

    session: Session
    signing: dict[int, Ed25519PrivateKey]
    clients: dict[int, Client]


class Step(NamedTuple):
    """What was said in a sum that went well."""

    phase: int
    client: int
    payload: bytes
    message: bytes


def parties(**settings) -> Parties:
    signing = {k: Ed25519PrivateKey.from_private_bytes(bytes([k]) * 32) for k in range(1, CLIENTS + 1)}
    public = {k: key.public_key().public_bytes_raw() for k, key in signing.items()}
    session = Session(b"run", 3, 0, public, SIZE, GRAPH, 3)._replace(**settings)
    return Parties(session, signing, {k: client(session, k, signing[k]) for k in signing})


def client(session: Session, k: int, key: Ed25519PrivateKey, **more) -> Client:
    return Client(session, k, key, privacy.from_seed(k), WORDS[k - 1], **more)


def said(made: Parties) -> tuple[Server, list[Step]]:
    """The whole protocol by bytes alone."""
    server, steps = Server(made.session), []
    for phase in PHASES:
        for k, one in made.clients.items():
            payload = server.request(phase, k)
            steps.append(Step(phase, k, payload, one.answer(phase, payload)))
            assert server.take(phase, steps[-1].message)
    return server, steps


def test_bytes_alone_carry_the_protocol_within_the_bounds_of_the_session() -> None:
    made = parties()
    server, steps = said(made)
    assert torch.equal(server.total(), WORDS.sum(0))
    for phase, _, payload, message in steps:
        assert len(payload) <= most_down(made.session, phase)
        assert len(message) <= most_up(made.session, phase)
    assert max(len(s.message) for s in steps if s.phase == MASKED) == most_up(made.session, MASKED)
    again = session_of(made.session.encoded())
    assert again == made.session
    assert again.digest() == made.session.digest()


@pytest.mark.parametrize("wrong", [
    b"", b"short", lambda data: data[:-1], lambda data: data + b"\0", lambda data: data[:8] + bytes(8) + data[16:],
    lambda data: bytes([255]) * 8 + data[8:], lambda data: data[:-40] + data[-80:-40],
], ids=["nothing", "short", "cut", "longer", "other", "endless name", "twice one client"])  # fmt: skip
def test_what_is_no_session_is_refused(wrong) -> None:
    data = parties().session.encoded()
    broken = wrong(data) if callable(wrong) else wrong
    if broken[:8] == data[:8] and len(broken) == len(data) and broken[-40:] == data[-40:]:
        assert session_of(broken).digest() != parties().session.digest()  # another round
        return
    with pytest.raises(ValueError, match="Expected a session"):
        session_of(broken)
    with pytest.raises(ValueError, match="at most 4 clients"):
        session_of(data, most=4)


def mutated(generator: random.Random, message: bytes) -> bytes:
    broken, kind = bytearray(message), generator.randrange(5)
    if kind == 0 and broken:
        broken[generator.randrange(len(broken))] ^= 1 << generator.randrange(8)
    elif kind == 1 and broken:
        del broken[generator.randrange(len(broken)) :]
    elif kind == 2:
        broken += generator.randbytes(generator.randrange(1, 80))
    elif kind == 3 and len(broken) > 20:  # two parts change places
        cut = generator.randrange(10, len(broken) - 1)
        broken = broken[cut:] + broken[:cut]
    else:
        broken = bytearray(generator.randbytes(generator.randrange(1, 200)))
    return bytes(broken)


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_forged_foreign_and_broken_messages_are_refused(count: int) -> None:
    """Mutations of right messages of every phase, to a server in every phase: none is taken, and the sum is right."""
    made = parties()
    _, steps = said(made)
    server, generator = Server(made.session), random.Random(0)
    for phase in PHASES:
        for _ in range(count // 5):
            step = generator.choice(steps)
            broken = mutated(generator, step.message)
            if broken != step.message:
                assert not server.take(generator.choice((phase, step.phase)), broken)
        for step in steps:
            if step.phase == phase:
                assert server.take(phase, step.message)
    assert server.refused >= 0.99 * count
    assert torch.equal(server.total(), WORDS.sum(0))


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_what_a_server_makes_up_ends_in_no_answer(count: int) -> None:
    """Broken bundles to clients in every phase: a ValueError or an abort, but where messages are left out.

    Who has begun and who has stayed is the server's to say: if it says two things, that comes out in phase 5.
    """
    made = parties()
    _, steps = said(made)
    generator = random.Random(1)
    for _ in range(count):
        step = generator.choice([step for step in steps if step.phase != ADVERT])
        broken = mutated(generator, step.payload)
        fresh = client(made.session, step.client, made.signing[step.client])
        for before in steps:
            if before.client == step.client and before.phase < step.phase:
                fresh.answer(before.phase, before.payload)
        try:
            fresh.answer(step.phase, broken)
        except (Aborted, ValueError):
            continue
        if step.phase == CONFIRM:
            assert fresh.survivors <= made.session.keys.keys()
        elif step.phase == COMPLAIN:  # of whose shares are broken it does complain
            assert fresh._held.items() <= made.clients[step.client]._held.items()
        elif step.phase == MASKED:
            assert len(fresh._listed) >= made.session.graph.threshold
        else:  # some are left out, and enough are there, or they come in another order
            assert {*unbundle(broken)} <= {*unbundle(step.payload)}


def test_messages_that_are_out_of_place_are_refused() -> None:
    made = parties()
    _, steps = said(made)
    by_phase = {phase: [step.message for step in steps if step.phase == phase] for phase in PHASES}
    server, advert = Server(made.session), by_phase[ADVERT][0]
    with pytest.raises(ValueError, match="has signed in this session"):
        verified(made.session._replace(attempt=1), ADVERT, advert)
    assert server.take(ADVERT, advert)
    assert not server.take(ADVERT, advert)  # again
    assert not server.take(SHARES, advert)  # in another phase
    assert not server.take(SHARES, by_phase[SHARES][0])  # too few have begun
    assert all(server.take(ADVERT, message) for message in by_phase[ADVERT][1:-1])
    assert server.take(SHARES, by_phase[SHARES][0]) in (True, False)
    late = Server(made.session)
    assert not late.take(SHARES, by_phase[SHARES][0])  # of who has not begun
    full = Server(made.session)
    assert all(full.take(ADVERT, message) for message in by_phase[ADVERT][1:])
    other = client(made.session, 2, made.signing[2])
    other.advertise()
    assert full.take(SHARES, other.answer(SHARES, full.request(SHARES, 2)))
    assert not full.take(ADVERT, advert)  # its neighbours are settled


def test_signed_bodies_of_another_form_are_refused() -> None:
    """A client may sign what it likes: shares for some of its neighbours only, or of clients that are none."""
    made = parties()
    _, steps = said(made)
    server = Server(made.session)
    for phase in PHASES:
        for step in (step for step in steps if step.phase == phase):
            head, words = split_words(made.session, step.message) if phase == MASKED else (step.message, b"")
            body = head[9:-64]
            for wrong in (body[: len(body) // 2], body + body, body[:-1]) if body else (b"\0", bytes(8), bytes(16)):
                forged = secure.messages.sign(made.session, phase, step.client, wrong, made.signing[step.client])
                assert not server.take(phase, forged + words)
            assert server.take(phase, step.message)
    assert torch.equal(server.total(), WORDS.sum(0))


def test_clients_refuse_sums_that_less_an_earlier_one_say_too_much() -> None:
    """Of eight survivors before and seven now the difference is one client's."""
    everybody, now = frozenset(range(1, 9)), frozenset(range(1, 8))
    for earlier, refused in ((everybody, True), (now, False), (frozenset((1, 2, 3, 4)), False)):
        made = parties(apart=3, graph=Neighbourhoods(7, 4))
        made.clients[1] = client(made.session, 1, made.signing[1], earlier=(earlier,))
        server = Server(made.session)
        for phase in (ADVERT, SHARES, COMPLAIN, MASKED):
            for k in everybody if phase < MASKED else now:
                assert server.take(phase, made.clients[k].answer(phase, server.request(phase, k)))
        one, payload = made.clients[1], server.request(CONFIRM, 1)
        if refused:
            with pytest.raises(Aborted, match="combination with earlier sums is of 1 clients"):
                one.answer(CONFIRM, payload)
        else:
            one.answer(CONFIRM, payload)
            assert one.survivors == now


def test_rounds_of_a_run_are_compared() -> None:
    values = torch.ones(6, 2, dtype=torch.float64)
    settings = {"graph": Neighbourhoods(3, 2), "minimum": 3}
    one = secure_sum(values[:4], clients=[0, 1, 2, 3], **settings)
    assert one.total.tolist() == [4.0, 4.0]
    again = secure_sum(values[:4], clients=[0, 1, 2, 3], apart=3, earlier=[[0, 1, 2, 3]], **settings)
    assert again.survivors == [0, 1, 2, 3]
    with pytest.raises(Aborted, match="of 2 clients, fewer than 3"):
        secure_sum(values[:4], clients=[0, 1, 2, 5], apart=3, earlier=[[0, 1, 2, 3]], **settings)


def test_bundles_come_back_whole_or_not_at_all() -> None:
    messages = [b"one", b"", bytes(1000)]
    assert unbundle(bundle(messages)) == messages
    assert unbundle(b"") == []
    for wrong in (b"\0", bundle(messages)[:-1], bundle(messages) + b"\0\0", b"\xff\xff\xff\xff"):
        with pytest.raises(ValueError, match="end within one"):
            unbundle(wrong)
