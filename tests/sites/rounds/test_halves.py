"""The halves of a round in one process, without streams, and what their drivers make of a `Receive`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import linear_clients, same_bits, sgd
from support.sites import Carried, carry_of, offers

import fedtorch as ft
from fedtorch.protocol.bounded_streams import Streams
from fedtorch.protocol.halves import Half, Receive, Send, Traffic, together
from fedtorch.sites import Hub, Remote, sealed
from fedtorch.sites.rounds import sites as meeting
from fedtorch.sites.secure.masked import masked
from fedtorch.sites.streams import memory
from fedtorch.sites.vertical.remote import over_hub
from fedtorch.trust import secure
from fedtorch.wire import PayloadError

NETWORK = ft.Network.ring(6)
DATA = linear_clients([5, 2, 9, 4, 17, 6])
NOTHING = torch.zeros(1)


def scaffold() -> ft.Algorithm:
    return ft.scaffold(sgd(0.05))


MAKES = {
    "readable": scaffold,
    "masked": Carried(scaffold, masked(secure.Grid(30, 2.0**20), dropouts=0)),
    "envelopes": Carried(lambda: ft.gtv(sgd(0.05), NETWORK, 0.1), sealed(NETWORK)),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def federation(make: Callable[[], ft.Algorithm], quorum: float = 1.0) -> tuple[Loopback, ft.Run]:
    host = Loopback(offers(DATA, make), None, certified().identities)
    settings = {"roster": certified().roster, "carry": carry_of(make), "quorum": quorum, "seconds": 1.0}
    return host, ft.Run(make(), Remote(host, list("abc"), "it", **settings), seed=1)


def greeting(half: Half, begin: Callable[[str], bytes]) -> Half:
    """The server's half behind what a driver over streams does where one begins."""
    yield Receive(tuple("abc"), lambda site, hello: hello)
    for site in "abc":
        yield Send(site, begin(site))
    return (yield from half)


@pytest.mark.parametrize("name", MAKES)
def test_halves_in_one_process_give_the_bits_of_a_run_over_streams(name: str) -> None:
    (_, there), (host, here) = federation(MAKES[name]), federation(MAKES[name])

    def in_one_process(half: Half, run: str, begin: Callable[[str], bytes], ask: Any) -> tuple[Any, Traffic]:
        sites = {site: host.sites[site].half("server") for site in "abc"}
        results, traffic = together({"server": greeting(half, begin), **sites}, dropouts=True)
        return results["server"], traffic

    here.population.plan.sites.drive = in_one_process
    for _ in range(3):
        there.step(), here.step()
    assert same_bits(here.clients.total() or {}, there.clients.total() or {})
    assert same_bits(here.server, there.server)
    assert here.last.ids.tolist() == list(range(6))


def test_a_site_that_is_dropped_says_why() -> None:
    host, run = federation(scaffold, quorum=0.5)
    host.after = lambda name, reply: b"no frame" if name == "b" else reply
    run.step()
    assert "8 bytes" in run.population.troubles["b"] or "header" in run.population.troubles["b"]
    assert run.population.troubles["b"] == host.dropped["b"]
    host.after = lambda name, reply: reply
    host.start("b"), run.step()
    host.kill("b"), run.step()
    assert run.population.troubles["b"] == "it is not connected"


# -- what drivers read of a step ---------------------------------------------------------------------------------------


def test_what_a_reader_refuses_is_missing_in_one_process() -> None:
    def read(sender: str, payload: bytes) -> str:
        if payload != b"good":
            raise PayloadError(f"{sender} sent {len(payload)} bytes")
        return payload.decode()

    def server() -> Half:
        return (yield Receive(("a", "b", "c"), read))

    def client(payload: bytes) -> Half:
        yield Send("server", payload)

    halves = {"server": server(), "a": client(b"good"), "b": client(b"bad"), "c": client(b"good")}
    heard, traffic = (
        together(halves)[0]["server"],
        together({"server": server(), "a": client(b"good")} | {name: client(b"good") for name in "bc"})[1],
    )
    assert (heard.messages, heard.missing) == ({"a": "good", "c": "good"}, {"b": "b sent 3 bytes"})
    assert traffic == Traffic(up=12, down=0)


def test_a_party_is_waited_for_as_long_as_the_step_says() -> None:
    hub = Hub()
    link = memory.link(hub, "clinic")

    def half() -> Half:
        yield Receive(1, NOTHING, seconds=0.05)

    with pytest.raises(ConnectionError, match=r"within 0\.05 s"):
        over_hub(half(), hub, ["clinic"], seconds=60.0)
    link.close()


def test_a_rank_is_waited_for_as_long_as_the_step_says() -> None:
    streams = Streams.__new__(Streams)
    near, far = socket.socketpair()
    streams.seconds, streams.sockets, streams.ahead = 60.0, {1: near}, {1: bytearray()}
    with near, far, pytest.raises(RuntimeError, match=r"rank 1 to answer within 0\.05 s"):
        streams.read(1, 8, 0.05)


def test_sites_are_waited_for_as_long_as_the_step_says() -> None:
    host, run = federation(scaffold)
    sites = run.population.plan.sites
    host.before = lambda name, frame: False

    def half() -> Half:
        yield Send("a", b"", sequence=7)
        return (yield Receive(("a",), lambda site, frame: frame, least=1, seconds=3.0))

    before = Clock.seconds
    heard, _ = sites.drive(half(), "0" * 32, lambda site: b"")
    assert heard.missing == {"a": "it is late"}
    assert 3.0 <= round(Clock.seconds - before, 6) < 3.5
