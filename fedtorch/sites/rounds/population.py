"""Clients at sites of other organisations, as the server's population."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtorch import checkpoint as files, expected, tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import Carry, plain
from fedtorch.sites.audit.audit import AuditRecord
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds._clients import RemoteClients
from fedtorch.sites.rounds.plan import Lost, Plan
from fedtorch.sites.rounds.sites import Brings, Sites
from fedtorch.sites.rounds.status import Status
from fedtorch.sites.streams.hub import Hub
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
LAST_WORD = 10.0  # seconds for disconnected sites to return and learn that the run is over


class Remote:
    """A population of sites that connect to this process; a run on it is like any other.

    Sites run `algorithm`, by the name under which they offer it, with `settings`. They refuse unless this is the same
    algorithm as the run's. A site that fails, leaves or is late is left out of the round, as if its clients' messages
    were lost, and takes part in the next; `troubles` gives the reason.

    Args:
        host: where sites connect, such as `ft.sites.serve("0.0.0.0:9443", identity, roster)`.
        sites: names of the sites, in the order in which their clients are numbered.
        algorithm: name of the algorithm at the sites.
        settings: settings of the algorithm, as JSON.
        rows: rows like those of the sites `(n, ...)`, if they are in a `NamedTuple`.
        agreed: most rows that each site may report, by name, such as `roster.rows`; no limit for others.
        seconds: longest time for which a round waits for sites.
        quorum: fraction of the asked sites that must answer, or the round fails. With 1.0 no site is ever left out,
            and numbers are those of a run in one process up to rounding.
        timeout: longest wait for all sites to connect at first.
        checkpoints: number of the run's last checkpoints to which sites can return.
        withdrawals: whether each site's persistent contributions are also stored here, for `withdraw`.
        carry: transport of messages, `sites.masked(…)`, `sites.sealed(network)`, or readable for this process; the
            policies of all sites must ask for the same.
        roster: the roster signed by the authority, `sites.identity.sign_roster(...)`, by which sites verify each
            other's keys; for masked sums and sealed envelopes.
        rotate: number of rounds after which sites make new keys.
        checkpoint: the run's file, beside which its status is written for `fedtorch status`; without one there is no
            status. `finish` saves it before sites learn that the run is over; a server that is restarted with it then
            does not wait for sites.
        record: log of requests and answers, whose signature begins runs.

    Attributes:
        names: names of all clients.
        validation: placeholder for the sites' validation rows, in `run.evaluate(population.validation, …)`; metrics
            are requested by name, and sites compute what they offer under that name.

    Example:
        >>> import threading, torch, fedtorch as ft
        >>> from fedtorch.sites import Policy, SiteConfiguration, join
        >>> from fedtorch.sites import Hub
        >>> from fedtorch.sites.streams import memory
        >>> def fedavg(mu: float) -> ft.Algorithm:
        ...     return ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False)), mu=mu)
        >>> host, rows = Hub(), (torch.eye(2), torch.tensor([1.0, 2.0]))
        >>> configuration = SiteConfiguration(ft.data.from_tensors([rows]), {"fedavg": fedavg}, Policy(minimum=1))
        >>> site = threading.Thread(target=join, args=(lambda: memory.link(host, "ward 7"), configuration))
        >>> site.start()
        >>> sites = ft.Remote(host, ["ward 7"], "fedavg", {"mu": 0.0})
        >>> run = ft.run(fedavg(0.0), sites, rounds=2)
        >>> run.global_module().weight.round(decimals=3).tolist()
        [[1.0, 2.0]]
        >>> sites.finish(run)
        >>> site.join()

    Raises:
        TypeError: settings that are not JSON.
        TimeoutError: not all sites have connected in time.
        ValueError: no sites, two clients with one name, or settings out of range.
    """

    def __init__(
        self,
        host: Hub,
        sites: Sequence[str],
        algorithm: str,
        settings: Mapping[str, Any] | None = None,
        *,
        rows: Tree = None,
        agreed: Mapping[str, int | None] | None = None,
        seconds: float = 60.0,
        quorum: float = 0.5,
        timeout: float = 60.0,
        checkpoints: int = 2,
        withdrawals: bool = False,
        carry: Carry = plain(),  # noqa: B008
        roster: bytes | None = None,
        rotate: int = 100,
        checkpoint: Path | str | None = None,
        record: AuditRecord | None = None,
    ) -> None:
        expected.positive(seconds=seconds, timeout=timeout, checkpoints=checkpoints, rotate=rotate)
        if not sites or len(set(sites)) != len(sites):
            raise ValueError(f"Expected the names of different sites, at least one, but got {list(sites)}")
        if not 0 < quorum <= 1:
            raise ValueError(f"Expected a quorum above 0 and at most 1, but got {quorum}")
        try:
            json.dumps(settings, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"Expected settings as JSON, because they are sent to the sites, but got {error}") from None
        self.device, self.leads, self.carry = torch.device("cpu"), True, carry
        asked, bring = Sites(host, sites, agreed), _brought_to(checkpoint, sites)
        if record is not None:
            asked.on_drop = lambda site, reason: record.note("dropped", site=site, reason=reason[:1000])
        met: dict[str, Any] = {"state": "waiting for sites", "rounds": 0, "of": None, "left": None, "privacy": {}}
        status = Status(checkpoint, lambda: {**met, "sites": asked.described()})
        asked.on_look = status.write
        if checkpoint is None:
            _LOG.info("no status of this run is written, for `fedtorch status`; name its file, ft.Remote(checkpoint=)")
        if bring is None:
            asked.meet(timeout)
        else:
            asked.bring, asked.met = bring, True
        self._checkpoint, self._last_word = checkpoint, 0.0 if checkpoint is None else min(timeout, LAST_WORD)
        brings = [asked.bring[name] for name in asked.names]
        if brings[0].design == "":  # and so for all others, since forms are alike
            raise ValueError(
                f"Expected sites that have agreed on a design, but {list(sites)} have frames and none; begin with "
                "sites.agree(host, sites, formula, client=…)"
            )
        self.names = tuple(client for each in brings for client in each.clients)
        if len(set(self.names)) != len(self.names):
            twice = {name for name, count in Counter(self.names).items() if count > 1}
            owners = [name for name, each in zip(asked.names, brings) if not twice.isdisjoint(each.clients)]
            why = f"Expected clients with different names, but {owners} have {{}} in common; rename them"
            asked.turn_away(owners, why.format("some (the server knows which)"))  # a site must not get others' names
            raise ValueError(why.format(sorted(twice)))
        like = frames.no_rows(brings[0].schema) if rows is None else tree.take(rows, slice(0, 0))
        if frames.described(like) != frames.described(frames.no_rows(brings[0].schema)):
            raise ValueError(f"Expected rows= like those of the sites, {brings[0].schema}, but got others")
        nobody = torch.zeros(len(self.names), dtype=torch.int64)
        self.validation = FederatedData(like, nobody, self.names, allow_empty=True)
        counts = torch.tensor([len(each.clients) for each in brings])
        self.plan = Plan(
            sites=asked,
            names=self.names,
            firsts=(counts.cumsum(0) - counts).tolist(),
            counts=counts.tolist(),
            algorithm=algorithm,
            settings=dict(settings or {}),
            seconds=seconds,
            quorum=quorum,
            checkpoints=checkpoints,
            withdrawals=withdrawals,
            carry=carry,
            roster=roster,
            rotate=rotate,
            nobody=_nobody(like),
            validation=self.validation,
            record=record,
            lost=Lost({}, {}),
            status=status,
        )

    @property
    def data(self) -> FederatedData:
        """Raise ValueError: the rows stay at the sites."""
        raise ValueError("Expected rows in this process, but they are at the sites; ask for what can be computed there")

    @property
    def counts(self) -> Tensor:
        """Return the clients' row counts as reported by the sites, `(K,)`."""
        asked = self.plan.sites
        return torch.tensor([rows for name in asked.names for rows in asked.bring[name].rows])

    @property
    def organisations(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each site's clients, by site."""
        asked = self.plan.sites
        return {name: tuple(asked.bring[name].clients) for name in asked.names}

    @property
    def troubles(self) -> dict[str, str]:
        """Return the last reason why a site did not answer, by site."""
        return dict(self.plan.sites.troubles)

    @property
    def absences(self) -> dict[str, str]:
        """Return in words how often a site was late or missing, when last and why, by site."""
        return {name: trouble.in_words() for name, trouble in self.plan.sites.tally.items()}

    def noted(self, clients: int | None = None) -> Mapping[str, Tensor]:
        """Return the row counts reported by sites; whether rows have changed, each site checks itself."""
        brings = (self.plan.sites.bring[name] for name in self.plan.sites.names)
        return {"counts": torch.tensor([rows for each in brings for rows in each.rows])[:clients]}

    def bind(self, algorithm: Algorithm, state: Tree) -> RemoteClients:
        """Return the sites' clients for one run of `algorithm`."""
        return RemoteClients(self.plan, algorithm, state)

    def finish(self, run: Any) -> None:
        """End a run at the sites, and send them the clients' final inboxes.

        With a `checkpoint` this is recorded there first, and disconnected sites have ten seconds to return.
        """
        run.clients.over = True
        if self._checkpoint is not None:
            run.save(self._checkpoint)
        self.plan.status.write(at_once=True)
        run.clients.finish(run.outbox, self._last_word)

    def withdraw(self, run: Any, site: str) -> None:
        """Remove a site's persistent contributions from a run, and ask it no more.

        In the total, its clients then count as if they had never been asked. The server's parameters are not changed:
        they keep the effect of earlier totals and of other messages, such as gradients.

        Raises:
            ValueError: no such site, it has been withdrawn before, or the population was made without withdrawals.
        """
        run.server = run.server._replace(total=tree.subtract(run.server.total, run.clients.withdraw(site)))

    def __repr__(self) -> str:
        return f"Remote({len(self.names)} clients of {len(self.plan.sites.names)} sites, {self.plan.algorithm!r})"


def _nobody(rows: Tree) -> ClientData:
    """Return an empty block with rows like `rows` `(0, ...)`."""
    block = tree.map(lambda leaf: leaf.new_zeros(0, 1, *leaf.shape[1:]), rows)
    return ClientData(block, torch.zeros(0, dtype=torch.int64))


def _brought_to(path: Path | str | None, sites: Sequence[str]) -> dict[str, Brings] | None:
    """Return the sites' clients and rows of a finished run, from its checkpoint; None if sites must connect.

    Raises:
        ValueError: the file is not a checkpoint.
    """
    if path is None or not Path(path).exists():
        return None
    flat = files.below("clients.", files.read(path))
    if not bool(flat.get("over", False)):
        return None
    bring = json.loads(bytes(flat["bring"].tolist()))
    if set(bring) != set(sites):
        return None
    return {
        name: Brings(tuple(bring[name]["clients"]), tuple(bring[name]["rows"]), *_how(bring[name])) for name in sites
    }


def _how(bring: Mapping[str, Any]) -> tuple[Any, str | None, bool, str]:
    return bring["schema"], bring.get("design"), bring.get("joined", False), bring.get("missing", "")
