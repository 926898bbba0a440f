"""Spending of a budget: the ledger is written before a round, and noise is drawn once for it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.federation.budget import Budget, Need
from fedtorch.federation.runs.cohorts import Cohort
from fedtorch.random.entropy import Entropy, Purpose
from fedtorch.trust.privacy.accounting.accountant import Release
from fedtorch.trust.privacy.accounting.ledger import NO_GUARANTEE, SYSTEM, Claim, Ledger
from fedtorch.trust.privacy.noise import Uniforms

_GRID = 20  # noised numbers are rounded to this many bits below the noise
_NONE = bytes(16)


class Spending:
    """Keep the budget of an algorithm, see `fedtorch.federation.budget.Budget`, and draw its noise.

    Args:
        ledger: where rounds are written down.
        release: what is released in a round.
        count: how often in each round.
        entropy: where noise and cohorts come from.
        check: (the run's cohort, number of clients) -> None; raises where the claim would not hold.
        sampling_rate: with which clients are asked, each independently and in secret.
        size: of a cohort drawn uniformly, instead of a rate; None leaves the cohort to the run.
        quorum: of how many clients the noise is counted together; 1 for each one's own, None for a server's.
        need: how messages have to be carried for the claim to hold.

    Attributes:
        expected: how many clients a round asks on average; known when a run has been made.
    """

    def __init__(
        self,
        ledger: Ledger,
        release: Release,
        count: int,
        entropy: Entropy,
        check: Callable[[Any, int], None],
        sampling_rate: float = 1.0,
        size: int | None = None,
        quorum: int | None = 1,
        need: Need | None = None,
    ) -> None:
        self.quorum, self.need = quorum, need
        self.ledger, self.release, self.count, self.entropy = ledger, release, count, entropy
        self._check, self._rate, self._size, self.expected = check, sampling_rate, size, 0.0
        self._clients = 0
        self._purpose: Purpose | None = None
        self._turns: Tensor | None = None  # what the open round's clients draw with
        self._begun = torch.zeros(0, dtype=torch.int64)
        self._drawn: set[tuple[str, bytes]] = set()

    @property
    def claim(self) -> Claim:
        """Return what is protected, and from whom."""
        return self.ledger.claim

    @property
    def lasting(self) -> bool:
        """Return whether noise that nobody can compute is counted in a file; see `Budget.lasting`."""
        return self.ledger.path is not None and self.claim.entropy == SYSTEM

    def cohort(self, cohort: Any, clients: int) -> Any:
        """Return clients drawn in secret, or so many of them, or what the run says; see `Budget.cohort`."""
        self._check(cohort, clients)
        self._clients = clients
        self.expected = self._rate * clients if self._size is None else float(self._size)
        if self._rate < 1:
            return secret_cohort(self, self._rate, clients)
        return cohort if self._size is None else self._size

    def allows(self) -> bool:
        """Return whether the ledger's budget has room for another round."""
        return self.ledger.allows(self.release, self.count)

    def spend(self, round: int, asked: Tensor | None, keys: Tensor) -> None:
        """Write a round down; from here on its noise can be drawn, once; see `Budget.spend`."""
        self._purpose = None
        self.ledger.spend(round, self.release, self.count)
        ids = torch.arange(self._clients) if asked is None else asked
        roster = hashlib.sha256(ids.numpy().tobytes()).digest()
        self._purpose, self._drawn = self.purpose(round, "", roster), set()
        self._turns, self._begun = keys.cpu(), torch.zeros(0, dtype=torch.int64)

    def begin(self, keys: Tensor, purpose: int | None = None) -> None:
        """Note that the clients with these keys `(K,)` begin their work of the open round, which each may do once.

        Args:
            keys: `(K,)` what the run has given them.
            purpose: what they have folded into it since.

        Raises:
            RuntimeError: the keys are not those that the run has given its clients, or some have begun before.
        """
        if not len(keys):
            return
        keys, theirs = keys.cpu(), self._turns
        if theirs is not None and purpose is not None:
            theirs = random.fold_in(theirs, purpose)
        if theirs is None or not bool(torch.isin(keys, theirs).all()) or bool(torch.isin(keys, self._begun).any()):
            raise RuntimeError(
                "Expected every client to train once a round, as the run has asked it to, but some train again or with "
                "a key of their own: steps would go uncounted. Use an algorithm that solves once a round, such as "
                "ft.fedavg, and not ft.ditto"
            )
        self._begun = torch.cat([self._begun, keys])

    def planned(self, rounds: int) -> Counter[Release]:
        """Return the releases of so many rounds."""
        return Counter({self.release: self.count * rounds})

    def join(self, others: Sequence[Budget], rounds: int) -> None:
        """Have others spend from this one's ledger, under the smallest of their budgets; see `Budget.join`."""
        mine, releases = self.ledger, self.planned(rounds)
        for other in others:
            assert isinstance(other, Spending)
            theirs = other.ledger
            if (theirs.claim, theirs.delta, theirs.path) != (mine.claim, mine.delta, mine.path):
                raise ValueError(
                    "Expected settings whose epsilons add up in one ledger, of one claim, delta and file, but got "
                    f"{(mine.claim, mine.delta, mine.path)} and {(theirs.claim, theirs.delta, theirs.path)}; search "
                    "over those of each claim by themselves, and add their epsilons and deltas"
                )
            mine.budget = min((each for each in (mine.budget, theirs.budget) if each is not None), default=None)
            other.ledger = mine
            releases += other.planned(rounds)
        if mine.budget is not None and (cost := mine.with_all(releases)) > mine.budget:
            raise ValueError(
                f"Expected a search within its budget of {mine.budget}, but all rounds of its {len(others) + 1} "
                f"settings cost epsilon {cost:.4g} together; try fewer settings or rounds, add noise, or raise budget="
            )

    def report(self) -> dict[str, float]:
        """Return `epsilon` and `delta` of all that the ledger knows."""
        return {"epsilon": self.ledger.epsilon, "delta": self.ledger.delta}

    def record(self, round: Any) -> None:
        """Do nothing: the ledger has been written before the round."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return which ledger, how many of its rounds have begun, and the digest of the last."""
        identity = torch.tensor(list(self.ledger.identity), dtype=torch.uint8)
        last = torch.tensor(list(bytes.fromhex(self.ledger.last)), dtype=torch.uint8)
        return {"ledger": identity, "entries": torch.tensor(self.ledger.entries), "last": last}

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Refuse a checkpoint of another ledger, or of one that has lost rounds."""
        if "ledger" not in flat:
            raise ValueError("Expected a checkpoint of a run with a ledger, but got one of a run without")
        identity = bytes(flat["ledger"].tolist())
        last = bytes(flat["last"].tolist()).hex() if "last" in flat else ""
        self.ledger.expect(identity, int(flat["entries"]), self.release, self.count, last)

    def purpose(self, round: int, phase: str, roster: bytes) -> Purpose:
        """Return the purpose of random numbers in the open attempt."""
        run = self.ledger.identity if self.claim.entropy != NO_GUARANTEE else _NONE
        return Purpose(run, round, self.ledger.entries, phase, roster)

    def open(self, phase: str, roster: bytes = b"") -> Purpose:
        """Return the purpose of random numbers in the open round, once for each phase and roster.

        Raises:
            RuntimeError: no round is open, or its numbers have been drawn.
        """
        if self._purpose is None or (phase, roster) in self._drawn:
            raise RuntimeError(
                f"Expected the {phase} of a round to be drawn once, after a run has written the round into the ledger, "
                "but it is drawn outside a run or again; go round by round with ft.Run"
            )
        self._drawn.add((phase, roster))
        return self._purpose._replace(phase=phase, roster=self._purpose.roster + roster)

    def noise(self, phase: str, scales: Tensor) -> Tensor:
        """Noise `(D,)` of the open round with the given scales, float64."""
        uniforms = partial(self.entropy.uniforms, self.open(phase))
        return self.release.mechanism.draw(uniforms, len(scales)).mul_(scales)

    def of_each(
        self, phase: str, keys: Tensor, count: int, draw: Callable[[Uniforms, int], Tensor] | None = None
    ) -> Tensor:
        """Draw for the clients with these keys `(K,)`, each by itself, so that no company changes what one draws.

        Args:
            phase: of the open round.
            keys: what the clients draw with.
            count: D, of each client's numbers.
            draw: (a source of uniform numbers, D) -> `(D,)`; default: noise of unit scale.

        Returns:
            `(K, D)` float64.
        """
        drawn, draw = torch.zeros(len(keys), count, dtype=torch.float64), draw or self.release.mechanism.draw
        for row, key in zip(drawn, keys.tolist()):
            client = key.to_bytes(8, "big", signed=True)
            purpose = self.open(phase, client)._replace(roster=client)  # and not of the round's other clients
            row.copy_(draw(partial(self.entropy.uniforms, purpose), count))
        return drawn

    def noised(self, phase: str, keys: Tensor, numbers: Tensor, scale: float) -> Tensor:
        """Add noise of this scale to numbers `(K, D)` float64 of the clients with these keys `(K,)`, each its own."""
        if not len(keys):
            return numbers
        size = torch.tensor(scale).double()
        return on_grid(numbers + self.of_each(phase, keys, numbers.shape[1]) * size, size)

    def __repr__(self) -> str:
        return f"Spending({self.release}, epsilon={self.ledger.epsilon:.4g} at {self.ledger.delta}, {self.entropy})"


def secret_cohort(spending: Spending, sampling_rate: float, clients: int) -> Cohort:
    """Draw each client independently with this probability from the entropy of `spending`, whatever the seed."""

    def draw(key: Tensor, round: int) -> Tensor:
        purpose = spending.purpose(int(key), "cohort", b"")
        return (spending.entropy.uniforms(purpose, clients) < sampling_rate).nonzero()[:, 0]

    return draw


def one_process(cohort: Any, clients: int) -> None:
    """Raise ValueError in one of several ranks."""
    ranks = torch.distributed
    if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
        raise ValueError("Expected a single process, but got several ranks: each would draw noise and write of its own")


def check_delta_of(delta: float, units: str, cohort: Any, count: int) -> None:
    """Raise ValueError where δ lets one of so many units be published, or there are several ranks."""
    if not delta < 1 / count:
        raise ValueError(
            f"Expected delta below one over the {count} {units}, but got {delta}: publishing one of them whole would "
            "count as private"
        )
    one_process(cohort, count)


def on_grid(noised: Tensor, scales: Tensor) -> Tensor:
    """Round noised numbers to a power of two, some 2⁻²⁰ of their noise.

    The low bits of a sum with floating-point noise tell which value the noise was added to (Mironov 2012, "On
    significance of the least significant bits for differential privacy"); these are rounded away.
    """
    grid = torch.exp2(scales.log2().floor() - _GRID)
    return (noised / grid).round() * grid
