"""Faults between server and clients, as values: drop-outs, stragglers, partial work, lost and duplicated messages.

A fault decides from the clients' keys and ids which clients it affects. A client's key depends on its name, so its
draws are independent of the cohort, the population and the order of clients and blocks. A silent client is rolled back:
its state is the one before the round. Faults are joined with `|`, and a client affected by several counts once, for the
first in the order before, late, after.

>>> import torch, fedtorch as ft
>>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=8, seed=0)
>>> slow = ft.stragglers(deadline=1.0, seconds=0.02 * data.counts)
>>> local = ft.least_squares(torch.nn.Linear(10, 1))
>>> round = ft.Run(ft.fedavg(local), ft.InProcess(data), faults=ft.dropouts(0.2) | slow).step()
>>> len(round.asked) == len(round.ids) + len(round.lost_before) + len(round.late) + len(round.lost_after)
True
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.federation.algorithm import Algorithm

Hit = Callable[[Tensor, Tensor], Tensor]  # (keys (M,), ids (M,)) -> (M,) bool
Share = Callable[[Tensor, Tensor], Tensor]  # (keys (M,), ids (M,)) -> (M,) in (0, 1]
Noise = Callable[[Tensor], Tensor]  # keys (M,) -> (M,) positive factors of mean one


@dataclass(frozen=True, repr=False)
class Faults:
    """The clients that faults hit in a round; functions of (keys, ids), `(M,)` each, to `(M,)` bool, `work` to numbers.

    Keys are the clients' own in this round, to draw with: `ft.random.bernoulli(keys, 0.3)`.

    Attributes:
        before: clients that do not receive the broadcast, and do nothing.
        after: the client's message is lost after its work, which is rolled back.
        late: clients whose message comes after the deadline, and whose work is rolled back.
        twice: the client's message is delivered a second time; messages then arrive in any order.
        work: share of the round's work that a client does before it answers, in (0, 1].

    Example:
        >>> import torch, fedtorch as ft
        >>> nights = ft.Faults(before=lambda keys, ids: ids % 2 == 0)  # who has an even number is away
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=4, seed=0)
        >>> ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data), faults=nights).step().ids
        tensor([1, 3])
        >>> nights
        Faults(before)
    """

    before: Hit | None = None
    after: Hit | None = None
    late: Hit | None = None
    twice: Hit | None = None
    work: Share | None = None

    def __repr__(self) -> str:
        kinds = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        return f"Faults({', '.join(kinds)})"

    def __or__(self, other: Faults) -> Faults:
        """Return both, independently of each other; of two shares of work the smaller counts."""
        hits = {name: _joined(getattr(self, name), getattr(other, name), torch.logical_or) for name in _HITS}
        return Faults(**hits, work=_joined(self.work, other.work, torch.minimum))


_HITS = ("before", "after", "late", "twice")
_NOBODY = torch.zeros(0, dtype=torch.int64)


class Fates(NamedTuple):
    """The faults that hit the clients of a round; ids, ascending and disjoint."""

    hear: Tensor | None  # the clients that work, None for all
    silent: Tensor | None = None  # those of the cohort that do not answer
    before: Tensor = _NOBODY  # hit before their work
    late: Tensor = _NOBODY
    after: Tensor = _NOBODY

    def besides(self, away: Tensor, late: Tensor) -> Fates:
        """Return the same fates, with other clients that were away or late."""
        before, later = torch.cat([self.before, away]).sort().values, torch.cat([self.late, late]).sort().values
        return self._replace(before=before, late=later)


def dropouts(probability: float) -> Faults:
    """Build dropouts: each client, with this probability, neither receives the broadcast nor answers in a round.

    Example:
        >>> import torch, fedtorch as ft
        >>> clients = torch.arange(1000)
        >>> keys = ft.random.fold_in(ft.random.key(0), clients)
        >>> int(ft.dropouts(0.3).before(keys, clients).sum())
        297
    """
    return lost_messages(before=probability)


def lost_messages(before: float = 0.0, after: float = 0.0) -> Faults:
    """Build losses of messages, each with its own probability.

    Args:
        before: probability of losing the server's message to a client, which then does nothing.
        after: probability of losing a client's message to the server; the client's work is rolled back.

    Example:
        >>> import torch, fedtorch as ft
        >>> faults = ft.lost_messages(after=1.0)  # every client works in vain
        >>> clients = torch.arange(5)
        >>> faults.before is None, bool(faults.after(ft.random.fold_in(ft.random.key(0), clients), clients).all())
        (True, True)
    """
    return Faults(_coin(before), _coin(after))


def duplicated(probability: float = 0.5) -> Faults:
    """Messages that arrive out of order, and each with this probability a second time, in its round or a later one.

    `Round.repeated` names the clients whose message came twice. Bytes are counted without repetitions.

    Raises:
        ValueError: a probability outside [0, 1].

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=8, seed=0)
        >>> algorithm = ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1)))
        >>> run = ft.Run(algorithm, ft.InProcess(data), faults=ft.duplicated(1.0))
        >>> run.step().repeated
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
        >>> run.step().number, run.network.receiver.refused  # of 16 that came again; the others are still on their way
        (2, 12)
    """
    _check_probability(probability)
    return Faults(twice=lambda keys, ids: random.bernoulli(keys, probability))


def exponential_noise(keys: Tensor) -> Tensor:
    """Return exponential factors of mean one.

    Example:
        >>> import torch, fedtorch as ft
        >>> keys = ft.random.fold_in(ft.random.key(0), torch.arange(3))
        >>> exponential_noise(keys).shape
        torch.Size([3])
    """
    return random.exponential(keys, (), torch.float64)


def lognormal_noise(sigma: float) -> Noise:
    """Return log-normal factors of mean one, exp(σz − σ²/2).

    Raises:
        ValueError: a negative σ.

    Example:
        >>> import torch, fedtorch as ft
        >>> keys = ft.random.fold_in(ft.random.key(0), torch.arange(3))
        >>> lognormal_noise(0.0)(keys)  # without spread all take their mean
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    if not (sigma >= 0 and math.isfinite(sigma)):
        raise ValueError(f"Expected sigma of at least 0, but got {sigma}")
    return lambda keys: (sigma * random.normal(keys, (), torch.float64) - sigma**2 / 2).exp()


