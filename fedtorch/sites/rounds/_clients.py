"""The server's interface to the sites' clients in one run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import Carry
from fedtorch.federation.populations.population import Pending
from fedtorch.federation.turn import Turn
from fedtorch.learns import Field
from fedtorch.protocol.halves import Half, Traffic
from fedtorch.protocol.versions import FIRST
from fedtorch.sites.audit.recording import ServerRecording
from fedtorch.sites.rounds import _after_fit as after_fit, _totals as totals
from fedtorch.sites.rounds._account import Account
from fedtorch.sites.rounds.disclosed import conversation
from fedtorch.sites.rounds.plan import Plan
from fedtorch.sites.rounds.server import ServerSession
from fedtorch.sites.rounds.status import Pace, Trouble
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.federation.runs.holders import Kind


class RemoteClients:
    """All sites' clients; see `Clients`. Their states never leave the sites.

    Args:
        plan: the population's plan.
        algorithm: what clients compute.
        state: one client's initial state.

    Attributes:
        session: the server's part in the run.
        over: whether the run is over at the sites.
    """

    in_process = False

    def __init__(self, plan: Plan, algorithm: Algorithm, state: Tree) -> None:
        self.plan, self.algorithm, self.over = plan, algorithm, False
        keeps = plan.withdrawals and algorithm.told is not None and algorithm.exchange.additive
        zero = algorithm.exchange.finish(totals.initial_total(algorithm, state, 0)).value if keeps else None
        self._account, self._recording = Account(len(plan.sites.names), zero), ServerRecording(plan, algorithm)
        self._ask = self._recording.around(plan.sites.ask)
        self.session = ServerSession(plan, algorithm, state, self._account, self._recording)
        self._pace, self._done = Pace(), 0
        self._goal: int | None = None
        plan.status.content = self._status

    @property
    def run(self) -> str:
        """Return the run's identity, in hexadecimal."""
        return self.session.run

    def step(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None = None) -> Pending:
        """Ask the sites of the cohort; see `Clients.step`.

        Raises:
            RuntimeError: fewer sites than the quorum answered; the message says why, and the round can be repeated.
            ValueError: the turn has learning rates, a limit or shares, which only the sites set.
        """
        if turn.rates is not None or turn.limit is not None or turn.partial:
            raise ValueError(
                "Expected a round in which sites train as their configuration says, but got learning rates, a limit of "
                "minibatches or partial work for them; set them in the local solver, which the sites run too"
            )
        self.over = False
        self._done, self._goal = turn.round, turn.goal
        try:
            pending, moved = self._drive(self.session.round(outbox, cohort, turn, lost))
        except (RuntimeError, ValueError):
            self.plan.status.write(at_once=True)
            raise
        self._done += 1
        self._pace.ended(time.monotonic())
        self.plan.status.write(at_once=self._done == self._goal)
        return pending._replace(bytes_up=moved.up, bytes_down=moved.down)

    def _status(self) -> dict[str, Any]:
        """Return the run's progress, as JSON."""
        report = {} if self.algorithm.budget is None else self.algorithm.budget.report()
        return {
            "state": "over" if self.over else "running",
            "run": self.run,
            "algorithm": self.plan.algorithm,
            "rounds": self._done,
            "of": self._goal,
            "left": None if self.over else self._pace.left(self._done, self._goal),
            "privacy": {name: float(value) for name, value in report.items()},
            "sites": self.plan.sites.described(),
        }

    def total(self) -> Tree | None:
        """Return the total of all clients' persistent contributions, if all sites answer; see `Clients.total`."""
        return self._drive(totals.total(self.session))[0]

    def evaluate(self, outbox: Tree, data: FederatedData, function: Callable[[Tree, ClientData], Tree]) -> Tree:
        """Return the sums of metrics that sites offer under the names that `function` returns; see `Clients.evaluate`.

        Raises:
            ValueError: `data` is not the population's `validation`.
            RuntimeError: a site does not answer; the message says why.
        """
        if data is not self.plan.validation:
            raise ValueError(
                "Expected run.evaluate(population.validation, metrics), because rows are at the sites, but "
                "got other rows; clients in no site are scored with unseen=True"
            )
        nobody = torch.zeros(len(data), dtype=torch.bool)
        parts = self.session.local.evaluate_parts(outbox, data, function, nobody)
        return self._drive(totals.scores(self.session, outbox, tree.take(parts[1][0], slice(0, 0))))[0]

    def ask(
        self,
        outbox: Tree,
        kind: Kind,
        sent: Mapping[str, Tensor],
        about: Mapping[str, Any],
        each: Mapping[str, Tensor] | None = None,
    ) -> Tree:
        """Return the sites' answer to a post-fit query, a row per client or the sum of all.

        Args:
            outbox: the run's outbox.
            kind: the query, one of `fedtorch.inference.questions`.
            sent: tensors for all sites.
            about: settings.
            each: tensors with a row per client `(K, ...)`; a site is sent the rows of its own clients.

        Raises:
            RuntimeError: a site does not answer; the message says why.
        """
        return self._drive(after_fit.asked(self.session, outbox, kind, sent, about, each or {}))[0]

    def disclosed(self, algorithm: Algorithm, carry: Carry, outbox: Tree, turn: Turn) -> list[Field]:
        """Return the fields that leave the sites; see `Clients.disclosed`."""
        answered = self.session.local.disclosed(algorithm, carry, outbox, turn, at_sites=True)
        return [*answered, *conversation(algorithm, carry, self.plan.sites.names, answered)]

    def described(self) -> dict[str, Any]:
        """Return the algorithm, settings and fingerprint that sites run, as JSON."""
        return self.session.described()

    def _drive(self, half: Half) -> tuple[Any, Traffic]:
        session = self.session
        return self.plan.sites.drive(half, session.run, session.begin, self._ask)

    def tensors(self, outbox: Tree, ids: Tensor) -> Tree:
        """Return the tensors with which clients predict, if these do not depend on states; see `Clients.tensors`.

        Raises:
            ValueError: they depend on clients' states, which are at the sites.
        """
        if tree.leaves(self.session.local.table.initial):
            raise ValueError(
                "Expected an algorithm whose clients have no state of their own, but got one whose clients predict "
                "with it, at their sites; after population.finish(run) their `join` returns the models, and "
                "run.global_module() is the server's"
            )
        return self.session.local.tensors(outbox, ids)

    def finish(self, outbox: Tree, seconds: float = 0.0) -> None:
        """Send the sites the end of the run and final inboxes; disconnected sites have `seconds` to return."""
        sites = self.plan.sites
        waiting, ends = dict(enumerate(sites.names)), time.monotonic() + seconds
        while True:
            connected = {index: site for index, site in waiting.items() if sites.is_here(site)}
            for index in self._send_over(outbox, connected) if connected else ():
                del waiting[index]
            if not waiting or time.monotonic() >= ends:
                return
            sites.look(ends)

    def _send_over(self, outbox: Tree, here: Mapping[int, str]) -> list[int]:
        """Send the end of the run to connected sites; return the numbers of those to which it was sent."""
        session, sites = self.session, self.plan.sites
        if self.plan.carry.network is not None:
            self._drive(session.prepare([]))
        number = sites.next_sequence()
        requests = {
            site: session.request("over", site, number, session.inboxes(outbox, session.of_site(site))).message
            for site in here.values()
        }
        self._recording.over(self.run, requests)
        return [index for index, site in here.items() if sites.tell(site, self.run, session.begin, requests[site])]

    def withdraw(self, site: str) -> Tree:
        """Return a site's contributions beyond its clients' initial states; the site is not asked any more.

        Raises:
            ValueError: no such site, it has been withdrawn before, or contributions by site are not stored.
        """
        if site not in self.plan.sites.names:
            raise ValueError(f"Expected one of the sites {self.plan.sites.names}, but got {site!r}")
        taken = self._account.withdraw(self.plan.sites.names.index(site))
        self._recording.withdrawn(self.run, site)
        return taken

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the run's identity at the sites, their clients and rows, and the last answer of each that was used."""
        session = self.session
        last = tuple(session.kept)
        if last not in session.saved:
            session.saved.append(last)
        run = torch.tensor(list(bytes.fromhex(self.run)), dtype=torch.uint8)
        text = json.dumps({name: each._asdict() for name, each in self.plan.sites.bring.items()}).encode()
        known = {"over": torch.tensor(self.over), "bring": torch.tensor(list(text), dtype=torch.uint8)}
        troubles = json.dumps({name: each._asdict() for name, each in self.plan.sites.tally.items()}).encode()
        known["troubles"] = torch.tensor(list(troubles), dtype=torch.uint8)
        known |= self._recording.state_dict() | self._account.state_dict()
        return {"kept": torch.tensor(last), "run": run, **known}

    def load_state_dict(self, flat: dict[str, Tensor], anyway: bool = False) -> None:
        """Restore `state_dict`; sites restore with their next request, and sites added since begin."""
        self._recording.load_state_dict(flat)
        session, last = self.session, flat["kept"].tolist()
        session.run, session.anyway, session.resumed = bytes(flat["run"].tolist()).hex(), anyway, True
        session.kept = last + [FIRST] * (len(self.plan.sites.names) - len(last))
        self.plan.sites.begin_anew()
        session.saved.append(tuple(session.kept))
        self.over = bool(flat["over"])
        if "troubles" in flat:
            tally = {name: Trouble(**each) for name, each in json.loads(bytes(flat["troubles"].tolist())).items()}
            self.plan.sites.tally = tally
            self.plan.sites.troubles = {name: each.why for name, each in tally.items()}
        self._account.load_state_dict(flat)
        session.forget()

    def meet(self) -> None:
        """Do nothing: sites connect when they are asked."""

    def introduce(self, about: Callable[[], Mapping[str, str]]) -> None:
        """Do nothing: sites compare the algorithm's settings with their own when a run begins there."""
