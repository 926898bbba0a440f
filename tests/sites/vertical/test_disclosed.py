"""Every tensor of every frame of an alignment and of vertical training stands in what is overheard of the halves."""

from __future__ import annotations

import functools
import json
import pkgutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, repeat
from typing import Any, NamedTuple

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support import splits
from support.scripts import my_half
from support.verticals import APART, MODELS, ROWS, nodes, noises, some_model, some_parameters
from torch import Tensor

from fedtorch import vfl
from fedtorch.learns import UNDECLARED, Field, Learns, declared, tells
from fedtorch.protocol import rollback
from fedtorch.protocol.halves import Half, Receive, Send, together
from fedtorch.protocol.journal import Journal
from fedtorch.protocol.overheard import overheard
from fedtorch.sites import Hub, secure
from fedtorch.sites.streams import memory
from fedtorch.sites.streams.hub import Link
from fedtorch.sites.vertical.federated_party import _Message
from fedtorch.sites.vertical.remote import over_hub, over_link
from fedtorch.trust import privacy
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.nodes.iteration import party_half, server_half
from fedtorch.vfl.nodes.node import Iteration
from fedtorch.vfl.rows.alignment import Holder

SERVER, PARTY = "the server", "a party"
Conversation = dict[Any, Half]  # the server's half first
Leaving = set[tuple[str, str, tuple[int, ...]]]  # whose, field, shape
SIGNING = {k: Ed25519PrivateKey.from_private_bytes(bytes([k]) * 32) for k in (1, 2, 3)}
KEYS = {k: key.public_key().public_bytes_raw() for k, key in SIGNING.items()}
GRID = secure.Grid(40, 2.0**10)


def alignment() -> Conversation:
    lists = {"registry": list("abcde"), "clinic": list("xbade"), "laboratory": list("dqeby")}
    members = ["clinic", "laboratory"]
    return {
        "registry": Holder(lists["registry"], "registry").leading(members),
        **{name: Holder(lists[name], name).following("registry") for name in members},
    }


def split(name: str, defence: Callable[[Any, Half], Half] = lambda server, half: half) -> Conversation:
    server, parties = splits.CASES[name]().nodes(splits.data(), splits.SGD)
    steps = [Iteration(step=step) for step in range(2)]
    halves = {party.index: party_half(party, steps, accept_disclosure=True) for party in parties}
    return {0: defence(server, server_half(server, steps)), **halves}


def variational(name: str, guide: str, shared: bool) -> Conversation:
    model, data = some_model(name, "bernoulli")
    family = APART[guide]()
    server, parties = nodes(model, family, some_parameters(model, family, data), data, shared)
    steps = [Iteration(noise, 0.05) for noise in noises(model, family, ROWS, 2)]
    return {0: server_half(server, steps), **{p.index: party_half(p, steps, accept_disclosure=True) for p in parties}}


def masked(guide: str) -> Conversation:
    made = variational("augmented", guide, False)
    hidden = {
        k: secure.masked_party(made[k], k, KEYS, SIGNING[k], GRID, privacy.from_seed(k), run=b"run") for k in SIGNING
    }
    return {0: secure.masked_server(made[0], KEYS, GRID, run=b"run"), **hidden}


def clocked() -> Conversation:
    server, parties = splits.CASES["plain"]().nodes(splits.data(), splits.SGD)
    ticks, endless = [Iteration(step=step) for step in range(2)], lambda: (Iteration(step=step) for step in count())
    halves = {party.index: party_half(party, endless(), clocked=True) for party in parties}
    return {0: server_half(server, ticks, tick=20.0), **halves}


