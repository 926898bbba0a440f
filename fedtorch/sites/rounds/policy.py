"""A site's policy, and its enforcement for every request, with counters that survive restarts."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import _files as files, tree
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.budget import Budget
from fedtorch.federation.exchanges.carry import Carry, plain
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
_SECONDS = 30.0  # longest wait for another process of the site that updates a counter
_LARGEST = {torch.float64: 1e100, torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 65504.0}


AFTER_FIT = {
    "effects": "the posterior of each of its clients' coefficients",
    "densities": "sums over its rows of log densities",
    "margins": "sums over its rows of changes of the mean response",
    "checks": "sums over its rows of responses, observed and drawn anew",
}
COMPOSED = "only for a server that is trusted not to compose questions, which read single rows out of exact answers"

OTHER_ROWS = "the site's rows are others than those with which the run began there"


class Refusal(ValueError):
    """Raised for a request that a site refuses; its message is sent to the server."""


class Policy(NamedTuple):
    """Limits on a site's answers. Every round that is asked of it counts, even if it refuses.

    With a minimum above one, clients draw minibatches and all else with the site's own keys, which a server cannot
    compute. So a run that draws differs from one in a single process, and is reproducible only with the site's folder.

    Attributes:
        rounds: most answers over all runs: rounds, scores and post-fit queries; None for no limit.
        epsilon: largest total of one ledger, for noise that is added at the site.
        honest: number of clients of a masked sum, its own included, on whose joint noise the site relies.
        remember_sums: whether sums and agreements are recorded in the folder of states; else only in this process.
        carry: required transport of messages, one for all algorithms or by name; the server must ask for the same.
        minimum: least number of rows behind any number that leaves: of a frame, in a round, of scores, or after a fit.
        columns: columns that formulas may read, None for all; the columns of clients and persons are never read.
        designs: most designs, over all runs, by which rows of a frame are made.
        after_fit: allowed post-fit queries: "effects", "densities", "margins", "checks". Name any only for a server
            that is trusted not to compose questions, which read single rows out of exact answers.
        refusals: most failures that depend on rows, over all runs; after these the site answers nothing, and random
            numbers under masks.
        person: a column of the frame, whose distinct values count for `minimum` in place of rows.

    Example:
        >>> from fedtorch.sites import Policy
        >>> policy = Policy(minimum=20, rounds=500, columns=("age", "sbp", "death"))
        >>> policy.counted
        'rows'
    """

    rounds: int | None = None
    epsilon: float | None = None
    honest: int = 1
    remember_sums: bool = True
    carry: Carry | Mapping[str, Carry] = plain()
    minimum: int = 10
    columns: tuple[str, ...] | None = None
    designs: int = 100
    after_fit: tuple[str, ...] = ()
    refusals: int = 10
    person: str | None = None

    def described(self) -> dict[str, Any]:
        """Return the limits as JSON, for records."""
        carry = self.carry
        named = {name: str(each) for name, each in carry.items()} if isinstance(carry, Mapping) else str(carry)
        return {**self._asdict(), "carry": named, "after_fit": list(self.after_fit)}

    def carry_of(self, algorithm: str) -> Carry:
        """Return the required transport for an algorithm, by name."""
        return self.carry[algorithm] if isinstance(self.carry, Mapping) else self.carry

    @property
    def counted(self) -> str:
        """Return what `minimum` counts, in words."""
        return "rows" if self.person is None else "persons"

    def check(self) -> None:
        """Raise ValueError unless all limits are in range."""
        if self.minimum < 1 or min(self.designs, self.refusals) < 0 or isinstance(self.columns, str):
            raise ValueError(
                f"Expected a minimum of at least 1 row, columns as a tuple, and no negative number of designs or "
                f"refusals, but got {self}"
            )
        if self.person is not None and not isinstance(self.person, str):
            raise ValueError(f"Expected person= as a column of the site's frame, but got {self.person!r}")
        if self.honest < 1 or (self.rounds or 0) < 0:
            raise ValueError(
                f"Expected at least 1 honest client, its own, and no negative number of rounds, but got {self}"
            )
        if isinstance(self.after_fit, str) or not set(self.after_fit) <= AFTER_FIT.keys():
            raise ValueError(f"Expected after_fit= as a tuple of {sorted(AFTER_FIT)}, but got {self.after_fit!r}")
        if self.after_fit and self.epsilon is not None:
            raise ValueError(
                f"Expected either epsilon= or after_fit=, because answers after a fit have no noise, but got "
                f"{self.epsilon} and {self.after_fit}"
            )
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"Expected a positive epsilon, but got {self.epsilon}")


class _Count:
    """A counter with a file in each of some folders, of which the largest value counts; in memory without folders.

    Args:
        file: name of the files; without ".json", also the name of the count in them.
        folders: folders of the files, which are created if needed.
    """

    def __init__(self, file: str, folders: Sequence[Path]) -> None:
        self.file, self._what, self._here = file, file.removesuffix(".json"), 0
        self._paths = [each / self.file for each in folders]
        self.read()

    def read(self) -> int:
        """Return the count over all processes of this site."""
        counted = [int(files.read_json(path)[self._what]) for path in self._paths if path.exists()]
        self._here = max([self._here, *counted])
        return self._here

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Lock the counter against other processes, and yield the count."""
        for path in self._paths:
            files.private_folder(path.parent)
        with files.private_lock(f"{self._paths[-1]}.lock", _SECONDS) if self._paths else nullcontext():
            yield self.read()

    def add(self) -> None:
        """Count one more, inside `locked`."""
        self._here += 1
        for path in self._paths:
            files.write_json(path, {self._what: self._here})


