"""Halves over the transport of sites give the numbers and the bytes of one process; who is lost is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import splits
from support.scripts import my_half
from support.verticals import GUIDES, nodes, noises, some_model, some_parameters

from fedtorch import wire
from fedtorch.protocol.halves import Half, Receive, Send, Traffic, together
from fedtorch.protocol.journal import Journal
from fedtorch.sites import Hub, Roster, serve
from fedtorch.sites.identity import identity
from fedtorch.sites.streams import memory
from fedtorch.sites.streams.hub import Limits
from fedtorch.sites.vertical.remote import over_hub, over_link, read_half
from fedtorch.vfl.nodes.iteration import party_half, server_half
from fedtorch.vfl.nodes.node import Iteration

TESTS = Path(__file__).parents[2]


def remotely(server: Half, parties: Mapping[str, Half], hub: Hub | None = None) -> tuple[Any, Traffic, dict[str, Any]]:
    """(the server's result, the bytes, the parties' results), the parties in threads."""
    hub = hub or Hub()
    with ThreadPoolExecutor(len(parties)) as pool:
        futures = {n: pool.submit(over_link, half, memory.link(hub, n), seconds=20) for n, half in parties.items()}
        result, traffic = over_hub(server, hub, list(parties), seconds=20, timeout=20)
        found = {name: future.result(20) for name, future in futures.items()}
    assert sum(moved.up for _, moved in found.values()) == traffic.up
    assert sum(moved.down for _, moved in found.values()) == traffic.down
    return result, traffic, {name: value for name, (value, _) in found.items()}


def failing(server: Half, parties: Mapping[str, Half], **waits: float) -> tuple[Exception, dict[str, Future[Any]]]:
    """(why the server's half ended, the parties' futures, which are done)."""
    hub = Hub(Limits(seconds=5.0))
    with ThreadPoolExecutor(len(parties)) as pool:
        futures = {n: pool.submit(over_link, half, memory.link(hub, n), seconds=20) for n, half in parties.items()}
        with pytest.raises((ConnectionError, wire.PayloadError, ZeroDivisionError)) as caught:
            over_hub(server, hub, list(parties), **{"seconds": 20.0, "timeout": 20.0, **waits})
    return caught.value, futures


def same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Whether all parameters have the same bits: nodes do the same operations on the same shapes."""
    return all(torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(("name", "guide", "shared"), [
    ("augmented", "amortised", False), ("augmented", "sums", True), ("power", "sums", False),
    ("augmented", "sums", False), ("augmented", "noiseless", False),
])  # fmt: skip
def test_variational_inference(name: str, guide: str, shared: bool) -> None:
    model, data = some_model(name, "negative binomial")
    family = GUIDES[guide]()
    q = some_parameters(model, family, data)
    given = zip(noises(model, family, 12), [None, [True, False, True], [False, True, True]])
    iterations = [Iteration(noise, 0.05, None, active) for noise, active in given]
    sides = [nodes(model, family, q, data, shared) for _ in range(2)]
    (server, parties), (there, others) = sides
    traffic = together({0: server_half(server, iterations)} | {p.index: party_half(p, iterations) for p in parties})[1]
    moved = remotely(
        server_half(there, iterations),
        {f"party {p.index}": party_half(p, iterations, accept_disclosure=True) for p in others},
    )[1]
    assert moved == traffic
    assert all(same(one.part, two.part) for one, two in zip((server, *parties), (there, *others)))


@pytest.mark.parametrize("name", ["plain", "concatenated", "sums", "amortised"])
def test_split_networks(name: str) -> None:
    models, iterations = [splits.CASES[name]() for _ in range(2)], [Iteration(step=step) for step in range(3)]
    (server, parties), (there, others) = [model.nodes(splits.data(), splits.SGD) for model in models]
    traffic = together({0: server_half(server, iterations)} | {p.index: party_half(p, iterations) for p in parties})[1]
    moved = remotely(
        server_half(there, iterations),
        {f"party {p.index}": party_half(p, iterations, accept_disclosure=True) for p in others},
    )[1]
    assert moved == traffic
    assert same(models[0], models[1])


def everywhere() -> dict[Any, Any]:
    """What all halves of `my_half` find in one process, under the names of their nodes."""
    names = {"leader": "leader", 0: "leader", **dict(enumerate(my_half.PARTIES, start=1))}

    def renamed(half: Half) -> Half:
        message = None
        while True:
            try:
                step = half.send(message)
            except StopIteration as done:
                return done.value
            key = "to" if isinstance(step, Send) else "sender"
            message = yield step._replace(**{key: names.get(getattr(step, key), getattr(step, key))})

    halves = {"leader": my_half.leader(Journal()), **{name: my_half.half(Journal(), name) for name in my_half.PARTIES}}
    return together({name: renamed(half) for name, half in halves.items()})[0]


def check_against(wanted: tuple[Any, Any], found: tuple[Any, Any]) -> None:
    assert torch.equal(wanted[0], found[0])
    assert wanted[1].keys() == found[1].keys()
    assert all(torch.equal(wanted[1][name], found[1][name]) for name in wanted[1])


def test_alignment_and_training_on_one_stream() -> None:
    wanted = everywhere()
    leader, _, parties = remotely(
        my_half.leader(Journal()), {name: my_half.half(Journal(), name) for name in my_half.PARTIES}
    )
    assert [my_half.IDENTIFIERS["leader"][row] for row in leader[0]] == list("abcef")
    assert [my_half.IDENTIFIERS["laboratory"][row] for row in parties["laboratory"][0]] == list("abcef")
    for name, found in {"leader": leader, **parties}.items():
        check_against(wanted[name], found)


def test_several_protocols_on_one_stream() -> None:
    hub = Hub()
    link = memory.link(hub, "a")
    with ThreadPoolExecutor(1) as pool:
        for value in (1.0, 2.0):
            future = pool.submit(over_link, says(torch.tensor([value])), link, seconds=20)
            assert over_hub(hears(torch.zeros(1)), hub, ["a"], seconds=20)[0].item() == value
            future.result(20)


def says(*values: torch.Tensor) -> Half:
    for value in values:
        yield Send(0, value)


def hears(like: torch.Tensor) -> Half:
    return (yield Receive(1, like))


def test_a_lost_party_is_named_at_all_nodes() -> None:
    def server() -> Half:
        for j in (1, 2):
            yield Send(j, torch.zeros(1))
        for j in (1, 2):
            yield Receive(j, torch.zeros(1))

    def good() -> Half:
        yield Receive(0, torch.zeros(1))
        yield Send(0, torch.zeros(1))
        yield Receive(0, torch.zeros(1))

    def bad() -> Half:
        yield Receive(0, torch.zeros(1))
        raise ZeroDivisionError("this party's own secret")

    error, futures = failing(server(), {"good": good(), "bad": bad()})
    assert isinstance(error, ConnectionError)
    assert "bad is lost: the site has closed the stream" in str(error)
    assert isinstance(futures["bad"].exception(), ZeroDivisionError)
    heard = futures["good"].exception()
    assert isinstance(heard, ConnectionError)
    assert "bad is lost" in str(heard)
    assert "secret" not in str(heard)


def test_a_server_that_fails_says_no_more_than_its_kind() -> None:
    def server() -> Half:
        yield Receive(1, torch.zeros(1))
        raise ZeroDivisionError("the server's own secret")

    def listens() -> Half:
        yield Send(0, torch.zeros(1))
        yield Receive(0, torch.zeros(1))

    error, futures = failing(server(), {"a": listens()})
    assert isinstance(error, ZeroDivisionError)
    heard = str(futures["a"].exception())
    assert "ZeroDivisionError" in heard
    assert "secret" not in heard


def test_messages_of_another_kind_are_refused_by_name() -> None:
    for sent, what in ((torch.zeros(2), "shape"), (torch.full((1,), torch.nan), "NaN"), (torch.zeros(500), "shape")):
        error, _ = failing(hears(torch.zeros(1)), {"odd": says(sent)})
        assert isinstance(error, wire.PayloadError)
        assert "odd" in str(error)
        assert what in str(error)


def test_halves_that_do_not_fit_each_other() -> None:
    more = says(torch.zeros(1), torch.zeros(1))
    error, _ = failing(hears(torch.zeros(1)), {"long": more})
    assert "payload of long: expected no more messages" in str(error)
    error, _ = failing(hears(torch.zeros(1)), {"short": says()})
    assert "payload of short: expected another message, but its half is done" in str(error)


def test_waits_are_bounded() -> None:
    def silent() -> Half:
        yield Receive(0, torch.zeros(1))

    begin = time.monotonic()
    error, futures = failing(hears(torch.zeros(1)), {"silent": silent()}, seconds=0.2)
    assert "silent is lost: Expected a frame within 0.2 s" in str(error)
    assert isinstance(futures["silent"].exception(), ConnectionError)
    hub = Hub()
    with pytest.raises(ConnectionError, match="absent is lost: Expected 'absent' to connect within"):
        over_hub(says(), hub, ["absent"], timeout=0.2)
    with pytest.raises(ConnectionError, match=r"the server is lost: Expected a frame within 0\.2 s"):
        over_link(silent(), memory.link(hub, "a"), seconds=0.2)
    assert time.monotonic() - begin < 10


def test_a_party_that_is_revoked_meanwhile_is_lost() -> None:
    def refuse() -> None:
        raise PermissionError("The key of 'a' has been revoked: sold")

    hub = Hub()
    link = memory.link(hub, "a", refuse)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(over_link, says(torch.zeros(1)), link, seconds=20)
        with pytest.raises(ConnectionError, match="a is lost: The key of 'a' has been revoked: sold"):
            over_hub(hears(torch.zeros(1)), hub, ["a"], seconds=20)
        assert isinstance(future.exception(20), ConnectionError)


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parties with different names"):
        over_hub(says(), Hub(), ["a", "a"])
    with pytest.raises(ValueError, match="positive seconds"):
        over_hub(says(), Hub(), ["a"], seconds=0)
    with pytest.raises(TypeError, match="a function of a Journal, so that a run resumes from its folder"):
        over_hub(says(), Hub(), ["a"], tmp_path)
    link = memory.link(Hub(), "a")
    for half, to, folder in ((says(), link, tmp_path), (says(), lambda: link, None), (lambda _: says(), link, None)):
        with pytest.raises(TypeError, match="Expected either a half and a link, or a function of a Journal"):
            over_link(half, to, folder)
    with pytest.raises(FileNotFoundError, match="party's half"):
        read_half(tmp_path / "nothing.py")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match=r"define a function half\(journal\)"):
        read_half(tmp_path / "empty.py")


