"""Frames that are none: whatever a peer sends, a site refuses it, and a server goes on without that site."""

from __future__ import annotations

import functools
import json
import logging
import random
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import linear_clients, sgd
from support.sites import Carried, offers

import fedtorch as ft
from fedtorch import tree, wire
from fedtorch.sites import Remote, sealed
from fedtorch.sites.rounds import frames as frames, sites as meeting
from fedtorch.sites.rounds.site import Site
from fedtorch.sites.secure.masked import masked as secure_masked
from fedtorch.trust import secure

NETWORK = ft.Network.ring(4)
VALUES = [None, True, -1, 0, 1, 2**70, 0.5, "", "x" * 50, "../../etc", "0" * 32]
VALUES += [[], [[]], {}, {"a": 1}, [1, 1], ["a", "a"]]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deadlines pass while nothing comes, and thousands of refusals are not logged."""
    monkeypatch.setattr(meeting, "time", Clock)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def scaffold() -> ft.Algorithm:
    return ft.scaffold(sgd(0.05, epochs=1, batch_size=4))


def federation(folder: Path | None = None) -> tuple[Loopback, Remote]:
    """Two sites of two clients each."""
    host = Loopback(offers(linear_clients([5, 2, 9, 4]), scaffold, sites=2), folder)
    return host, Remote(host, ["a", "b"], "it", seconds=1.0, quorum=0.5)


def other_metadata(frame: bytes, dice: random.Random) -> bytes:
    """A frame of which one value that its metadata say is another."""
    length = int.from_bytes(frame[:8], "little")
    header = json.loads(frame[8 : 8 + length])
    about = json.loads(header["__metadata__"]["fedtorch"])
    name = dice.choice([*about, "more"])
    if dice.random() < 0.2:
        about.pop(name, None)
    else:
        about[name] = dice.choice(VALUES)
    header["__metadata__"]["fedtorch"] = json.dumps(about)
    coded = json.dumps(header, separators=(",", ":")).encode()
    return len(coded).to_bytes(8, "little") + coded + frame[8 + length :]


def mutated(frame: bytes, dice: random.Random) -> bytes:
    """A frame that was damaged, by chance or on purpose."""
    kind = dice.randrange(6)
    if kind == 0:
        return dice.randbytes(dice.randrange(200))
    if kind == 1:
        return frame[: dice.randrange(len(frame))]
    if kind == 2:
        place = dice.randrange(len(frame))
        return frame[:place] + dice.randbytes(dice.randrange(20)) + frame[place:]
    if kind < 5:
        return other_metadata(frame, dice)
    flipped = bytearray(frame)
    for _ in range(dice.randrange(1, 8)):
        flipped[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
    return bytes(flipped)


def spoken(host: Loopback, sites: Remote) -> dict[str, list[bytes]]:
    """What the server says to site "b" in a run, and what the site answers."""
    heard: dict[str, list[bytes]] = {"down": [], "up": [host.sites["b"].hello()]}
    host.before = lambda name, frame: name != "b" or heard["down"].append(frame) is None
    host.after = lambda name, reply: reply if name != "b" or heard["up"].append(reply) is None else None
    run = ft.Run(scaffold(), sites, seed=1)
    run.step(), run.step(), run.clients.total()
    sites.finish(run)
    host.before, host.after = lambda name, frame: True, lambda name, reply: reply
    return heard


def site_refuses(count: int) -> None:
    dice, (host, sites) = random.Random(0), federation()
    said = spoken(host, sites)["down"]
    site = Site(host.brought["b"])
    begin = said[0]
    refused = 0
    for k in range(count):
        if k % 50 == 0:
            site.answer(begin)
        reply = site.answer(mutated(dice.choice(said), dice))
        refused += reply is not None and frames.read(reply, "b").kind == "refusal"
    site.answer(begin)
    assert refused > count // 4
    again = [site.answer(frame) for frame in said[1:3]]
    assert [frames.read(reply, "b").kind for reply in again if reply] == ["answer", "answer"]


def server_goes_on(count: int) -> None:
    dice, (host, sites) = random.Random(1), federation()
    said, some = spoken(host, sites)["up"], max(20, count // 100)
    run = ft.Run(scaffold(), sites, seed=1)
    turns = 0

    def hostile(name: str, reply: bytes) -> bytes:
        return mutated(dice.choice([reply, reply, *said]), dice) if name == "b" else reply

    host.after = hostile
    while turns < count:
        if "b" not in host.sites:
            host.start("b")
        for _ in range(some):
            host.frames.append(("b", mutated(dice.choice(said), dice)))
        round = run.step()
        assert round.ids.tolist()[:2] == [0, 1]
        assert all(bool(leaf.isfinite().all()) for leaf in run.server.parameters.values())
        turns += 1 + some
    host.after = lambda name, reply: reply
    host.dropped.clear()
    host.start("b")
    run.step()
    assert run.step().ids.tolist() == [0, 1, 2, 3]


def test_a_site_refuses_what_is_no_frame() -> None:
    site_refuses(500)


def test_a_server_goes_on_without_a_site_that_sends_no_frames() -> None:
    server_goes_on(500)


masked = Carried(scaffold, secure_masked(secure.Grid(30, 2.0**20), dropouts=0))
envelopes = Carried(lambda: ft.gtv(sgd(0.05), NETWORK, 0.1), sealed(NETWORK))


def hidden_goes_on(make: Any, count: int, seed: int) -> None:
    """A site of four, or the server towards it, says anything: there is a round or none, and later all is well.

    A request that is changed and still one, which no site can tell from the server's own wish, may have the site forget
    states that it is asked for later. Then, and only then, it refuses, and its clients stay away.
    """
    dice, obeyed, last = random.Random(seed), 0, b""
    host = Loopback(offers(linear_clients([5, 2, 9, 4]), make, sites=4), None, certified().identities)
    settings = {"seconds": 1.0, "quorum": 0.25, "roster": certified().roster, "carry": make.carry}
    sites = Remote(host, list("abcd"), "it", **settings)
    run, done, other, site = ft.Run(make(), sites, seed=1), 0, 0, host.sites["b"]
    for k in range(count):
        changed = 0

        def hostile(name: str, frame: bytes, up: int = k % 2) -> bytes:
            nonlocal changed
            if name == "b" and up and dice.random() < 0.5:
                frame, changed = mutated(frame, dice), changed + 1
            return frame

        def towards(name: str, frame: bytes, up: int = k % 2) -> bool:
            nonlocal changed, obeyed
            if name == "b" and not up and dice.random() < 0.5:
                changed += 1
                reply = host.sites["b"].answer(mutated(frame, dice))
                obeyed += reply is not None and frames.read(reply, "b").kind != "refusal"
                host.frames.extend([("b", reply)] if reply is not None else [])
                return dice.random() < 0.5
            return True

        host.after, host.before = hostile, towards
        try:
            run.step()
            done += 1
        except RuntimeError:
            pass
        other += changed
        if changed:  # it connects anew, with a stream that has lost nothing, and is let into sums again
            sites.plan.lost.failed.clear()
            host.sites["b"] = site
            host.frames.append(("b", site.hello()))
    assert other > count // 2

    def heard(name: str, reply: bytes) -> bytes:
        nonlocal last
        last = reply if name == "b" else last
        return reply

    host.after, host.before = heard, lambda name, frame: True
    with suppress(RuntimeError):  # the run has no round without the site
        for _ in range(3):
            run.step()
    about = frames.read(last, "b")
    if obeyed and about.kind == "refusal":
        assert "does not have version" in about.text("reason")
    else:
        assert run.last.ids.tolist() == [0, 1, 2, 3]
    assert done > count // 4
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(run.server))


@pytest.mark.parametrize("make", [masked, envelopes], ids=["masked", "envelopes"])
@pytest.mark.parametrize("seed", [2])
def test_a_site_that_says_anything_under_masks_and_seals(make: Any, seed: int) -> None:
    hidden_goes_on(make, 12, seed)


@pytest.mark.slow
@pytest.mark.parametrize("make", [masked, envelopes], ids=["masked", "envelopes"])
def test_a_site_that_says_very_much_under_masks_and_seals(make: Any) -> None:
    hidden_goes_on(make, 600, 2)


@pytest.mark.slow
@pytest.mark.parametrize("work", [site_refuses, server_goes_on])
def test_very_many_take_no_memory(work: Any) -> None:
    work(2000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work(100_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # kB: 330 bytes a frame


@pytest.mark.parametrize(
    "schema",
    [
        3,
        {"dtype": "float64"},
        {"dtype": ["float64"], "shape": []},
        {"dtype": "object", "shape": []},
        {"dtype": "float64", "shape": [2**31, 2]},
        {"dtype": "float64", "shape": [-1]},
        {"dtype": "float64", "shape": [1] * 9},
        functools.reduce(lambda inner, _: {"fields": [inner]}, range(12), None),
        {"fields": [None] * 1001},
        {"fields": 3},
    ],
)
def test_structures_of_rows_that_are_none(schema: Any) -> None:
    with pytest.raises(ValueError, match="Expected"):
        frames.no_rows(schema)


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 3), (torch.zeros(2, 3), torch.zeros(2)), {"x": (torch.zeros(2, 1, 4).int(), None)}]
)
def test_structures_of_rows_come_back(rows: Any) -> None:
    like = frames.no_rows(json.loads(json.dumps(frames.described(rows))))
    assert frames.described(like) == frames.described(rows)
    assert wire.size(like) > 0