def stragglers(deadline: float, seconds: Tensor, noise: Noise = exponential_noise) -> Faults:
    """Build stragglers: clients that answer after the deadline, whose work is rolled back.

    Args:
        deadline: in seconds from the start of the round, positive.
        seconds: `(K,)` every client's mean duration, such as `0.01 * data.counts / speed`.
        noise: random factor of the times in each round: `exponential_noise`, `lognormal_noise(sigma)`, or a function of
            stacked keys.

    Raises:
        ValueError: a deadline or durations that are not positive.

    Example:
        >>> import torch, fedtorch as ft
        >>> slow = ft.stragglers(deadline=2.0, seconds=torch.tensor([1.0, 5.0]), noise=lognormal_noise(0.0))
        >>> clients = torch.arange(2)
        >>> slow.late(ft.random.fold_in(ft.random.key(0), clients), clients)
        tensor([False,  True])
    """
    if not deadline > 0:
        raise ValueError(f"Expected a positive deadline in seconds, but got {deadline}")
    mean = torch.as_tensor(seconds, dtype=torch.float64, device="cpu")
    if mean.ndim != 1 or not bool(((mean > 0) & mean.isfinite()).all()):
        raise ValueError(f"Expected positive finite seconds (K,), but got {mean.tolist()}")
    return Faults(late=lambda keys, ids: mean[ids] * noise(keys) > deadline)


