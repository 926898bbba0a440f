"""A server that goes on by its clock over streams: the numbers of one process, with the delays that there were."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from support.verticals import KEY, gaussian_data, predictors

from fedtorch import vfl
from fedtorch.protocol.halves import Half, Receive, Send, wrapped
from fedtorch.sites import Hub, Roster, connect, serve
from fedtorch.sites.identity import identity
from fedtorch.sites.streams import memory
from fedtorch.sites.streams.hub import Link
from fedtorch.sites.vertical.remote import over_hub, over_link
from fedtorch.vfl.fit.guide import initial
from fedtorch.vfl.fit.part import parts
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.nodes.iteration import party_half, server_half
from fedtorch.vfl.nodes.node import Iteration, PartyNode, ServerNode

WIDTHS, NAMES = [2, 1], ["a", "b"]
WAIT = 60.0  # seconds that nothing here takes


def nodes() -> tuple[ServerNode, list[PartyNode]]:
    """A variational fit of a server and two parties; every call makes modules of its own."""
    model = vfl.augmented(likelihoods.gaussian(0.8), predictors(WIDTHS), 0.7)
    guide, data = vfl.Guide(vfl.amortised(sees_response=False)), gaussian_data(WIDTHS, 30)
    server, *holders = parts(model, guide, initial(model, guide, 30, 1, KEY, torch.float64), key=KEY)
    sgd = lambda leaves: torch.optim.SGD(leaves, lr=0.05 / 30)
    known = data.known_to_parties(response=False)
    made = [PartyNode(part, rows, optimizer=sgd) for part, rows in zip(holders, known)]
    return ServerNode(server, data.known_to_server(), optimizer=sgd), made


def weights(*made: ServerNode | PartyNode) -> torch.Tensor:
    return torch.cat([leaf.detach().flatten() for node in made for leaf in node.part.parameters()])


class Held:
    """The second party sends each value but the first when the first has had three more answers than at its own last.

    They count from its answer: from its value on, the first could have them before the server takes that in.
    """

    def __init__(self, values: int) -> None:
        self.values, self.over, self.answers, self.ticks = values, threading.Event(), 0, 0
        self.changed = threading.Condition()  # of answers, messages that the first party has had

    def prompt(self, step: Send | Receive) -> Half:
        answer = yield step
        with self.changed:
            self.answers += isinstance(step, Receive)  # two messages an answer
            self.changed.notify_all()
        return answer

    def late(self) -> Callable[[Send | Receive], Half]:
        sent, before = itertools.count(), [0]

        def around(step: Send | Receive) -> Half:
            if isinstance(step, Send):
                number = next(sent)
                with self.changed:
                    late = 0 < number <= self.values  # the server may hear one more in its last tick
                    assert not late or self.changed.wait_for(lambda: self.answers >= before[0] + 6, WAIT)
                if number == self.values:
                    self.over.set()
            answer = yield step
            if isinstance(step, Receive):
                with self.changed:
                    before[0] = self.answers
            return answer

        return around

    def iterations(self) -> Iterator[Iteration]:
        """Ticks until the second party has sent so many values, and one more that comes to nothing."""
        for self.ticks in range(100_000):
            if self.over.is_set():
                return
            yield Iteration(step=self.ticks)


def endless() -> Iterator[Iteration]:
    return (Iteration(step=step) for step in itertools.count())


def fit(hub: Hub, links: dict[str, Callable[[], Link]], values: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Weights of all nodes, and who was heard in each tick; every node has modules of its own."""
    held, (server, _) = Held(values), nodes()
    own = {name: nodes()[1][j] for j, name in enumerate(NAMES)}
    with ThreadPoolExecutor(2) as pool:
        halves = {name: party_half(own[name], endless(), clocked=True) for name in NAMES}
        halves = {"a": wrapped(halves["a"], held.prompt), "b": wrapped(halves["b"], held.late())}
        futures = [pool.submit(lambda n=name: over_link(halves[n], links[n](), seconds=WAIT)) for name in NAMES]
        half = server_half(server, held.iterations(), tick=0.005)
        heard, traffic = over_hub(half, hub, NAMES, seconds=WAIT, timeout=WAIT)
        assert sum(future.result(WAIT)[1].up for future in futures) == traffic.up
    return weights(server, *own.values()), heard


