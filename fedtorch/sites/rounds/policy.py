"""Hold a site's answers to its policy, whatever the server asks, by a count that outlives processes."""

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
_SECONDS = 30.0  # for another process of the site that counts
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
    """Raised for what a site does not do; its message goes to the server."""


class Policy(NamedTuple):
    """Limits on what a site answers. Every round that is asked of it counts, also one that it refuses.

    With a minimum above one clients draw, minibatches and all else, by keys of the site's own, which a server cannot
    compute. So a run that draws has other bits there than in one process, and repeats them only with the site's folder.

    Attributes:
        rounds: how many are answered over all runs, with scores and questions after a fit; None for any number.
        epsilon: the most that one ledger may count in all, by noise that is added at the site.
        honest: clients of a sum under masks, its own among them, whose noise the site counts on together.
        remember_sums: whether sums and agreements are remembered in the folder of states; else while the process runs.
        carry: how messages must be carried, which the server must want too; or by the algorithm's name.
        minimum: the rows behind any number that leaves: of a frame, in a round, of scores, or after a fit.
        columns: those that formulas may read, and None for all; the columns of clients and persons are never read.
        designs: how many may make rows of a frame in all.
        after_fit: questions after a fit that are answered: "effects", "densities", "margins", "checks". Name any only
            for a server that is trusted not to compose questions, which read single rows out of exact answers.
        refusals: how many may fail by what is in rows, in all; after these nothing is answered, and under masks the
            answer is random.
        person: a column of the frame whose distinct values count for `minimum` in place of rows.

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
        """Return them as JSON, for records."""
        carry = self.carry
        said = {name: str(each) for name, each in carry.items()} if isinstance(carry, Mapping) else str(carry)
        return {**self._asdict(), "carry": said, "after_fit": list(self.after_fit)}

    def carry_of(self, algorithm: str) -> Carry:
        """Return how the messages of an algorithm, by name, have to be carried."""
        return self.carry[algorithm] if isinstance(self.carry, Mapping) else self.carry

    @property
    def counted(self) -> str:
        """Return what `minimum` counts, in words."""
        return "rows" if self.person is None else "persons"

    def check(self) -> None:
        """Raise ValueError unless they are in range."""
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
                f"Expected either epsilon= or after_fit=, for nothing that is told after a fit has noise, but got "
                f"{self.epsilon} and {self.after_fit}"
            )
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"Expected a positive epsilon, but got {self.epsilon}")


class _Count:
    """Counts something in files of some folders, of which the largest holds; without any, in this process.

    Args:
        file: the name of the files, whose first part is what is counted.
        folders: of the files, which are made with them.
    """

    def __init__(self, file: str, folders: Sequence[Path]) -> None:
        self.file, self._what, self._here = file, file.removesuffix(".json"), 0
        self._paths = [each / self.file for each in folders]
        self.read()

    def read(self) -> int:
        """Return the count, by other processes of this site too."""
        counted = [int(files.read_json(path)[self._what]) for path in self._paths if path.exists()]
        self._here = max([self._here, *counted])
        return self._here

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Return the count, which no other process changes meanwhile."""
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
    """Holds a site's answers to its policy.

    Args:
        policy: of the site.
        folder: of states.
        beside: the folder of the site's identity, which does not change with that of the states. Rounds are counted in
            both, and the larger count holds; without either those of this process are counted.
    """

    def __init__(self, policy: Policy, folder: Path | None, beside: Path | None = None) -> None:
        self.policy = policy
        folders = [each for each in (folder, beside) if each is not None]
        self._rounds = _Count("rounds.json", folders if policy.rounds is not None else [])
        self._failed, self._lost = _Count("refusals.json", folders), _Count("lost.json", folders)

    def begin(self, algorithm: Algorithm, clients: int) -> None:
        """Refuse an algorithm that would break the policy whatever is asked of it."""
        budget = algorithm.budget
        if self.policy.epsilon is not None and not self.counts(budget):
            raise Refusal(
                "the site wants noise that it adds itself, with a ledger in a file, such as that of "
                "privacy.example_level(..., ledger=path), and the algorithm has none; what a server adds does not "
                f"count, nor what more than {self.policy.honest} clients of a sum would have to add together"
            )
        if budget is not None:
            budget.cohort(None, clients)

    def before(self, algorithm: Algorithm, turn: Turn, ids: Tensor) -> None:
        """Spend the budget of a round, before anything of it is computed, or refuse it."""
        budget, policy = algorithm.budget, self.policy
        if budget is not None:
            if not budget.allows() or budget.report()["epsilon"] > (policy.epsilon or math.inf):
                raise Refusal("the budget of the site's own ledger is spent")
            budget.spend(turn.round, ids, turn.keys(ids))
            if policy.epsilon is not None and budget.report()["epsilon"] > policy.epsilon:
                raise Refusal(f"the site spends no more than epsilon = {policy.epsilon}")

    def after_fit(self, what: str, rows: int) -> None:
        """Count an answer to a question after the fit like a round, or refuse it before anything of it is computed.

        Args:
            what: is told, as `Policy.after_fit` has it.
            rows: behind each number of the answer, at least, or persons.
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
        """Count a round, scores, or a question after the fit, or refuse it where there were enough."""
        if self.policy.rounds is None:
            return
        with self._rounds.locked() as rounds:
            if rounds >= self.policy.rounds:
                many = "s" * (rounds != 1)
                raise Refusal(f"the site has answered {rounds} round{many}, and does not answer more")
            self._rounds.add()

    def failed(self, hidden: bool = False) -> None:
        """Count a round or a question that failed by what is in rows, before anybody hears of it.

        Args:
            hidden: whether the server does not hear at which site, as under masks. These are counted apart, since a
                site that refuses when it has had too many of them would say that they were its own.
        """
        count = self._lost if hidden else self._failed
        try:
            with count.locked():
                count.add()
        except OSError:
            _LOG.exception("a failure could not be written down; it counts as long as this process runs")

    def is_spent(self) -> bool:
        """Return whether so many rounds have failed of which the server does not know where that all are chance."""
        return self._lost.read() >= max(1, self.policy.refusals)

    def check_failed(self) -> None:
        """Refuse to answer where so much has failed that it would tell more of rows."""
        if (failed := self._failed.read()) >= max(1, self.policy.refusals):
            raise Refusal(
                f"{failed} rounds or questions have failed at the site by what its rows are, which its log names; each "
                "tells of the rows, so that it answers nothing more; its side would allow it by a larger "
                f"Policy(refusals=), or begin to count anew without {self._failed.file}"
            )

    def counts(self, budget: Budget | None) -> bool:
        """Return whether noise is added where rows are, or by others that the site counts on, and is written down."""
        if budget is None:
            return False
        return budget.lasting and budget.quorum is not None and budget.quorum <= self.policy.honest


def check_sizes(sent: Tree) -> None:
    """Refuse tensors of the server with numbers so large that whether rows overflow would tell how large these are.

    Raises:
        Refusal: one has; it is named.
    """
    for path, leaf in tree.items(sent):
        values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        if not values.is_floating_point() or not values.numel():
            continue
        shared = values[:1] if values.ndim and values.stride(0) == 0 else values  # the same for all clients
        low, high = shared.aminmax()
        if bool(low.isnan()):
            low, high = shared.nan_to_num(0.0, torch.inf, -torch.inf).aminmax()
        most = _LARGEST[values.dtype]
        if bool(low < -most) or bool(high > most):
            raise Refusal(
                f"the server has sent a number in {path or 'its tensor'!r} that is larger than {most:g}; whether a "
                "client's rows overflow there would tell of them; take smaller steps or another start"
            )


def in_one(sums: Tree) -> Tree:
    """Clients' sums `(K, ...)`; all of them in the first one's place, where no client may be told from others."""
    joined = tree.map(lambda leaf: leaf.sum(0, keepdim=True, dtype=leaf.dtype), sums)
    return tree.map(lambda one, leaf: torch.cat([one, torch.zeros_like(leaf[1:])]), joined, sums)
