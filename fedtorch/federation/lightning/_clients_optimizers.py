"""Stand-in optimisers of a federation for a Trainer: they hold the clients' learning rates, and no parameters.

`LearningRateMonitor` and other callbacks read the rates there; rates that a callback sets are passed to the clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from fedtorch.data import BadClients
from fedtorch.data.loaders import FederatedLoaders
from fedtorch.federation.local_schedule import LocalOptimizer
from fedtorch.federation.runs.run import Run
from fedtorch.federation.solvers.batches import limited

_SHOWN = ("lr", "momentum", "betas", "weight_decay", "name")  # fields of a parameter group that callbacks read
_PLANNED, _HELD = "planned_lr", "held"  # rate of the clients' schedules; whether a callback has replaced it


class ClientsOptimizers:
    """Stand-ins for the clients' optimisers: means over the last round's cohort, at first over all clients.

    Args:
        run: the clients' run.

    Attributes:
        limit: on the minibatches of an epoch, see `Turn`.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._made, self._watched = run, [ClientsOptimizer([])], True
        self.limit: float | None = None

    @property
    def known(self) -> bool:
        """Return whether the clients have learning rates that can be followed here."""
        return self._run.algorithm.schedule is not None and self._data() is not None

    def make(self, watched: bool) -> Any:
        """Return the optimisers and schedulers for `configure_optimizers`.

        Args:
            watched: whether callbacks read the rates, which may need Trainers started every round.
        """
        schedule = self._run.algorithm.schedule
        self._watched = watched
        if not self.known or schedule is None:
            self._made = [ClientsOptimizer([])]
            return self._made
        seen = self._seen(torch.arange(len(self._run.population.names)))
        self._made = [type(each.kind, (ClientsOptimizer,), {})(each.groups) for each in seen]
        return [_with_scheduler(each, optimizer) for each, optimizer in zip(seen, self._made)]

    def settings(self) -> dict[str, Any]:
        """Return the settings of the clients' optimisers, and of schedules of this run's length, by name.

        Empty if clients run elsewhere, or if only a client's own Trainer has the settings.
        """
        schedule = self._run.algorithm.schedule
        if not self.known or schedule is None or schedule.slow:
            return {}
        seen = self._seen(torch.arange(len(self._run.population.names)))
        return {name: value for optimizer in seen for name, value in optimizer.settings.items() if name != "optimizer"}

    def ask(self) -> dict[str, Any]:
        """Return the fields of the next round's `Turn`."""
        groups = [group for optimizer in self._made for group in optimizer.param_groups]
        for group in groups:
            group[_HELD] = group.get(_HELD, False) or group.get("lr") != group.get(_PLANNED)
        rates = tuple(group["lr"] for group in groups) if any(group[_HELD] for group in groups) else None
        return {name: value for name, value in (("rates", rates), ("limit", self.limit)) if value is not None}

    def follow(self, ids: Tensor) -> None:
        """Update the rates to the clients' after a round."""
        schedule = self._run.algorithm.schedule
        if schedule is None or (schedule.slow and not self._watched) or not len(ids):
            return
        if not any(optimizer.scheduled for optimizer in self._made):
            return
        for optimizer, seen in zip(self._made, self._seen(ids)):
            for group, new in zip(optimizer.param_groups, seen.groups):
                fresh = _shown(new)
                group.update({n: v for n, v in fresh.items() if not (n == "lr" and group.get(_HELD))})

    def take(self, limit: float | None) -> None:
        """Set a limit for the coming rounds.

        Raises:
            ValueError: no minibatch of some client's epochs is left.
        """
        self.limit = limit
        if limit is not None and self.known:
            self._batches(torch.arange(len(self._run.population.names)))

    def _data(self) -> Any:
        """Return the clients' data, None where they are elsewhere."""
        try:
            return self._run.population.data
        except ValueError:
            return None

    def _batches(self, ids: Tensor) -> Tensor:
        """Return the minibatches of an epoch of clients."""
        schedule, data = self._run.algorithm.schedule, self._data()
        assert schedule is not None
        if isinstance(data, FederatedLoaders):
            per_epoch = torch.tensor([data.steps(k) for k in ids.tolist()])
        else:
            per_epoch = schedule.batches(data.counts[ids])
        try:
            return limited(per_epoch, self.limit)
        except BadClients as error:
            raise ValueError(f"Client {self._run.population.names[int(ids[error.rows[0]])]!r}: {error}") from error

    def _seen(self, ids: Tensor) -> list[LocalOptimizer]:
        schedule = self._run.algorithm.schedule
        assert schedule is not None
        return schedule.at(self._batches(ids), self._run.number)


class ClientsOptimizer(torch.optim.Optimizer):
    """An optimiser of no parameters: it counts rounds, and holds hyperparameters.

    Args:
        groups: the clients' parameter groups; empty if unknown.
    """

    scheduled = False

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        shown = [_shown(group) for group in groups]
        super().__init__([{**group, "params": []} for group in shown or [{}]], dict(shown[0]) if shown else {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count as one step."""
        return None if closure is None else closure()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the hyperparameters of the same number of groups; ignore other checkpoints."""
        saved = state_dict["param_groups"]
        for group, old in zip(self.param_groups, saved if len(saved) == len(self.param_groups) else ()):
            group.update({name: value for name, value in old.items() if name != "params"})


class ClientsSchedule(LRScheduler):
    """A scheduler that does not change learning rates, which follow the clients' own."""

    def get_lr(self) -> list[Any]:
        """Return the rates of now."""
        return [group["lr"] for group in self.optimizer.param_groups]


def _shown(group: dict[str, Any]) -> dict[str, Any]:
    shown = {name: group[name] for name in _SHOWN if name in group}
    if "lr" in shown:
        shown["lr"] = shown[_PLANNED] = float(shown["lr"])
    return shown


def _with_scheduler(seen: LocalOptimizer, optimizer: ClientsOptimizer) -> dict[str, Any]:
    if not seen.scheduled:
        return {"optimizer": optimizer}
    optimizer.scheduled = True
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ClientsSchedule(optimizer), "name": seen.name}}