@pytest.mark.slow
def test_parties_as_processes(tmp_path: Path) -> None:
    """By the command that parties use, over gRPC with TLS on both sides."""
    pytest.importorskip("grpc")
    own, roster = identity.make_server(tmp_path / "server"), Roster(tmp_path / "server" / "roster.json")
    for name in my_half.PARTIES:
        made = identity.make_site(tmp_path / "server", name)
        made.save(tmp_path / name)
        roster.add(name, identity.fingerprint(made.certificate))
    hub = serve("127.0.0.1:0", own, roster)
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    half = str(TESTS / "support" / "scripts" / "my_half.py")
    command = [sys.executable, "-m", "fedtorch.cli", "join", f"127.0.0.1:{hub.port}", "--half", half, "--identity"]
    parties = {
        name: subprocess.Popen(
            [*command, str(tmp_path / name)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SITE": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for name in my_half.PARTIES
    }
    try:
        found, traffic = over_hub(my_half.leader, hub, my_half.PARTIES, seconds=60, timeout=60)
        said = {name: party.communicate(timeout=60)[0].decode() for name, party in parties.items()}
    finally:
        for party in parties.values():
            party.kill()
            party.communicate()
        hub.close()
    assert all(party.returncode == 0 for party in parties.values()), said
    assert all("the protocol is over" in text for text in said.values())
    assert traffic.up > 0
    check_against(everywhere()["leader"], found)
