r"""Differential privacy of whole clients without a trusted server: every client adds noise to its messages.

A client's message is clipped to a norm of at most C and gets noise of z·C/√q on every number,

.. math:: \tilde v_k = v_k \min(1, C / \|v_k\|) + \frac{z\, C}{\sqrt q}\, \xi_k .

With a quorum q = 1 each single message is one release of noise z. Under masks the server sees sums only, and the noise
of q honest clients together is that of one release: a sum of n clients has an error of z·C·√(n/q), where clients' full
noise would give z·C·√n. Numbers are rounded to the grid of the masks before they are added up. In law that is rounding
of the noised sum, with further independent noise, except for a part of about exp(−2π² s²) if shares of noise have s
grid steps (Poisson's summation formula); s ≥ 4 is required, which leaves 10⁻¹³⁷.

*Who is protected:* one client, all its rows in all rounds, against zeros in their place. *From whom:* with q = 1
everybody, the server included; else adversaries who see only sums of at least q clients that have added their noise.
Weights are one. Every round counts for every client, whoever is asked.

Sources: Kairouz, Liu and Steinke (2021), "The distributed discrete Gaussian mechanism for federated learning with
secure aggregation", section 1, for shares of noise; McMahan et al. (2018), Algorithm 1, for clipping.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.budget import Need
from fedtorch.federation.exchanges.exchange import Mean, Sum
from fedtorch.federation.exchanges.messages import like, rows
from fedtorch.federation.turn import Turn
from fedtorch.federation.wrapper import Stage, Wrapper
from fedtorch.random.entropy import Entropy, from_system
from fedtorch.tree import Tree
from fedtorch.trust.privacy._checks import check_clip, check_no_averaged_buffers, check_noise
from fedtorch.trust.privacy.accounting.accountant import Release
from fedtorch.trust.privacy.accounting.ledger import NO_GUARANTEE, SYSTEM, Claim, Ledger
from fedtorch.trust.privacy.accounting.spending import Spending, check_delta_of
from fedtorch.trust.privacy.clipping import clip_rows
from fedtorch.trust.privacy.noise import gaussian

ADJACENCY = "zero-out: one client sends zeros with its noise instead of its messages, in all rounds"
ADVERSARY = "everybody who sees what clients send, the server included"


def local_level(
    clip: float,
    noise: float,
    *,
    delta: float,
    quorum: int = 1,
    budget: float | None = None,
    ledger: Path | str | None = None,
    entropy: Entropy | None = None,
) -> Wrapper:
    """Build the wrapper that clips and noises messages at the clients, so that the server need not be trusted.

    For algorithms without persistent contributions, such as `ft.fedavg`.

    Args:
        clip: the bound C on the Euclidean norm of a client's message.
        noise: z, in units of C.
        delta: δ of all ε, below one over the number of clients.
        quorum: q, number of clients in every sum that are assumed to add their noise; 1 counts each client's own only.
            A larger one needs a population with `carry=sites.masked(minimum=q)` or more.
        budget: the largest ε: a run ends before the round that would exceed it.
        ledger: a file that only grows; None keeps it in memory. On `ft.Remote` every site has its own.
        entropy: source of the noise; default: the operating system's.

    Returns:
        A wrapper for runs with any `cohort=`, whose rounds all count for all clients.

    Raises:
        ValueError: clip, noise, δ, quorum or budget out of range. In wrapping: an algorithm with a budget, or with
            persistent contributions. At the start of a run: a population without masks, or with masks for fewer clients
            than the quorum; shares of noise below the masks' grid.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import privacy
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=8, seed=0)
        >>> plain = ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1)))
        >>> private = plain | privacy.local_level(clip=1.0, noise=4.0, delta=1e-3)
        >>> run = ft.run(private, ft.InProcess(data), rounds=5)
        >>> round(float(run.history["epsilon"].iloc[-1]), 2)
        1.55
    """
    check_clip(clip)
    check_noise(noise)
    if quorum < 1:
        raise ValueError(f"Expected a quorum of at least 1, but got {quorum}")
    share = noise * clip / math.sqrt(quorum)
    need = Need(quorum, share, f"privacy.local_level(quorum={quorum})")
    entropy = from_system() if entropy is None else entropy
    seen = ADVERSARY if quorum == 1 else f"everybody who sees sums of at least {quorum} clients that add noise, no less"
    claim = Claim("client", ADJACENCY, seen, SYSTEM if entropy.guarantees else NO_GUARANTEE)
    release, account = Release(float(noise), 1.0, gaussian), Ledger(ledger, claim, delta, budget)

    def wrap(algorithm: Algorithm) -> Algorithm:
        _check(algorithm)
        check_no_averaged_buffers(algorithm)
        check = partial(check_delta_of, delta, "clients")
        spending = Spending(account, release, 1, entropy, check, quorum=quorum, need=need)
        client = partial(_client, algorithm, float(clip), share, spending)
        return dataclasses.replace(algorithm, client=client, budget=spending)

    about = {"clip": clip, "noise": noise, "quorum": quorum, "delta": delta}
    return Wrapper(Stage.PRIVACY, "privacy.local_level", wrap, about)


def _check(algorithm: Algorithm) -> None:
    if algorithm.told is not None:
        raise ValueError(
            "Expected clients that send fresh messages, but got an algorithm with persistent contributions: on a graph "
            "use privacy.node_level; over a star privacy.client_level with clip_told="
        )
    if algorithm.budget is not None:
        raise ValueError("Expected an algorithm without a budget of its own, but got one: choose one level of privacy")


def _client(
    algorithm: Algorithm, clip: float, share: float, spending: Spending, inbox: Tree, state: Tree, data: Any, turn: Turn
) -> Reply:
    """Return the algorithm's reply, its message clipped and noised, its weights one."""
    spending.begin(turn.key)
    reply = algorithm.client(inbox, state, data, turn)
    nodes: list[Mean | Sum] = []
    tree.map(lambda node: nodes.append(node) or node, reply.message, is_leaf=(Mean, Sum))  # type: ignore[func-returns-value]
    values = tuple(tree.wide(node.value) for node in nodes)
    cut = clip_rows(values, clip, spending.release.mechanism)[0]
    noised = like(spending.noised("messages of clients", turn.key, rows(cut).cpu(), share), cut)
    parts = iter(tree.map(lambda new, old: new.to(old.device), noised, cut))
    one = torch.ones(len(turn.key), dtype=torch.float64, device=turn.key.device)

    def sent(node: Mean | Sum) -> Mean | Sum:
        return Mean(next(parts), one) if isinstance(node, Mean) else Sum(next(parts))

    message = tree.map(sent, reply.message, is_leaf=(Mean, Sum))
    return Reply(message, reply.state, {} if spending.entropy.guarantees else reply.info)