def replayed(heard: list[list[int]]) -> torch.Tensor:
    """The same ticks in one process, with the delays that there were."""
    late: list[list[int]] = [[], []]
    begun = [0, 0]
    for tick, parties in enumerate(heard):
        for j in parties:
            late[j].append(tick - begun[j])
            begun[j] = tick + 1
    server, parties = nodes()
    run = vfl.NodesRun(server, parties, delays=lambda j, number: [*late[j], len(heard)][min(number, len(late[j]))])
    assert [round.ids.tolist() for round in run.rounds(len(heard))] == heard
    return weights(server, *parties)


def check(heard: list[list[int]], values: int) -> None:
    """That the second party was late by three answers of the first, at least."""
    at = [tick for tick, parties in enumerate(heard) if 1 in parties]
    assert len(at) >= values
    for before, after in itertools.pairwise(at[:values]):
        assert sum(0 in parties for parties in heard[before + 1 : after]) >= 2


def test_a_late_party_holds_up_nobody_and_numbers_are_those_of_its_delays() -> None:
    hub = Hub()
    found, heard = fit(hub, {name: partial(memory.link, hub, name) for name in NAMES}, 3)
    check(heard, 3)
    assert torch.equal(found, replayed(heard))


@pytest.mark.slow
def test_over_grpc_with_certificates_of_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    own, roster = identity.make_server(tmp_path / "server"), Roster(tmp_path / "server" / "roster.json")
    made = {name: identity.make_site(tmp_path / "server", name) for name in NAMES}
    for name, each in made.items():
        roster.add(name, identity.fingerprint(each.certificate))
    hub = serve("127.0.0.1:0", own, roster)
    try:
        links = {name: partial(connect, f"127.0.0.1:{hub.port}", each) for name, each in made.items()}
        found, heard = fit(hub, links, 4)
    finally:
        hub.close()
    check(heard, 4)
    assert torch.equal(found, replayed(heard))


def test_who_never_answers_ends_the_protocol_after_the_last_tick_by_name() -> None:
    hub, (server, parties) = Hub(), nodes()
    silent = memory.link(hub, "b")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(over_link, party_half(parties[0], endless(), clocked=True), memory.link(hub, "a"))
        while not hub.held["a"]:  # its value is here before the server begins, however busy the machine is
            time.sleep(0.01)
        with pytest.raises(ConnectionError, match=r"b is lost: Expected a frame within 0\.2 s"):
            over_hub(server_half(server, [Iteration()] * 3, tick=0.01), hub, NAMES, seconds=0.2)
        assert "b is lost" in str(future.exception(WAIT))
    silent.close()


def test_what_is_refused() -> None:
    server, (party, _) = nodes()
    for half, message in (
        (server_half(server, [Iteration()], tick=0.0), "positive tick"),
        (server_half(server, [Iteration(active=[True, False])], tick=1.0), "a step and a rate alone by the clock"),
        (party_half(party, [Iteration(rows=torch.arange(3))], clocked=True), "a step and a rate alone by the clock"),
        (party_half(party, endless(), delay=2, clocked=True), "no delay by the clock"),
    ):
        with pytest.raises(ValueError, match=message):
            next(half)
    ends = party_half(party, [], clocked=True)
    with pytest.raises(RuntimeError, match="more iterations than the server's ticks, but 'party 0' has come to an end"):
        next(ends)
    party.part.key = None
    with pytest.raises(ValueError, match="parts that draw their own noise"):
        next(party_half(party, endless(), clocked=True))
