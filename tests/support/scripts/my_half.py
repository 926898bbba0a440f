"""A party of the tests: the file that `fedtorch join --half` reads. `SITE` in the environment says which."""

import os
import threading
from functools import partial

import torch

from fedtorch import random, vfl
from fedtorch.protocol.halves import Half
from fedtorch.protocol.journal import Journal
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.split_nn import mlp
from fedtorch.vfl.nodes.iteration import party_half, server_half
from fedtorch.vfl.nodes.node import Iteration, PartyNode, ServerNode
from fedtorch.vfl.rows.alignment import Holder

PARTIES = ["clinic", "laboratory"]
IDENTIFIERS = {"leader": list("hgfedcba"), "clinic": list("abcdef"), "laboratory": list("bzcayfe")}
WIDTHS = {"clinic": 3, "laboratory": 2}
_ONE = threading.Lock()
ITERATIONS = [Iteration(step=step) for step in range(int(os.environ.get("ITERATIONS", "5")))]
EVERY, DELAY = int(os.environ.get("EVERY", "2")), 0  # iterations between two points, and by which gradients are late


def sgd(parameters):
    """The optimiser of every node."""
    return torch.optim.SGD(parameters, lr=0.01)


def features(name: str) -> torch.Tensor:
    """A party's own, `(rows, width)`."""
    key = random.fold_in(random.key(1), WIDTHS[name])
    return random.normal(key, (len(IDENTIFIERS[name]), WIDTHS[name]), torch.float64)


def network() -> vfl.SplitNetwork:
    """The same at every node."""
    bayes = vfl.HierarchicalBayes(1.0)
    with _ONE:  # modules start from the process's one generator, seeded for it
        bottoms = [mlp(WIDTHS[name], [4], 1).double() for name in PARTIES]
        return vfl.SplitNetwork(bottoms, likelihoods.bernoulli(), names=PARTIES, bayes=bayes).double()


def leader(journal: Journal) -> Half:
    """Aligns the rows and trains; returns the rows and the server's parameters."""
    rows = yield from journal.once(Holder(IDENTIFIERS["leader"], "leader").leading(PARTIES))
    made, y = network(), torch.arange(8.0, dtype=torch.float64) % 2
    node = ServerNode(made.server, vfl.VerticalData((), y[rows]), optimizer=sgd, per_row=True)
    yield from journal.through(partial(server_half, node), node, ITERATIONS, EVERY)
    return rows, {name: value.detach() for name, value in made.server.named_parameters()}


def half(journal: Journal, name: str = os.environ.get("SITE", "clinic")) -> Half:
    """A party's side of it."""
    rows = yield from journal.once(Holder(IDENTIFIERS[name], name).following("leader"))
    part, unknown = network().parties[PARTIES.index(name)], torch.full((len(rows),), torch.nan, dtype=torch.float64)
    node = PartyNode(part, vfl.VerticalData((features(name)[rows],), unknown), optimizer=sgd, per_row=True)
    yield from journal.through(partial(party_half, node, delay=DELAY, accept_disclosure=True), node, ITERATIONS, EVERY)
    return rows, {key: value.detach() for key, value in part.named_parameters()}
