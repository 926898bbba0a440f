"""The server's requests besides rounds: totals of persistent contributions, and scores."""

from __future__ import annotations

import torch

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.exchange import Sum
from fedtorch.protocol.halves import Half
from fedtorch.sites.rounds._masked import Asked, SumLost
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.server import ServerSession
from fedtorch.sites.rounds.sites import reasons
from fedtorch.tree import Tree


def total(session: ServerSession) -> Half:
    """Request the total of all clients' persistent contributions; return None unless all sites answer."""
    exchange, members, initial = session.algorithm.exchange, session.members(), session.local.table.initial
    if session.plan.carry.network is not None:
        return None  # each node has its own row, and the server none
    if (yield from session.prepare(members)):
        return None
    number, counts = session.plan.sites.next_sequence(), dict(zip(session.plan.sites.names, session.plan.counts))

    def read(site: str, frame: Frame) -> Tree:
        if session.hidden:
            return frame.blob("said")
        like = initial_total(session.algorithm, initial, 0 if exchange.additive else counts[site])
        return frame.tree({"told": like})["told"]

    for site in members:
        yield session.request("total", site, number)
    answers = yield session.wait(members, read)
    if answers.missing:
        return None
    if session.hidden:
        try:
            messages = initial_contributions(session.algorithm, initial, 0)
            aggregate, _ = yield from session.add_up(answers.messages, messages, Asked(number, len(members)))
            return aggregate.value
        except SumLost:
            return None
    withdrawn = [initial_total(session.algorithm, initial, counts[site]) for site in counts if site not in members]
    return exchange.finish(exchange.merge([*answers.messages.values(), *withdrawn])).value


def scores(session: ServerSession, outbox: Tree, like: Tree) -> Half:
    """Request sums of metrics, named as in `like` `(0, ...)`; return a row per client, zeros at withdrawn sites.

    Raises:
        RuntimeError: a site does not answer; the message says why.
    """
    if session.plan.carry.network is not None:
        yield from session.prepare([])
    number, members = session.plan.sites.next_sequence(), session.members()
    for site in members:
        inboxes = session.inboxes(outbox, session.of_site(site))
        yield session.request("evaluate", site, number, inboxes, metrics=list(like))
    zeros = {
        site: tree.map(lambda leaf, n=n: leaf.new_zeros(n, *leaf.shape[1:]), like)
        for site, n in zip(session.plan.sites.names, session.plan.counts)
    }
    read = lambda site, frame: frame.tree({"sums": zeros[site]}, finite=False)["sums"]
    answers = yield session.wait(members, read)
    if answers.missing:
        raise RuntimeError(f"Expected scores of all sites, but got none of {reasons(answers.missing)}")
    return tree.concatenate([answers.messages.get(site, none) for site, none in zeros.items()])


def initial_total(algorithm: Algorithm, initial: Tree, clients: int) -> Tree:
    """Return the partial aggregate of the contributions of `clients` clients in the initial state of one."""
    return algorithm.exchange.gather(initial_contributions(algorithm, initial, clients), torch.arange(clients))


def initial_contributions(algorithm: Algorithm, initial: Tree, clients: int) -> Sum:
    """Return the contributions of `clients` clients in the initial state of one."""
    assert algorithm.told is not None
    contribution = algorithm.told.of(tree.expand(initial, 1))
    return Sum(tree.map(lambda leaf: leaf.expand(clients, *leaf.shape[1:]), contribution))