def private_labels() -> Conversation:
    bottoms = [vfl.mlp(width, [4], 1).double() for width in splits.WIDTHS]
    network = vfl.SplitNetwork(bottoms, likelihoods.bernoulli()).double()
    data = splits.data(2)._replace(response=splits.data(2).response[0], weight=None)
    data = data._replace(features=tuple(x if x.ndim == 2 else x[0] for x in data.features))
    server, parties = network.nodes(data, splits.SGD)
    steps = [Iteration(step=step) for step in range(2)]
    private = privacy.noised_gradients(clip=1.0, noise=4.0, delta=1e-3, entropy=privacy.from_seed(0))
    return {
        0: private(server, server_half(server, steps)),
        **{party.index: party_half(party, steps) for party in parties},
    }


CONVERSATIONS: dict[str, Callable[[], Conversation]] = {
    "alignment": alignment,
    "by the clock": clocked,
    "private labels": private_labels,
    **{f"masks, {guide}": partial(masked, guide) for guide in ("sums", "amortised", "noiseless")},
    **{f"split network, {name}": partial(split, name) for name in splits.CASES},
    **{
        f"{name}, {guide}{', shared' if shared else ''}": partial(variational, name, guide, shared)
        for name in MODELS
        for guide in APART
        for shared in (False, True)
        if shared or (guide != "amortised, y seen" and not (name == "power" and guide in ("mean field", "amortised")))
    },
}


class Listening(NamedTuple):
    """A link of which frames are taken down."""

    link: Link
    said: Leaving

    def send(self, frame: bytes) -> None:
        self.said.update((PARTY, *leaf) for leaf in tensors(frame))
        self.link.send(frame)

    def receive(self, seconds: float) -> bytes:
        frame = self.link.receive(seconds)
        self.said.update((SERVER, *leaf) for leaf in tensors(frame))
        return frame

    def close(self) -> None:
        self.link.close()


def tensors(frame: bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in a frame; the last word of a half is none."""
    header = json.loads(frame[8 : 8 + struct.unpack("<Q", frame[:8])[0]]) if frame else {}
    yield from ((name, tuple(entry["shape"])) for name, entry in header.items() if not name.startswith("__"))


def over_streams(made: Conversation) -> Leaving:
    """What has left in frames; the server knows parties by number or name."""
    hub, said = Hub(), set[tuple[str, str, tuple[int, ...]]]()
    (_, server), *others = made.items()
    names = [str(name) for name, _ in others]
    with ThreadPoolExecutor(len(others)) as pool:
        links: list[Any] = [Listening(memory.link(hub, name), said) for name in names]
        futures = [pool.submit(over_link, half, link, seconds=30) for (_, half), link in zip(others, links)]
        over_hub(server, hub, names, seconds=30, timeout=30)
        for future in futures:
            future.result(30)
    return said


@functools.cache
def disclosed(name: str) -> list[Field]:
    fields: list[Field] = []
    made = CONVERSATIONS[name]()
    together(overheard(made, dict(zip(made, [SERVER, *repeat(PARTY, len(made) - 1)])), fields))
    return fields


def uncovered(said: Leaving, fields: list[Field]) -> set[tuple[str, str]]:
    """What no field stands for that has a declaration, the same sender and the same shape."""
    known = {
        (SERVER if field.reader == PARTY else PARTY, field.field, field.shape)
        for field in fields
        if field.learns != UNDECLARED
    }
    return {(sender, field) for sender, field, shape in said if (sender, field, shape) not in known}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_all_that_leaves_in_a_conversation_is_disclosed(name: str) -> None:
    said = over_streams(CONVERSATIONS[name]())
    assert {sender for sender, _, _ in said} == {SERVER, PARTY}
    assert uncovered(said, disclosed(name)) == set()


def test_a_run_that_can_go_on_tells_its_points_besides() -> None:
    """The journal's own messages, beside those of an alignment and of training in one stream."""
    said, hub = set[tuple[str, str, tuple[int, ...]]](), Hub()
    half = lambda name: lambda journal: my_half.half(journal, name)
    dial = lambda name: lambda: Listening(memory.link(hub, name), said)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(over_link, half(name), dial(name), seconds=30) for name in my_half.PARTIES]  # type: ignore[arg-type]
        over_hub(my_half.leader, hub, my_half.PARTIES, seconds=30, timeout=30)
        for future in futures:
            future.result(30)
    fields: list[Field] = []
    journals = {name: Journal() for name in ("leader", *my_half.PARTIES)}
    journals["leader"].enter("0" * 32)

    def leader() -> Half:
        yield from rollback.agree_with_parties(journals["leader"], my_half.PARTIES)
        yield from rollback.end_with_parties(journals["leader"], my_half.PARTIES)

    def party(name: str) -> Half:
        yield from rollback.enter_run(journals[name], "leader")
        yield from rollback.agree_with_server(journals[name], "leader")
        yield Send("leader", rollback.Done(torch.tensor(0)))
        yield Receive("leader", rollback.Done(torch.tensor(0)))

    halves = {"leader": leader(), **{name: party(name) for name in my_half.PARTIES}}
    together(overheard(halves, {"leader": SERVER, **dict.fromkeys(my_half.PARTIES, PARTY)}, fields))
    rest = uncovered(said, fields)
    assert {"run", "protocol", "points", "point"} & {field for _, field in rest} == set()
    assert rest == {(PARTY, "x"), (SERVER, "x"), (SERVER, "rows"), (PARTY, "value"), (SERVER, "gradient")}


