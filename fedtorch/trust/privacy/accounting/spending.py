"""Privacy budgets in a run: the ledger is written before each round, and each round's noise is drawn once."""

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

_GRID = 20  # bits of resolution below the noise's scale
_NONE = bytes(16)


class Spending:
    """The privacy budget of an algorithm (a `fedtorch.federation.budget.Budget`), and the source of its noise.

    Args:
        ledger: records the rounds.
        release: the mechanism applied in a round.
        count: releases per round.
        entropy: source of noise and cohorts.
        check: (the run's cohort, number of clients) -> None; raises if the claim would not hold.
        sampling_rate: probability with which each client is asked, independently and in secret.
        size: number of clients in a uniformly drawn cohort, instead of a rate; None leaves the cohort to the run.
        quorum: number of clients whose noise adds up to the claim; 1 if each client's own suffices, None for a
            server's.
        need: how messages must be transported for the claim to hold.

    Attributes:
        expected: mean number of clients asked in a round; set when a run is built.
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
        self._turns: Tensor | None = None  # keys of the open round's clients
        self._begun = torch.zeros(0, dtype=torch.int64)
        self._drawn: set[tuple[str, bytes]] = set()

    @property
    def claim(self) -> Claim:
        """Return the claim: who is protected, and from whom."""
        return self.ledger.claim

    @property
    def lasting(self) -> bool:
        """Return whether unpredictable noise is counted in a file; see `Budget.lasting`."""
        return self.ledger.path is not None and self.claim.entropy == SYSTEM

    def cohort(self, cohort: Any, clients: int) -> Any:
        """Return the cohort to use: secretly sampled, of fixed size, or the run's; see `Budget.cohort`."""
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
        """Record a round in the ledger, which allows its noise to be drawn, once; see `Budget.spend`."""
        self._purpose = None
        self.ledger.spend(round, self.release, self.count)
        ids = torch.arange(self._clients) if asked is None else asked
        roster = hashlib.sha256(ids.numpy().tobytes()).digest()
        self._purpose, self._drawn = self.purpose(round, "", roster), set()
        self._turns, self._begun = keys.cpu(), torch.zeros(0, dtype=torch.int64)

    def begin(self, keys: Tensor, purpose: int | None = None) -> None:
        """Register that clients with keys `(K,)` start their work of the open round; each may do so once.

        Args:
            keys: `(K,)` given by the run.
            purpose: number folded into the keys since.

        Raises:
            RuntimeError: unknown keys, or clients that have started before.
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
        """Count the releases of a number of rounds."""
        return Counter({self.release: self.count * rounds})

    def join(self, others: Sequence[Budget], rounds: int) -> None:
        """Let other budgets spend from this ledger, under the smallest budget of all; see `Budget.join`."""
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
        """Return `epsilon` and `delta` of all recorded releases."""
        return {"epsilon": self.ledger.epsilon, "delta": self.ledger.delta}

    def record(self, round: Any) -> None:
        """Do nothing: the ledger has been written before the round."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the ledger's identity, its number of started rounds, and the digest of the last entry."""
        identity = torch.tensor(list(self.ledger.identity), dtype=torch.uint8)
        last = torch.tensor(list(bytes.fromhex(self.ledger.last)), dtype=torch.uint8)
        return {"ledger": identity, "entries": torch.tensor(self.ledger.entries), "last": last}

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Refuse a checkpoint of another ledger, or a ledger that lacks rounds of the checkpoint."""
        if "ledger" not in flat:
            raise ValueError("Expected a checkpoint of a run with a ledger, but got one of a run without")
        identity = bytes(flat["ledger"].tolist())
        last = bytes(flat["last"].tolist()).hex() if "last" in flat else ""
        self.ledger.expect(identity, int(flat["entries"]), self.release, self.count, last)

    def purpose(self, round: int, phase: str, roster: bytes) -> Purpose:
        """Return the purpose of random numbers in the current attempt."""
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
        """Draw numbers for clients with keys `(K,)` one by one, so that a client's draw does not depend on the others.

        Args:
            phase: phase of the open round.
            keys: the clients' keys.
            count: D, numbers per client.
            draw: (source of uniform numbers, D) -> `(D,)`; default: noise of unit scale.

        Returns:
            `(K, D)` float64.
        """
        drawn, draw = torch.zeros(len(keys), count, dtype=torch.float64), draw or self.release.mechanism.draw
        for row, key in zip(drawn, keys.tolist()):
            client = key.to_bytes(8, "big", signed=True)
            purpose = self.open(phase, client)._replace(roster=client)  # independent of the round's other clients
            row.copy_(draw(partial(self.entropy.uniforms, purpose), count))
        return drawn

    def noised(self, phase: str, keys: Tensor, numbers: Tensor, scale: float) -> Tensor:
        """Add independent noise of this scale to numbers `(K, D)` float64 of clients with keys `(K,)`."""
        if not len(keys):
            return numbers
        size = torch.tensor(scale).double()
        return on_grid(numbers + self.of_each(phase, keys, numbers.shape[1]) * size, size)

    def __repr__(self) -> str:
        return f"Spending({self.release}, epsilon={self.ledger.epsilon:.4g} at {self.ledger.delta}, {self.entropy})"


def secret_cohort(spending: Spending, sampling_rate: float, clients: int) -> Cohort:
    """Build a cohort that includes each client independently, drawn from the entropy of `spending`, not the seed."""

    def draw(key: Tensor, round: int) -> Tensor:
        purpose = spending.purpose(int(key), "cohort", b"")
        return (spending.entropy.uniforms(purpose, clients) < sampling_rate).nonzero()[:, 0]

    return draw


def one_process(cohort: Any, clients: int) -> None:
    """Raise ValueError if there are several ranks."""
    ranks = torch.distributed
    if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
        raise ValueError("Expected a single process, but got several ranks: each would draw noise and write of its own")


def check_delta_of(delta: float, units: str, cohort: Any, count: int) -> None:
    """Raise ValueError if δ ≥ 1/count, which lets a unit be published whole, or if there are several ranks."""
    if not delta < 1 / count:
        raise ValueError(
            f"Expected delta below one over the {count} {units}, but got {delta}: publishing one of them whole would "
            "count as private"
        )
    one_process(cohort, count)


def on_grid(noised: Tensor, scales: Tensor) -> Tensor:
    """Round noised numbers to a power of two, about 2⁻²⁰ of their noise.

    The low bits of a floating-point sum reveal the value before noise was added (Mironov 2012, "On significance of the
    least significant bits for differential privacy"), so they are rounded away.
    """
    grid = torch.exp2(scales.log2().floor() - _GRID)
    return (noised / grid).round() * grid
