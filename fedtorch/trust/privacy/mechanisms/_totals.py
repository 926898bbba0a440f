r"""Noise on running totals: clients' contributions, clipped, and released as a sum with fresh noise every round.

An algorithm with `told` keeps a total S_t = Σ_k u_k of every client's last contribution, whoever is asked. Clients clip
u_k itself, not its changes, to a norm of at most C, and every round releases

.. math:: \tilde S_t = S_t + z\, C\, \xi_t, \qquad \xi_t \sim N(0, I) \text{ independent over } t.

A neighbour in which one client contributes zeros has other S_t in *every* round, by at most C: the client is silent in
some, but stays in the sum. T rounds are T releases, and no sampling amplifies them. Every S̃_t has an error variance of
z²C². Noise on the differences, which would add up to t times that, is never drawn; and tree-structured noise, made for
sums of bounded differences, has no advantage if the sum itself is bounded: a client that moves in every round enters
with up to 2C in nodes of each level.

The sum without noise stays at the server, as messages do. It is never recomputed from the clients' states.

Sources: Dwork and Roth (2014), "The algorithmic foundations of differential privacy", section 3.5, for the composition;
Kairouz et al. (2021), "Practical and private (deep) learning without sampling or shuffling", for trees.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, first_total
from fedtorch.federation.told import Averages, Told
from fedtorch.tree import Tree
from fedtorch.trust.privacy.accounting.spending import Spending, on_grid
from fedtorch.trust.privacy.clipping import clip_rows
from fedtorch.trust.privacy.noise import Mechanism


class State(NamedTuple):
    """The server's state."""

    inner: Tree  # state of the algorithm; its `total` has the noise of the last round
    total: Tree = None  # without noise, used for the next release only


def check_total(told: Told) -> None:
    """Raise ValueError unless the total keeps its meaning with noise."""
    if told.averages is not Averages.COORDINATEWISE:
        raise ValueError(
            "Expected a total of numbers each on its own, but got one of matrices that have to stay positive definite, "
            "or of parts of exact sums: they have no bound, or would not bear noise. For least squares, HM1, FedMGP, "
            "EP and Gibbs protect the rows' sums instead: privacy.sufficient_statistics"
        )


def noised_totals(algorithm: Algorithm, clip: float, noise: float, spending: Spending) -> Algorithm:
    """Give the algorithm its total with noise only.

    Args:
        algorithm: with `clipped_total`, and accepted by `check_total`.
        clip: the bound C on the norm of a client's contribution, without its counts.
        noise: in units of C.
        spending: source of the noise.

    Raises:
        ValueError: when clients answer, counts that are not 0 or 1.
    """
    assert algorithm.told is not None
    clipped_total = algorithm.told._replace(
        of=partial(_clipped, algorithm.told, clip, spending.release.mechanism), averages=Averages.NONE, anew=False
    )
    clipped = dataclasses.replace(algorithm, told=clipped_total)
    report = algorithm.report
    return dataclasses.replace(
        clipped,
        init=partial(_init, clipped),
        outbox=lambda state: algorithm.outbox(state.inner),
        server=partial(_server, algorithm, clipped_total.counts, clip * noise, spending),
        report=None if report is None else lambda state: report(state.inner),
    )


def numbers_of(counts: tuple[str, ...], whole: Tree) -> dict[str, Tensor]:
    """Return clients' contributions to the total `(K, ...)` by name, in float64 or complex128, without the counts.

    Raises:
        ValueError: counts that are not 0 or 1.
    """
    for name, leaf in tree.items(whole):
        if name in counts and not bool(((leaf == 0) | (leaf == 1)).all()):
            raise ValueError(
                f"Expected weights of one under privacy of clients, but got others in {name!r}: they depend on the "
                "data; pass weight=lambda data: torch.ones_like(data.count, dtype=torch.float64)"
            )
    return tree.wide({name: leaf for name, leaf in tree.items(whole) if name not in counts})


def with_numbers(whole: Tree, numbers: dict[str, Tensor]) -> Tree:
    """Return contributions to the total with other numbers beside the counts."""
    return tree.refill(whole, [numbers.get(name, leaf) for name, leaf in tree.items(whole)])


def _clipped(told: Told, clip: float, mechanism: Mechanism, state: Tree) -> Tree:
    """Return clients' contributions to the total, in float64 or complex128 and clipped."""
    whole = told.of(state)
    return with_numbers(whole, clip_rows(numbers_of(told.counts, whole), clip, mechanism)[0])


def _released(total: Tree, counts: tuple[str, ...], scale: float, spending: Spending) -> Tree:
    """Return a total with noise of `scale` on every number except counts."""
    held = {name: leaf for name, leaf in tree.items(total) if name not in counts}
    values = tree.as_real(held)
    flat = torch.cat([leaf.flatten().cpu() for leaf in values.values()])
    scales = torch.full_like(flat, scale)
    noised = on_grid(flat + spending.noise("total", scales), scales).split([leaf.numel() for leaf in values.values()])
    released = {name: part.reshape(leaf.shape).to(leaf.device) for (name, leaf), part in zip(values.items(), noised)}
    return with_numbers(total, tree.from_real(released, held))


def _init(clipped: Algorithm, parameters: Tree, clients: int) -> tuple[State, Tree]:
    """Start with the total of initial states, which depends on no client's data."""
    inner, state = clipped.init(parameters, clients)
    return State(inner._replace(total=first_total(clipped, state, clients))), state


def _server(
    algorithm: Algorithm,
    counts: tuple[str, ...],
    scale: float,
    spending: Spending,
    state: State,
    aggregate: Tree,
    key: Tensor,
) -> State:
    """Take the algorithm's step, with this round's release of the total."""
    inner = state.inner._replace(total=_released(state.total, counts, scale, spending))
    return state._replace(inner=algorithm.server(inner, aggregate, key))