class Watch:
    """Enforces a site's policy.

    Args:
        policy: the site's policy.
        folder: the folder of states.
        beside: the folder of the site's identity, which is the same for other folders of states. Rounds are counted in
            both, and the larger count holds; without folders they are counted in this process.
    """

    def __init__(self, policy: Policy, folder: Path | None, beside: Path | None = None) -> None:
        self.policy = policy
        folders = [each for each in (folder, beside) if each is not None]
        self._rounds = _Count("rounds.json", folders if policy.rounds is not None else [])
        self._failed, self._lost = _Count("refusals.json", folders), _Count("lost.json", folders)

    def begin(self, algorithm: Algorithm, clients: int) -> None:
        """Refuse an algorithm that breaks the policy in any round."""
        budget = algorithm.budget
        if self.policy.epsilon is not None and not self.counts(budget):
            raise Refusal(
                "the site wants noise that it adds itself, with a ledger in a file, such as that of "
                "privacy.example_level(..., ledger=path), and the algorithm has none; noise of a server does not "
                f"count, nor noise that more than {self.policy.honest} clients of a sum must add together"
            )
        if budget is not None:
            budget.cohort(None, clients)

    def before(self, algorithm: Algorithm, turn: Turn, ids: Tensor) -> None:
        """Spend the budget of a round, or refuse it, before anything is computed."""
        budget, policy = algorithm.budget, self.policy
        if budget is not None:
            if not budget.allows() or budget.report()["epsilon"] > (policy.epsilon or math.inf):
                raise Refusal("the budget of the site's own ledger is spent")
            budget.spend(turn.round, ids, turn.keys(ids))
            if policy.epsilon is not None and budget.report()["epsilon"] > policy.epsilon:
                raise Refusal(f"the site spends no more than epsilon = {policy.epsilon}")

    def after_fit(self, what: str, rows: int) -> None:
        """Count an answer to a post-fit query like a round, or refuse it, before anything is computed.

        Args:
            what: kind of answer, as in `Policy.after_fit`.
            rows: least number of rows, or persons, behind each number of the answer.
        """
        policy = self.policy
        if what not in policy.after_fit:
            raise Refusal(
                f"the site's policy does not let it tell {AFTER_FIT[what]} after a fit; its side would allow it by "
                f"Policy(after_fit={(*policy.after_fit, what)}), {COMPOSED}"
            )
        if rows < policy.minimum:
            raise Refusal(
                f"the site does not tell {AFTER_FIT[what]} of fewer than {policy.minimum} {policy.counted}; its side "
                "would allow it by a smaller Policy(minimum=)"
            )
        self.count()

    def count(self) -> None:
        """Count a round, scores or a post-fit query; refuse it if the limit is reached."""
        if self.policy.rounds is None:
            return
        with self._rounds.locked() as rounds:
            if rounds >= self.policy.rounds:
                many = "s" * (rounds != 1)
                raise Refusal(f"the site has answered {rounds} round{many}, and does not answer more")
            self._rounds.add()

    def failed(self, hidden: bool = False) -> None:
        """Count a round or query whose failure depends on rows, before anybody learns of it.

        Args:
            hidden: whether the server does not learn at which site it failed, as under masks. Such failures have their
                own counter: a site that refused after too many of them would disclose that they were its own.
        """
        count = self._lost if hidden else self._failed
        try:
            with count.locked():
                count.add()
        except OSError:
            _LOG.exception("a failure could not be written to disk; it counts while this process runs")

    def is_spent(self) -> bool:
        """Return whether too many hidden failures have occurred, so that all masked answers are random."""
        return self._lost.read() >= max(1, self.policy.refusals)

    def check_failed(self) -> None:
        """Refuse if too many answers have failed, because each failure discloses something about rows."""
        if (failed := self._failed.read()) >= max(1, self.policy.refusals):
            raise Refusal(
                f"{failed} rounds or questions have failed at the site because of its rows, see its log; each failure "
                "discloses something about rows, so it answers nothing more; its side would allow it by a larger "
                f"Policy(refusals=), or restart the count by removing {self._failed.file}"
            )

    def counts(self, budget: Budget | None) -> bool:
        """Return whether noise is added here, or by clients on which the site relies, and recorded in a ledger file."""
        if budget is None:
            return False
        return budget.lasting and budget.quorum is not None and budget.quorum <= self.policy.honest


def check_sizes(sent: Tree) -> None:
    """Refuse tensors of the server with very large numbers: an overflow would disclose the size of rows.

    Raises:
        Refusal: a tensor has such a number; the message names the tensor.
    """
    for path, leaf in tree.items(sent):
        values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        if not values.is_floating_point() or not values.numel():
            continue
        shared = values[:1] if values.ndim and values.stride(0) == 0 else values  # equal for all clients
        low, high = shared.aminmax()
        if bool(low.isnan()):
            low, high = shared.nan_to_num(0.0, torch.inf, -torch.inf).aminmax()
        most = _LARGEST[values.dtype]
        if bool(low < -most) or bool(high > most):
            raise Refusal(
                f"the server has sent a number in {path or 'its tensor'!r} that is larger than {most:g}; whether a "
                "client's rows overflow with it would disclose their size; take smaller steps or another start"
            )


def in_one(sums: Tree) -> Tree:
    """Return clients' sums `(K, ...)` with their total in the first row and zeros elsewhere."""
    joined = tree.map(lambda leaf: leaf.sum(0, keepdim=True, dtype=leaf.dtype), sums)
    return tree.map(lambda one, leaf: torch.cat([one, torch.zeros_like(leaf[1:])]), joined, sums)
