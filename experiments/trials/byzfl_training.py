r"""byzfl's benchmark on MNIST in the package's words: its clients' minibatches, its rules, its attacks that search.

Ten honest clients send momenta :math:`m \leftarrow 0.9 m + 0.1 g` of gradients of minibatches of 25; f attackers know
them and all send one message; the server clips all messages to norm 2, replaces each by the mean of its n − f nearest,
averages them robustly to a, and takes the step :math:`w \leftarrow w - 0.1 (a + 10^{-4} w)`.

First weights, which rows are for validation (12 000, unused here), which client has which and the order of minibatches
are those that byzfl's code draws: of seed 0, and of the training's seed for the order. Each client's rows below come in
that order, so that round t takes the t-th 25 of them.

Sources: github.com/LPD-EPFL/byzfl (commit 69bd1ac), `byzfl/benchmark/train.py`, `byzfl/fed_framework/client.py`,
`data_distributor.py` and `models.py`, `byzfl/attacks/attacks.py`, `byzfl/aggregators/`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fedtorch as ft
from fedtorch import tree
from fedtorch.data import ClientData
from fedtorch.tree import Tree
from fedtorch.trust import attacks, robust

HONEST, BATCH, LR, DECAY, MOMENTUM, RADIUS = 10, 25, 0.1, 1e-4, 0.9, 2.0
VALIDATION, SEED, EVALUATIONS = 12_000, 0, 20
MEAN, SD = 0.1307, 0.3081  # of pixels
Direction = Callable[[Tensor], tuple[Tensor, Tensor]]  # honest (H, D) -> from where (D,) and along what (D,)


class Network(nn.Module):
    """byzfl's `cnn_mnist`."""

    def __init__(self) -> None:
        super().__init__()
        self._c1 = nn.Conv2d(1, 20, 5, 1)
        self._c2 = nn.Conv2d(20, 50, 5, 1)
        self._f1 = nn.Linear(800, 500)
        self._f2 = nn.Linear(500, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Log probabilities `(n, 10)` of pictures `(n, 1, 28, 28)`."""
        x = F.max_pool2d(F.relu(self._c1(x)), 2, 2)
        x = F.max_pool2d(F.relu(self._c2(x)), 2, 2)
        return F.log_softmax(self._f2(F.relu(self._f1(x.flatten(1)))), dim=1)


class Pictures(NamedTuple):
    """Standardised pictures `(n, 1, 28, 28)` float32 and their digits."""

    x: Tensor
    y: Tensor


def pictures(train: bool) -> Pictures:
    """MNIST, as byzfl standardises it."""
    x, y = ft.data.mnist(train)
    return Pictures(((x - MEAN) / SD)[:, None], y)


def shares(labels: np.ndarray, rows: Sequence[int], similar: float) -> list[np.ndarray]:
    """Each honest client's rows: a part `similar` of all is spread at random, the rest is sorted by digit."""
    cut = int(len(rows) * similar)
    alike = list(rows[:cut])
    random.Random(SEED).shuffle(alike)
    other = np.asarray(rows[cut:], dtype=np.int64)
    ordered = other[np.lexsort((other, labels[other]))]
    parts = zip(np.array_split(np.asarray(alike, dtype=np.int64), HONEST), np.array_split(ordered, HONEST))
    return [np.concatenate(part) for part in parts]


def without_end(rows: np.ndarray) -> Iterator[Tensor]:
    """Minibatches of rows, shuffled anew when all have been taken; draws a number at once, as byzfl's clients do."""
    loader = DataLoader(rows.tolist(), BATCH, shuffle=True)
    first = iter(loader)
    return itertools.chain(first, itertools.chain.from_iterable(itertools.repeat(loader)))


def drawn(labels: Tensor, similar: float, seed: int, rounds: int) -> tuple[Network, list[Tensor]]:
    """The first weights, and each honest client's rows `(25 rounds,)` in the order in which it takes them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        rows = torch.randperm(len(labels))[: len(labels) - VALIDATION * len(labels) // 60_000].tolist()
        clients = []
        for part in shares(labels.numpy(), rows, similar):
            Network()  # the client's own, which takes the server's weights
            clients.append(without_end(part))
        network = Network()
        torch.manual_seed(seed)
        taken = [[next(client) for client in clients] for _ in range(rounds)]
    return network, [torch.cat([each[k] for each in taken]) for k in range(HONEST)]


def clipped(rule: robust.Rule) -> robust.Rule:
    """`rule` of messages that are clipped to norm 2."""

    def average(values: Tensor, weights: Tensor) -> Tensor:
        return rule.average(values * (RADIUS / values.norm(dim=-1, keepdim=True)).clamp(max=1), weights)

    return robust.Rule(f"{rule.name} of clipped", average, rule.least, rule.convex)


def smoothed_median(smoothing: float = 0.1, steps: int = 3) -> robust.Rule:
    """byzfl's geometric median: so many steps of Weiszfeld's from zero, distances at least `smoothing`."""

    def average(values: Tensor, weights: Tensor) -> Tensor:
        values = values.to(torch.float64)
        centre = torch.zeros_like(values[..., 0, :])
        for _ in range(steps):
            away = (values - centre[..., None, :]).norm(dim=-1).clamp(min=smoothing)
            share = (weights / away) / (weights / away).sum(-1, keepdim=True)
            centre = (share[..., None, :] @ values)[..., 0, :]
        return centre

    return robust.Rule("smoothed geometric median", average, convex=True)


def inner_products(honest: Tensor) -> tuple[Tensor, Tensor]:
    """Of inner-product manipulation, −τμ."""
    mean = honest.mean(0)
    return torch.zeros_like(mean), -mean


def little(honest: Tensor) -> tuple[Tensor, Tensor]:
    """Of a little is enough as byzfl has it, μ + τσ with the standard deviation of a sample."""
    return honest.mean(0), honest.std(0)


def search(harm: Callable[[float], float], step: float = 10.0, ratio: float = 0.8) -> float:
    """The factor of the most harm among 20: doubling steps from zero while they help, then shorter and shorter ones."""
    best, worst, growing = 0.0, harm(0.0), True
    for _ in range(EVALUATIONS - 1):
        value = harm(best + step)
        helps = value > worst
        best, worst = (best + step, value) if helps else (best, worst)
        growing = growing and helps
        step *= 2 if growing else ratio
    return best


def coordinates(vectors: Tensor) -> Tensor:
    """The same vectors `(V, D)` up to a rotation in a space of V dimensions, `(V, V)`."""
    values, basis = torch.linalg.eigh(vectors @ vectors.mT)
    return basis * values.clamp(min=0).sqrt()


def strongest(direction: Direction, rule: robust.Rule, faulty: int, *, inner: bool = True) -> attacks.Attack:
    """The message along a direction that drives the rule's average farthest from the honest messages' mean.

    Args:
        direction: of the attack.
        rule: what the server takes.
        faulty: how many clients attack; they come after the honest ones.
        inner: whether the rule sees inner products alone, so that the search need not see every coordinate.
    """

    def together(honest: Tensor, own: Tensor) -> Tensor:
        begin, along = direction(honest)
        seen = torch.cat([honest, begin[None], along[None]])
        seen = coordinates(seen) if inner else seen
        mean, weights = seen[:-2].mean(0), torch.full((len(honest) + faulty,), 1 / (len(honest) + faulty)).double()

        def harm(factor: float) -> float:
            lie = (seen[-2] + factor * seen[-1]).expand(faulty, -1)
            return float((rule.average(torch.cat([seen[:-2], lie]), weights) - mean).norm())

        return (begin + search(harm) * along).expand(len(own), -1)

    return attacks.Attack(tuple(range(HONEST, HONEST + faulty)), f"strongest_{direction.__name__}", together=together)


def attack(name: str, rule: robust.Rule, faulty: int) -> attacks.Attack:
    """One of the three attacks of the benchmark."""
    if name == "sign flipping":
        return attacks.inner_product_manipulation(range(HONEST, HONEST + faulty), 1.0)
    return strongest({"inner products": inner_products, "a little is enough": little}[name], rule, faulty)


def gradients(network: nn.Module, parameters: Tree, x: Tensor, y: Tensor) -> tuple[Tree, Tensor]:
    """Each client's gradient and loss at the same parameters, of minibatches `(K, b, ...)`."""

    def loss(leaves: Tree, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(torch.func.functional_call(network, leaves, (inputs,)), targets)

    return torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0, 0))(parameters, x, y)


