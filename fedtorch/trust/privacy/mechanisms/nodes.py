r"""Differential privacy of the nodes of a network: every listener is an adversary, and there is no trusted server.

A node sends u_t to its neighbours, such as its model in GTV minimisation. Under `node_level` it sends

.. math:: \tilde u_t = u_0 + (u_t - u_0) \min(1, C / \|u_t - u_0\|) + z\, C\, \xi_t

with the start u_0, which is common to all nodes and contains no information, and fresh noise every time. All its
neighbours receive the same message, so together they know no more than one of them. A silent node's last message stays
with its neighbours, so every round counts for every node, and no choice of active nodes amplifies.

*Who is protected:* one node, all its rows in all rounds; in the neighbouring federation it sends the start with noise.
*From whom:* everybody who listens on any edges, all neighbours together, and everybody who sees their models. Not
protected: the node's own model, and parameters that are not coupled. A node's privacy against more distant nodes is at
least as good; that is not accounted for.

Sources: Jung, "Federated learning: from theory to practice", section 9.3, (9.6)–(9.7); Cyffers, Even, Bellet and
Massoulié (2022), "Muffliato", section 3, for the view of listeners on edges.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.exchanges.messages import like, rows
from fedtorch.federation.turn import Turn
from fedtorch.federation.wrapper import Stage, Wrapper
from fedtorch.random.entropy import Entropy, from_system
from fedtorch.tree import Tree
from fedtorch.trust.privacy._checks import check_clip, check_noise
from fedtorch.trust.privacy.accounting.accountant import Release
from fedtorch.trust.privacy.accounting.ledger import NO_GUARANTEE, SYSTEM, Claim, Ledger
from fedtorch.trust.privacy.accounting.spending import Spending, check_delta_of
from fedtorch.trust.privacy.clipping import clip_rows
from fedtorch.trust.privacy.mechanisms._totals import numbers_of, with_numbers
from fedtorch.trust.privacy.noise import Mechanism, gaussian

ADJACENCY = "one node tells the common start with noise instead of what it has found, in all rounds"
ADVERSARY = "everybody who hears what nodes tell, all neighbours of a node together; not the node itself"


class NodeState(NamedTuple):
    """A node's state; leaves `(K, ...)`."""

    inner: Tree  # state of the algorithm
    start: Tree  # contribution before the first round
    told: Tree  # last contribution, with noise


def node_level(
    clip: float,
    noise: float,
    *,
    delta: float,
    mechanism: Mechanism = gaussian,
    budget: float | None = None,
    ledger: Path | str | None = None,
    entropy: Entropy | None = None,
) -> Wrapper:
    """Build the wrapper that clips and noises nodes' messages, so that none can be told from the start beyond (ε, δ).

    For algorithms with persistent contributions only, such as `ft.gtv`.

    Args:
        clip: the bound C on a contribution's distance from the start (Euclidean, or for `laplace` the sum of absolute
            values).
        noise: z, in units of the sensitivity: a node adds z·C to every number of its message.
        delta: δ of all ε, below one over the number of nodes.
        mechanism: `gaussian` or `laplace`.
        budget: the largest ε: a run ends before the round that would exceed it.
        ledger: a file that only grows; None keeps it in memory.
        entropy: source of the noise; default: the operating system's.

    Returns:
        A wrapper for runs with any `cohort=`, whose rounds all count for all nodes.

    Raises:
        ValueError: clip, noise, δ or budget out of range. In wrapping: an algorithm with a budget, or without
            persistent contributions.
        TypeError: in the first round, an algorithm with other messages too.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import privacy
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1)), (torch.ones(1, 1), -torch.ones(1))])
        >>> local = ft.least_squares(torch.nn.Linear(1, 1, bias=False))
        >>> exact = ft.gtv(local, ft.Network.from_edges([(0, 1)]), alpha=0.5)
        >>> run = ft.run(exact | privacy.node_level(clip=1.0, noise=4.0, delta=1e-3), ft.InProcess(data), rounds=5)
        >>> round(float(run.history["epsilon"].iloc[-1]), 2)
        1.55
        >>> round(privacy.epsilon(noise=4.0, rounds=5, delta=1e-3), 2)
        1.55
    """
    check_clip(clip)
    check_noise(noise)
    entropy = from_system() if entropy is None else entropy
    claim = Claim("node", ADJACENCY, ADVERSARY, SYSTEM if entropy.guarantees else NO_GUARANTEE)
    release, account = Release(float(noise), 1.0, mechanism), Ledger(ledger, claim, delta, budget)

    def wrap(algorithm: Algorithm) -> Algorithm:
        spending = Spending(account, release, 1, entropy, partial(check_delta_of, delta, "nodes"))
        return _private(algorithm, float(clip), spending)

    about = {"clip": clip, "noise": noise, "mechanism": mechanism.name, "delta": delta}
    return Wrapper(Stage.PRIVACY, "privacy.node_level", wrap, about)


def _private(algorithm: Algorithm, clip: float, spending: Spending) -> Algorithm:
    if algorithm.told is None:
        raise ValueError(
            "Expected an algorithm whose nodes have persistent contributions, such as ft.gtv, but got one of fresh "
            "messages; over a star use privacy.client_level"
        )
    if algorithm.budget is not None:
        raise ValueError("Expected an algorithm without a budget of its own, but got one: choose one level of privacy")
    return dataclasses.replace(
        algorithm,
        init=partial(_init, algorithm),
        client=partial(_client, algorithm, clip, spending),
        model=lambda inbox, state: algorithm.model(inbox, state.inner),
        told=algorithm.told._replace(of=lambda state: state.told),
        budget=spending,
    )


def _init(algorithm: Algorithm, parameters: Tree, clients: int) -> tuple[Tree, NodeState]:
    assert algorithm.told is not None
    server, state = algorithm.init(parameters, clients)
    start = tree.map(lambda leaf: leaf[0], algorithm.told.of(tree.expand(state, 1)))
    return server, NodeState(state, start, start)


def _client(
    algorithm: Algorithm, clip: float, spending: Spending, inbox: Tree, state: NodeState, data: Any, turn: Turn
) -> Reply:
    """Return the algorithm's reply with its contribution clipped about the start, and noised."""
    assert algorithm.told is not None
    spending.begin(turn.key)
    reply = algorithm.client(inbox, state.inner, data, turn)
    if tree.leaves(reply.message):
        raise TypeError(
            "Expected nodes that send persistent contributions only, but they send fresh messages, which would go to "
            "their neighbours without noise"
        )
    whole, counts = algorithm.told.of(reply.state), algorithm.told.counts
    start = numbers_of(counts, state.start)
    change = tree.subtract(numbers_of(counts, whole), start)
    cut = tree.to(clip_rows(change, clip, spending.release.mechanism)[0], "cpu")
    flat = spending.noised("what nodes tell", turn.key, rows(cut), spending.release.noise * clip)
    noised = tree.map(_beside, start, like(flat, cut))
    sent = tree.map(lambda new, old: new.to(old.dtype), with_numbers(whole, noised), whole)
    return Reply(
        reply.message, NodeState(reply.state, state.start, sent), {} if spending.entropy.guarantees else reply.info
    )


def _beside(start: Tensor, change: Tensor) -> Tensor:
    """Return the start plus a change, where the start is."""
    return start + change.to(start.device)
