"""State of a run in a checkpoint, and the settings that must match when it is resumed.

A checkpoint belongs to a run with the same settings on the same rows, by `fingerprint` and by the population's digests
of its rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor

from fedtorch import _files as files, checkpoint, tree
from fedtorch.checkpoint import below, describe
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import agreed
from fedtorch.federation.populations.population import Clients, Population
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.cohorts import Asked
from fedtorch.federation.runs.faults import Faults
from fedtorch.federation.runs.server_module import Modules
from fedtorch.history import History, Recorder, Round
from fedtorch.random.named import numbers
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.data import Design

_COUNTS = ("number", "bytes_up", "bytes_down")
_MANY = 2**14  # from this many clients on, some draws once depended on the clients' order


class Resumable:
    """The part of a `Run` that saves and resumes it."""

    algorithm: Algorithm
    population: Population
    clients: Clients
    cohort: Asked
    faults: Faults | None
    seed: int
    server: Tree
    log: History
    recorders: Sequence[Recorder]
    last: Round | None
    number: int
    bytes_up: int
    bytes_down: int
    ended: str
    _begin: Callable[[int], tuple[Tree, Tree]]
    _modules: Modules

    @property
    def outbox(self) -> Tree:
        """Return the server's current broadcast."""
        raise NotImplementedError

    @property
    def design(self) -> Design | None:
        """Return the design that the run's model is of, or else its data; None without a formula."""
        design = posterior_of(self.algorithm).design
        with suppress(ValueError):  # rows that are at sites
            design = design or getattr(getattr(self.population, "data", None), "design", None)
        return design

    def state_dict(self) -> dict[str, Tensor]:
        """Return all a resumed run needs, flat: server and clients' states, round, bytes, history, recorders.

        With several ranks it is called on all of them, and each gets the whole state.
        """
        flat = {f"clients.{name}": leaf for name, leaf in self.clients.state_dict().items()}
        flat.update(tree.flatten(tree.to(self.server, "cpu", copy=True), "server"))
        flat.update({f"history.{name}": leaf for name, leaf in self.log.state_dict().items()})
        for i, recorder in enumerate(self.recorders):
            flat.update({f"recorders.{i}.{name}": leaf for name, leaf in recorder.state_dict().items()})
        flat.update({name: torch.tensor(getattr(self, name)) for name in _COUNTS})
        flat.update(self._modules.entries(self.outbox, self.server))
        flat.update({f"rows.{name}": leaf for name, leaf in self.population.noted().items()})
        flat["rows.clients"] = torch.tensor(len(self.population.names))
        texts = {"fingerprint": json.dumps(self.fingerprint()), "ended": self.ended}
        texts |= {} if self.design is None else {"design": self.design.to_json()}
        return flat | {name: torch.tensor(list(text.encode()), dtype=torch.uint8) for name, text in texts.items()}

    def load_state_dict(
        self, flat: Mapping[str, Tensor], *, anyway: bool = False, joined: Literal["new"] | None = None
    ) -> None:
        """Resume from the result of `state_dict`.

        Args:
            flat: state of a run of the same algorithm, settings, rows, population, cohort, faults and seed; chunks,
                device and number of ranks may differ.
            anyway: whether to accept other settings and rows.
            joined: "new" accepts clients beyond those of the checkpoint: they are in the initial state, and count in
                totals like clients that have not been asked yet.

        Raises:
            ValueError: it belongs to another run.
        """
        from fedtorch.federation import joining

        now = len(self.population.names)
        before = int(flat["rows.clients"]) if "rows.clients" in flat else now
        _check_number(before, now, joined)
        checkpoint.check_structure(flat, self.state_dict(), "server." if before < now else None)
        if not anyway:
            checkpoint.check_fingerprint(json.loads(bytes(flat["fingerprint"].tolist())), self.fingerprint(before))
            self._modules.check(flat, self.outbox)
            self._check_rows(below("rows.", flat), before)
        if before > now:
            raise ValueError(
                f"Expected a checkpoint of {now} clients or fewer, but got one of {before}; a resumed run has all the "
                "clients that it started with: to train some of them only, pass for example cohort=[0, 1]"
            )
        if before == now:
            server = tree.unflatten(flat, self.server, "server")
        else:
            server = joining.joined(self.algorithm, self._begin, flat, before, now)
        for i, recorder in enumerate(self.recorders):
            recorder.load_state_dict(below(f"recorders.{i}.", flat))
        self.clients.load_state_dict(below("clients.", flat), anyway)
        self.log.load_state_dict(below("history.", flat))
        self.server = tree.map(lambda new, old: new.to(old.device, copy=True), server, self.server)
        if not joining.adds(self.server, flat):
            self.server = self.server._replace(total=self._total_anew())
        self.number, self.bytes_up, self.bytes_down = (int(flat[name]) for name in _COUNTS)
        self.last, self.ended = None, bytes(flat["ended"].tolist()).decode() if "ended" in flat else ""
        self.clients.introduce(lambda: {**self.fingerprint(), "round": str(self.number)})

    def fingerprint(self, clients: int | None = None) -> dict[str, str]:
        """Return the settings that a checkpoint belongs to, by name; of the first clients, default all."""
        names = self.population.names[:clients]
        about = {**self.algorithm.settings, "seed": self.seed, "cohort": self.cohort, "faults": self.faults}
        about.update(agreed(self.population.carry))
        about.update(self._drawn(names))
        return {**{name: describe(value) for name, value in about.items()}, "clients": describe(names)}

    def _drawn(self, names: tuple[str, ...]) -> dict[str, str]:
        """Return the version of random draws, if it differs from draws by the clients' positions.

        For clients without names the draws are unchanged, except for faults and for a few of very many clients.
        """
        few = isinstance(self.cohort, int) and len(names) >= _MANY
        same = self.faults is None and not few and numbers(names).equal(torch.arange(len(names)))
        return {} if same else {"draws": "by the clients' names"}

    def save(self, path: Path | str) -> None:
        """Write a safetensors file, which gets its name only when complete; with several ranks, call it on all.

        The server of a run over sites writes it for its owner alone.
        """
        flat, at_server = self.state_dict(), hasattr(self.population, "organisations")
        if self.population.leads:
            if at_server:
                files.private_folder(Path(path).parent)
            checkpoint.write(path, flat, private=at_server)
        self.clients.meet()

    def load(self, path: Path | str, *, anyway: bool = False, joined: Literal["new"] | None = None) -> Self:
        """Resume from a file of `save` or a Trainer, and return itself; see `load_state_dict`."""
        self.load_state_dict(checkpoint.read_run(path), anyway=anyway, joined=joined)
        return self

    def _check_rows(self, before: Mapping[str, Tensor], clients: int) -> None:
        """Refuse changed rows of the earlier clients, as far as their digests are known."""
        from fedtorch.data.digests import different

        names = self.population.names
        if (changed := different(before, self.population.noted(clients), names)) is not None:
            raise ValueError(
                f"Expected a checkpoint of a run on the rows that are here, but {changed} when it was saved; pass "
                f"{checkpoint.ANYWAY}"
            )

    def _total_anew(self) -> Tree:
        """Recompute the total of all clients' contributions; joining clients contribute their initial state."""
        total = self.clients.total()
        if total is None:
            raise ValueError(
                "Expected answers of all clients, because their total is recomputed when clients join, but some are "
                "not available now"
            )
        return total


def _check_number(before: int, now: int, joined: str | None) -> None:
    if joined not in (None, "new"):
        raise ValueError(f"Expected joined='new', or None where no clients have joined, but got {joined!r}")
    if before < now and joined is None:
        raise ValueError(
            f"Expected a checkpoint of a run with {now} clients, but got one with {before}; pass joined='new' to go on "
            "with clients beyond these, which then begin in the initial state: run.load(path, joined='new'), "
            "ft.Federation(…, joined='new'), or `fedtorch fit --joined new`"
        )