def algorithm(network: Network, of: Pictures) -> ft.Algorithm:
    """Distributed gradient descent, momentum at the clients, whose data are rows of `of`; attackers have one row."""
    start = {name: leaf.detach() for name, leaf in network.named_parameters()}

    def client(inbox: Tree, momentum: Tree, data: ClientData, turn: ft.Turn) -> ft.Reply:
        honest = (data.count > 1).nonzero()[:, 0]
        rows = data.batch[honest, turn.round * BATCH : (turn.round + 1) * BATCH]
        found, losses = gradients(network, tree.map(lambda leaf: leaf[0], inbox), of.x[rows], of.y[rows])
        momentum = tree.map(lambda old, new: (MOMENTUM * old).index_add(0, honest, new, alpha=1 - MOMENTUM),
                            momentum, found)  # fmt: skip
        info = {"loss": torch.zeros(len(data.count)).index_put((honest,), losses)}
        return ft.Reply(ft.Mean(momentum, torch.ones(len(data.count))), momentum, info)

    return ft.Algorithm(
        init=lambda parameters, clients: (parameters, tree.map(torch.zeros_like, parameters)),
        outbox=lambda server: server,
        client=client,
        server=lambda weights, heard, key: tree.map(lambda w, step: w - LR * (step + DECAY * w), weights, heard.value),
        model=lambda inbox, state: inbox,
        start=start,
        module=network,
    )