def test_what_nobody_has_declared_is_found() -> None:
    """The check itself: a message of no declared type, a field more, and one of another shape or sender."""
    fields = disclosed("split network, plain")
    said = over_streams(CONVERSATIONS["split network, plain"]())
    assert uncovered(said, [field for field in fields if field.field != "value"]) == {(PARTY, "value")}
    assert uncovered(said, [field._replace(learns=UNDECLARED) for field in fields]) == {
        (PARTY, "value"),
        (SERVER, "gradient"),
    }
    (value,) = [leaf for leaf in said if leaf[1] == "value"]
    assert uncovered({(PARTY, "more", value[2])}, fields) == {(PARTY, "more")}
    assert uncovered({(PARTY, "value", (*value[2], 1))}, fields) == {(PARTY, "value")}
    assert uncovered({(SERVER, "value", value[2])}, fields) == {(SERVER, "value")}

    class Bare(NamedTuple):
        rows: Tensor

    def says(message: Any) -> Half:
        yield Send(0, message)

    def hears(like: Any) -> Half:
        yield Receive(1, like)

    for message in (torch.ones(2), Bare(torch.ones(2)), b"words"):
        found: list[Field] = []
        together(overheard({0: hears(message), 1: says(message)}, {0: SERVER, 1: PARTY}, found))
        assert [field.learns for field in found] == [UNDECLARED]
    assert declared(tells(Learns("one row"))(Bare), UNDECLARED).worst == "one row"


def test_of_whom_and_how_exact() -> None:
    """Masks tell the sum of all, and noise is said where it is, and where there is none it is not."""
    masks = {field.message: (field.of, field.exactness) for field in disclosed("masks, sums")}
    assert masks["Words"] == ("the sum of all parties, under masks", "rounded to a grid")
    assert masks["Gradient"] == (SERVER, "exact")
    assert {field.message for field in disclosed("masks, sums")} == {"Keys", "Words", "Gradient"}
    exactness = {field.message: field.exactness for field in disclosed("private labels")}
    assert exactness == {"Summand": "exact", "NoisedGradient": "noised"}
    assert {field.exactness for field in disclosed("split network, amortised")} == {"exact"}  # ρ is no protection


def test_attacks_that_are_named_are_there() -> None:
    every = {field.learns.attack for name in CONVERSATIONS for field in disclosed(name)} | {
        declared(_Message, UNDECLARED).attack
    }
    assert {"attacks.guessed_labels", "attacks.split.split_inversion"} <= every
    for attack in every - {""}:
        assert callable(pkgutil.resolve_name(f"fedtorch.trust.{attack}"))


def test_sites_of_a_party_say_what_they_tell_it() -> None:
    assert declared(_Message, UNDECLARED) != UNDECLARED