def partial_work(probability: float, *, shares: Tensor | None = None) -> Faults:
    """Build partial work: clients answer with a part of the round's work, like devices out of time (FedProx).

    Each client, with this probability, does a share of the round's epochs drawn uniformly from (0, 1] and rounded up to
    whole ones: of 20 epochs 1 to 20, with equal probabilities. A local solver with `steps=` counts in steps. The
    client's answer is its result so far, in any algorithm whose local solver takes steps.

    Args:
        probability: of partial work, for each client in every round.
        shares: `(K,)` in (0, 1], fixed shares of the clients, in place of drawn ones.

    Source: Li et al. (2020), "Federated optimization in heterogeneous networks", section 5.2.

    Raises:
        ValueError: a probability outside [0, 1], or shares outside (0, 1].

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=3, seed=0)
        >>> local = ft.gradient_descent(
        ...     ft.LinearHead(10), epochs=20, loss=torch.nn.functional.mse_loss,
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        >>> slow = ft.partial_work(0.5)
        >>> run = ft.run(ft.fedprox(local, mu=1.0), ft.InProcess(data), rounds=3, faults=slow)
        >>> clients = torch.arange(6)
        >>> keys = ft.random.fold_in(ft.random.key(0), clients)
        >>> (20 * slow.work(keys, clients)).ceil()  # epochs of six clients in a round
        tensor([ 7., 20., 20., 15., 17.,  9.], dtype=torch.float64)
    """
    _check_probability(probability)
    known = None if shares is None else torch.as_tensor(shares, dtype=torch.float64, device="cpu")
    if known is not None and (known.ndim != 1 or not bool(((known > 0) & (known <= 1)).all())):
        raise ValueError(f"Expected shares (K,) above 0 and at most 1, but got {known.tolist()}")

    def work(keys: Tensor, ids: Tensor) -> Tensor:
        some = random.bernoulli(random.fold_in(keys, 0), probability)
        part = 1 - random.uniform(random.fold_in(keys, 1), (), torch.float64) if known is None else known[ids]
        return torch.where(some, part, 1.0)

    return Faults(work=work)


def check_work(faults: Faults, algorithm: Algorithm) -> None:
    """Raise ValueError if clients do a share of their work in an algorithm whose work has no parts."""
    if faults.work is not None and (algorithm.schedule is None or not algorithm.schedule.takes_share):
        names = [algorithm.settings[each] for each in ("algorithm", "local.solver") if each in algorithm.settings]
        raise ValueError(
            "Expected a local solver that takes steps, such as ft.gradient_descent, for partial work of clients, but "
            f"got {' of '.join(names) or 'another algorithm'}; leave ft.partial_work out"
        )


def shares_of_work(
    faults: Faults, key: Tensor, hear: Tensor | None, names: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """Return ids -> the share of the round's work of these clients, of faults that have any.

    Args:
        faults: the run's faults.
        key: random key of the round's faults.
        hear: the clients that work in the round, ascending, None for all; they are drawn together.
        names: `(K,)` the numbers of the population's names.
    """
    if faults.work is None:
        return None
    ids = torch.arange(len(names)) if hear is None else hear
    share = faults.work(random.fold_in(random.fold_in(key, 3), names[ids]), ids).to(torch.float64)
    if share.shape != ids.shape or not bool(((share > 0) & (share <= 1)).all()):
        raise ValueError(
            f"Expected a share of work above 0 and at most 1 of {len(ids)} clients, but got {share.tolist()}"
        )
    return lambda asked: share[torch.searchsorted(ids, asked)]


def fates(faults: Faults, key: Tensor, asked: Tensor | None, names: Tensor) -> Fates:
    """Draw the faults of a round for the clients `asked`, None for all, by the numbers of all names `(K,)`."""
    ids = torch.arange(len(names)) if asked is None else asked

    def split(hit: Hit | None, purpose: int, among: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hit, the others)."""
        if hit is None or len(among) == 0:
            return among[:0], among
        chosen = hit(random.fold_in(random.fold_in(key, purpose), names[among]), among)
        return among[chosen], among[~chosen]

    before, hear = split(faults.before, 0, ids)
    late, timely = split(faults.late, 2, hear)
    after, _ = split(faults.after, 1, timely)
    silent = torch.cat([late, after]).sort().values
    return Fates(hear, silent if len(silent) else None, before, late, after)


def _check_probability(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise ValueError(f"Expected a probability between 0 and 1, but got {probability}")


def _coin(probability: float) -> Hit | None:
    _check_probability(probability)
    if probability == 0:
        return None
    return lambda keys, ids: random.bernoulli(keys, probability)


def _joined(first: Hit | None, second: Hit | None, join: Callable[[Tensor, Tensor], Tensor]) -> Hit | None:
    if first is None or second is None:
        return first or second
    return lambda keys, ids: join(first(random.fold_in(keys, 0), ids), second(random.fold_in(keys, 1), ids))