def accuracy(network: Network, parameters: Tree, of: Pictures) -> float:
    """The part of pictures that are told right."""
    with torch.no_grad():
        right = [
            int((torch.func.functional_call(network, parameters, (x,)).argmax(1) == y).sum())
            for x, y in zip(of.x.split(500), of.y.split(500))
        ]
    return sum(right) / len(of.y)


class Course(NamedTuple):
    """A training: the accuracy on the test at every 50th round and after the last, and the mean loss of each round."""

    accuracy: list[float]
    loss: list[float]


def train(
    rule: robust.Rule, lie: attacks.Attack, similar: float, seed: int, *, rounds: int, every: int,
    training: Pictures, test: Pictures,
) -> Course:  # fmt: skip
    """Train with the attack's clients beside the honest ones."""
    network, rows = drawn(training.y, similar, seed, rounds)
    data = ft.data.from_tensors([*rows, *(rows[0][:1] for _ in lie.clients)])
    run = ft.Run(algorithm(network, training) | lie | robust.rule(rule), OneBlock(data))
    course = Course([], [])
    for number in range(rounds):
        if number % every == 0:
            course.accuracy.append(accuracy(network, run.server, test))
        course.loss.append(float(run.step().info["loss"][:HONEST].mean()))
    course.accuracy.append(accuracy(network, run.server, test))
    return course


class OneBlock(ft.InProcess):
    """All clients in one block, though attackers have one row."""

    def blocks(self) -> list[tuple[Tensor, ClientData]]:
        """The block."""
        return self.data.buckets(max_ratio=float("inf"))


def rule(faulty: int) -> robust.Rule:
    """Clipping, mixing and the smoothed median."""
    return rotated(clipped(robust.nearest_neighbour_mixing(faulty, smoothed_median())))


def rotated(rule: robust.Rule) -> robust.Rule:
    """A rule that sees inner products alone, applied to `coordinates`: the messages are read twice only."""

    def average(values: Tensor, weights: Tensor) -> Tensor:
        values = values.to(torch.float64)
        seen = coordinates(values)
        return rule.average(seen, weights) @ torch.linalg.pinv(seen, rtol=1e-10) @ values

    return rule._replace(average=average)
