"""The two halves of a hierarchical model's Gibbs sampler, as values of pure functions.

A hierarchical model has variables of its own for each client, which depend on the others only through global variables
that are sampled from sums over the clients. A `LocalKernel` leaves p(client's variables | global variables, its data)
invariant, a `GlobalKernel` p(global variables | sums over the clients). `fedtorch.federation.algorithms.gibbs` runs any
pair of them over a federation; stacked in one process they are an ordinary sampler.

Several chains are a batch dimension after the clients: a client's variables are `(K, C, ...)`, global ones `(C, ...)`,
and keys `(K, C)` and `(C,)`, so that a chain's draws do not depend on the chains beside it. All numbers are float64.

A user-defined sampler, of levels y_ki ~ N(θ_k, 1) around a mean, θ_k ~ N(θ, 1), under a flat prior of θ:

>>> import torch, fedtorch as ft
>>> from fedtorch import exact
>>> from fedtorch.models.gibbs.kernels import GlobalKernel, LocalKernel
>>> normal = lambda keys: ft.random.normal(keys, (), torch.float64)
>>> def sweep(heard, level, data, keys, sweeps):  # θ_k ~ N((θ + Σ y) / (1 + n), 1 / (1 + n))
...     precision = 1 + data.count[:, None]
...     return (heard + data.batch.sum(1)[:, None]) / precision + normal(keys) / precision**0.5
>>> def update(theta, sums, keys):  # θ ~ N(Σ θ_k / M, 1 / M)
...     total, clients = exact.values(sums["levels"], sums["clients"])
...     return total / clients + normal(keys) / clients**0.5
>>> report = lambda level: {"levels": (level,), "clients": (torch.ones_like(level),)}
>>> local = LocalKernel(lambda start: start[:, 0], lambda data: data, sweep, report)
>>> shared = GlobalKernel(lambda start: start[:, 0], lambda theta: theta, update)
>>> data = ft.data.from_tensors([torch.full((99,), level).double() for level in (1.0, 2.0, 6.0)])
>>> algorithm = ft.gibbs(local, shared, sweeps=1, chains=1000)
>>> run = ft.run(algorithm, ft.InProcess(data), torch.zeros(1), rounds=3)
>>> theta = run.server.variables  # (1000,)
>>> round(float(theta.mean()), 1), round(float(theta.std()), 1)  # the mean of all levels, √((1 + 1/99) / 3)
(3.0, 0.6)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedtorch.models.hierarchical.families import Family
from fedtorch.tree import Tree

Sums = dict[str, tuple[Tensor, ...]]


class Newcomer(NamedTuple):
    """Normal densities of the coefficients of a client without rows, one for each draw of the global variables."""

    mean: Tensor  # (S, d)
    variance: Tensor  # (S, d)
    noise: Tensor  # (S,) variance of a response, NaN of families without one


@dataclass(frozen=True)
class LocalKernel:
    """A client's half.

    Attributes:
        init: start of the global parameter, `(C, p)` -> one client's variables `(C, ...)`.
        prepare: data -> data, once per block: checks, Gram matrices.
        sweep: (global variables received `(K, C, ...)`, variables `(K, C, ...)`, data, keys `(K, C)`, sweeps) ->
            variables after this many sweeps.
        report: variables -> terms of the sums over the clients, by name: float64 numbers `(K, C, ...)` below 2¹⁴⁸;
            several numbers under one name are one number without rounding (see `fedtorch.exact.products`).
        family: of a response given its predictor, intercept + x'theta of the variables, for predictions; None if the
            variables do not define it.
        newcomer: (draws of the global variables by name `(S, ...)`, a key) -> coefficients of a client without rows,
            its intercept first; None if undefined.
    """

    init: Callable[[Tensor], Tree]
    prepare: Callable[[Any], Any]
    sweep: Callable[[Tree, Tree, Any, Tensor, int], Tree]
    report: Callable[[Tree], Sums]
    family: Family | None = None
    newcomer: Callable[[dict[str, Tensor], Tensor], Newcomer] | None = None


@dataclass(frozen=True)
class GlobalKernel:
    """The server's half.

    Attributes:
        init: start of the global parameter, `(C, p)` -> global variables `(C, ...)`.
        send: global variables -> those that the clients need, `(C, ...)`.
        update: (global variables, sums over the clients by name in the limbs of `fedtorch.exact`, keys `(C,)`) ->
            global variables.
    """

    init: Callable[[Tensor], Tree]
    send: Callable[[Tree], Tree]
    update: Callable[[Tree, dict[str, Tensor], Tensor], Tree]


def check_start(coefficients: int, expected: int) -> None:
    """Refuse a run whose start has another number of coefficients than its clients' rows.

    Raises:
        ValueError: the kernel has a fixed start of its own.

    >>> check_start(2, expected=3)
    Traceback (most recent call last):
    ValueError: Expected a start of 3 coefficients for these rows, but got 2; pass torch.zeros(3)
    """
    if coefficients != expected:
        raise ValueError(
            f"Expected a start of {expected} coefficients for these rows, but got {coefficients}; pass torch.zeros("
            f"{expected})"
        )
