"""Cohorts, the clients asked in a round, as functions of the round's key and number.

A cohort function is called once at the start of each round. It uses integers and exact comparisons, so that every rank
draws the same cohort; its ids are distinct and ascending. An empty cohort gives a round in which nothing happens.

Each client's random number of a round depends on its name only, see `fedtorch.random.named`, so a run passes the
clients' names to the cohorts here (`ByName.of`). The cohort is the clients with the smallest numbers, or with numbers
below a bound. Without a run they are for clients without names.

>>> from fedtorch import random
>>> from fedtorch.federation.runs import cohorts as sampling
>>> key = random.key(0)
>>> [len(cohort(key, 0)) for cohort in (sampling.uniform_cohort(3, 10), sampling.weighted_cohort([1.0, 2.0, 9.0], 2))]
[3, 2]
>>> sampling.fixed_cohort([4, 1])(key, 0)
tensor([1, 4])
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, random
from fedtorch.random import philox

_KEYS_AHEAD = 64  # rounds whose keys are made in one call, at the cost of one round's

Cohort = Callable[[Tensor, int], Tensor | None]  # (key, round) -> ascending ids of the clients asked, None for all
Asked = int | Sequence[int] | Cohort | None  # number of clients, their ids, or a function; None for all


@dataclass(frozen=True)
class ByName:
    """A cohort that is drawn by the clients' names.

    Attributes:
        draw: (key, numbers of the names `(K,)`, or None for 0, …, K − 1) -> positions of the clients asked.
        clients: K, the number of clients.
        names: `(K,)` numbers of names; default: those of clients without names.

    Example:
        >>> import torch, fedtorch as ft
        >>> cohort, key = uniform_cohort(2, clients=4), ft.random.key(0)
        >>> cohort(key, 0), cohort.of(torch.tensor([1, 0, 2, 3]))(key, 0)  # the same clients in another order
        (tensor([0, 3]), tensor([1, 3]))
    """

    draw: Callable[[Tensor, Tensor | None], Tensor]
    clients: int
    names: Tensor | None = None

    def __call__(self, key: Tensor, round: int) -> Tensor:
        """Return ids, ascending."""
        return self.draw(key, self.names)

    def of(self, names: Tensor) -> ByName:
        """Return the cohort of the first clients of a population with these numbers of names.

        Raises:
            ValueError: there are fewer clients.
        """
        if self.clients > len(names):
            raise ValueError(
                f"Expected a cohort of at most the population's {len(names)} clients, but got one of {self.clients}; "
                f"make it with clients={len(names)}, or a weight for each of them"
            )
        names = names[: self.clients]
        return self if names.equal(torch.arange(self.clients)) else replace(self, names=names)


def uniform_cohort(size: int, clients: int) -> Cohort:
    """Build the cohort of `size` of `clients` clients, uniformly without replacement, as for `cohort=20`.

    Raises:
        ValueError: size below one, or above the number of clients.

    Example:
        >>> import fedtorch as ft
        >>> len(uniform_cohort(3, clients=10)(ft.random.key(0), 0))
        3
    """
    expected.kind(size, int, "a cohort of a whole number of clients", "for a share of them see ft.poisson_cohort")
    if not 1 <= size <= clients:
        raise ValueError(f"Expected a cohort between 1 and the population's {clients} clients, but got {size}")

    def draw(key: Tensor, names: Tensor | None) -> Tensor:
        return _smallest(philox.integers(key, (clients,), names), size)

    return ByName(draw, clients)


def _smallest(numbers: Tensor, size: int) -> Tensor:
    return numbers.topk(size, dim=-1, largest=False, sorted=False).indices.sort(dim=-1).values


def fixed_cohort(ids: Tensor | Sequence[int]) -> Cohort:
    """Build the cohort of the same clients every round, in ascending order, as for `cohort=[1, 4]`.

    Raises:
        ValueError: no ids, negative or repeated ones; ids beyond the population are refused in use.
        TypeError: ids that are no whole numbers.

    Example:
        >>> import fedtorch as ft
        >>> fixed_cohort([4, 1])(ft.random.key(0), 0)
        tensor([1, 4])
    """
    clients = _ascending(ids)
    return lambda key, round: clients


def _ascending(ids: Tensor | Sequence[int]) -> Tensor:
    given = torch.as_tensor(ids, device="cpu")
    if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise TypeError(
            f"Expected ids of clients as whole numbers, but got {given.dtype}; pass their places, such as [0, 3]"
        )
    clients = given.to(torch.int64).sort().values
    if not clients.numel():
        raise ValueError("Expected at least one client in a cohort, but got none; pass cohort=None to ask everybody")
    check_ids(clients, torch.iinfo(torch.int64).max)
    return clients


def poisson_cohort(rate: float, clients: int) -> Cohort:
    """Return each of `clients` clients independently with probability `rate`, to a resolution of 2⁻³².

    The cohort's size varies and may be zero. This is the sampling that the privacy accountants of subsampled
    mechanisms assume.

    Raises:
        ValueError: a rate outside (0, 1], or fewer than one client.

    Example:
        >>> import fedtorch as ft
        >>> draw = ft.poisson_cohort(0.5, clients=10)
        >>> [len(draw(key, 0)) for key in (ft.random.key(0), ft.random.key(1))]
        [5, 2]
    """
    if not 0 < rate <= 1:
        raise ValueError(f"Expected a rate above 0 and at most 1, but got {rate}")
    if clients < 1:
        raise ValueError(f"Expected at least one client, but got {clients}")
    bound = math.ceil(rate * 2**32)
    return ByName(lambda key, names: philox.coins(key, (clients,), bound, names).nonzero()[:, 0], clients)


def weighted_cohort(weights: Tensor | Sequence[float], size: int) -> Cohort:
    """Return `size` clients without replacement, clients of large weight more often.

    Exponential races: client k draws E_k / w_k with E_k exponential, and the `size` smallest win. This equals drawing
    one client after another with probabilities proportional to the remaining weights. For `size` > 1 the inclusion
    probabilities are therefore *not exactly* proportional to the weights: they are closer together, and none exceeds
    one.

    Args:
        weights: `(K,)` positive, one per client of the population.
        size: clients in the cohort, from 1 to K.

    Source: Efraimidis and Spirakis (2006), "Weighted random sampling with a reservoir", Algorithm A.

    Raises:
        ValueError: weights that are not positive and finite, or an impossible size.

    Example:
        >>> import fedtorch as ft
        >>> ft.weighted_cohort([1e-9, 1.0, 2.0], size=2)(ft.random.key(0), 0)
        tensor([1, 2])
    """
    known = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if known.ndim != 1 or not bool(((known > 0) & known.isfinite()).all()):
        raise ValueError(
            f"Expected positive finite weights (K,), but got {known.tolist()}; leave clients out with data.select"
        )
    if not 1 <= size <= len(known):
        raise ValueError(f"Expected a cohort between 1 and the {len(known)} clients with weights, but got {size}")

    def draw(key: Tensor, names: Tensor | None) -> Tensor:
        return _smallest(philox.exponential(key, (len(known),), torch.float64, names) / known, size)

    return ByName(draw, len(known))


def cohort_function(cohort: Asked, clients: int) -> Cohort | None:
    """Convert a number to the uniform cohort of that size, and ids to that of these clients; keep None, for all.

    Example:
        >>> import fedtorch as ft
        >>> cohort_function(3, clients=10)(ft.random.key(0), 0).equal(uniform_cohort(3, 10)(ft.random.key(0), 0))
        True
    """
    if cohort is None:
        return None
    if callable(cohort):
        _check_arguments(cohort)
        return cohort
    if isinstance(cohort, Sequence) and not isinstance(cohort, str):
        check_ids(_ascending(cohort), clients)
        return fixed_cohort(cohort)
    if not isinstance(cohort, int) or isinstance(cohort, bool):
        raise TypeError(
            "Expected cohort= as a whole number of clients, a list of their ids such as [0, 1], a function of the "
            f"round's key and number, or None, but got {cohort!r}; for a share of the clients pass "
            f"ft.poisson_cohort(0.4, {clients})"
        )
    return uniform_cohort(cohort, clients)


def checked_draws(cohort: Asked, clients: int, names: Tensor | None = None) -> Cohort | None:
    """Return `cohort` as a function that checks each of its draws, None for all clients.

    Args:
        cohort: the run's argument.
        clients: number of clients in the population.
        names: the numbers of their names `(K,)`, by which the cohorts of this module are drawn.

    Raises:
        ValueError: ids of clients that do not exist; a function's are refused in their round.
        TypeError: a function that does not take the round's key and the number of rounds before it.

    Example:
        >>> import fedtorch as ft
        >>> checked_draws([0, 5], clients=5)
        Traceback (most recent call last):
        ValueError: Expected distinct ascending ids of the population's 5 clients, but got [0, 5]
    """
    draw = cohort_function(cohort, clients)
    if draw is None:
        return None
    if names is not None and isinstance(draw, ByName):
        draw = draw.of(names)

    def checked(key: Tensor, round: int) -> Tensor | None:
        ids = draw(key, round)
        if ids is not None:
            check_ids(ids, clients)
        return ids

    return checked


def _check_arguments(cohort: Cohort) -> None:
    try:
        inspect.signature(cohort).bind(None, 0)
    except ValueError:  # a function in C has no signature
        return
    except TypeError as error:
        raise TypeError(
            "Expected a cohort as a function of two arguments, the round's key and the number of rounds before it, but "
            f"got one for which {error}; write for example lambda key, round: ft.random.choice(key, 100, 10)"
        ) from error


def check_ids(ids: Tensor, clients: int) -> None:
    """Raise ValueError unless `ids` are distinct, ascending clients of a population.

    Example:
        >>> import torch
        >>> check_ids(torch.tensor([3, 1]), clients=5)
        Traceback (most recent call last):
        ValueError: Expected distinct ascending ids of the population's 5 clients, but got [3, 1]
    """
    expected.kind(ids, Tensor, "a cohort of int64 ids (M,)", "return a tensor of distinct ascending ids")
    if ids.ndim != 1 or ids.dtype != torch.int64:
        raise ValueError(f"Expected a cohort of int64 ids (M,), but got {ids.dtype} of shape {tuple(ids.shape)}")
    if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < clients and bool((ids[1:] > ids[:-1]).all())):
        raise ValueError(
            f"Expected distinct ascending ids of the population's {clients} clients, but got {ids.tolist()}"
        )


class PurposeKeys(NamedTuple):
    """A round's keys by purpose; see `RoundKeys`."""

    cohort: Tensor
    client: Tensor
    server: Tensor
    faults: Tensor


class RoundKeys:
    """Maker of a round's keys from the seed and the number of rounds before it."""

    def __init__(self, seed: int) -> None:
        self._seed, self._first = seed, 0
        self._made: list[PurposeKeys] = []

    def __call__(self, number: int) -> PurposeKeys:
        if not 0 <= number - self._first < len(self._made):
            self._first = number
            rounds = random.fold_in(random.key(self._seed), torch.arange(number, number + _KEYS_AHEAD))
            keys = random.fold_in(rounds[:, None], torch.arange(len(PurposeKeys._fields)))
            self._made = [PurposeKeys(*each.unbind()) for each in keys.unbind()]
        return self._made[number - self._first]
