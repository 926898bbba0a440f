"""Clients that live at sites of other organisations, as the server's population."""

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
LAST_WORD = 10.0  # seconds in which a site that may have missed that the run is over can come back


class Remote:
    """A population of sites that connect to this process; a run on it is like any other.

    Sites run `algorithm`, by the name under which they offer it, with `settings`; the run's own algorithm must be what
    they build of it, and they refuse where it is not. A site that fails, leaves or is late is left out of the round, as
    if its clients' messages were lost, and goes on with the next; `troubles` says why.

    Args:
        host: where sites connect, such as `ft.sites.serve("0.0.0.0:9443", identity, roster)`.
        sites: their names, in the order in which their clients are numbered.
        algorithm: the name of what they are asked to run.
        settings: of it, as JSON.
        rows: rows like those of the sites `(n, ...)`, where they are in a `NamedTuple`.
        agreed: how many rows each site may say that it has, by name, such as `roster.rows`; others say what they want.
        seconds: the longest that a round waits for sites.
        quorum: the part of the sites asked that must answer, or the round fails. With 1.0 no site is ever left out,
            and numbers are those of a run in one process up to rounding.
        timeout: the longest wait for all sites to connect at first.
        checkpoints: sites can go back to so many of the run's last checkpoints.
        withdrawals: whether what each site tells for good is kept here, once more for each site, for `withdraw`.
        carry: how messages are carried, `sites.masked(…)`, `sites.sealed(network)`, or readable for this process; the
            policies of all sites have to ask for the same.
        roster: as the authority has signed it, `sites.identity.sign_roster(...)`, by which sites believe each
            other's keys; for sums under masks and sealed envelopes.
        rotate: after so many rounds sites make other keys.
        checkpoint: the run's file, beside which its status is written for `fedtorch status`; without one there is no
            status. `finish` saves it before sites hear that the run is over; a server that is started again with it
            then waits for none of them.
        record: what sites are asked and what they answer is appended to it, and runs are begun with its signature.

    Attributes:
        names: of all clients.
        validation: stands for the rows that sites keep for validation, in `run.evaluate(population.validation, …)`;
            metrics are asked for by name, and sites compute what they offer under it.

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
        TimeoutError: not all sites came.
        ValueError: no sites, two clients of one name, or settings out of range.
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
            raise TypeError(f"Expected settings as JSON, for they travel to the sites, but got {error}") from None
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
        if brings[0].design == "":  # nor have the others
            raise ValueError(
                f"Expected sites that have agreed on a design, but {list(sites)} have frames and none; begin with "
                "sites.agree(host, sites, formula, client=…)"
            )
        self.names = tuple(client for each in brings for client in each.clients)
        if len(set(self.names)) != len(self.names):
            twice = {name for name, count in Counter(self.names).items() if count > 1}
            of = [name for name, each in zip(asked.names, brings) if not twice.isdisjoint(each.clients)]
            why = f"Expected clients of different names, but {of} have {{}} in common; rename them"
            asked.turn_away(of, why.format("some (the server knows which)"))  # nor does a site hear of others' clients
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
        """Return not here: raises ValueError."""
        raise ValueError("Expected rows in this process, but they are at the sites; ask for what can be computed there")

    @property
    def counts(self) -> Tensor:
        """Return how many rows the sites say that each client has, `(K,)`."""
        asked = self.plan.sites
        return torch.tensor([rows for name in asked.names for rows in asked.bring[name].rows])

    @property
    def organisations(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each site's clients, by site."""
        asked = self.plan.sites
        return {name: tuple(asked.bring[name].clients) for name in asked.names}

    @property
    def troubles(self) -> dict[str, str]:
        """Return the last reason why a site did not do what it was asked, by site."""
        return dict(self.plan.sites.troubles)

    @property
    def absences(self) -> dict[str, str]:
        """Return how often a site was late or missing, when last and why, in words, by site."""
        return {name: trouble.in_words() for name, trouble in self.plan.sites.tally.items()}

    def noted(self, clients: int | None = None) -> Mapping[str, Tensor]:
        """Return how many rows clients have, as their sites say; whether they are the same, these answer themselves."""
        brings = (self.plan.sites.bring[name] for name in self.plan.sites.names)
        return {"counts": torch.tensor([rows for each in brings for rows in each.rows])[:clients]}

    def bind(self, algorithm: Algorithm, state: Tree) -> RemoteClients:
        """Return the sites' clients for one run of `algorithm`."""
        return RemoteClients(self.plan, algorithm, state)

    def finish(self, run: Any) -> None:
        """Tell the sites that a run on this population is over, and what their clients predict with.

        With a `checkpoint` this is noted there first, and sites that are away have ten seconds to come back.
        """
        run.clients.over = True
        if self._checkpoint is not None:
            run.save(self._checkpoint)
        self.plan.status.write(at_once=True)
        run.clients.finish(run.outbox, self._last_word)

    def withdraw(self, run: Any, site: str) -> None:
        """Take what a site has told for good out of a run, and ask it no more.

        The total becomes that of clients which have never been asked. What the server has made of it before, and of
        fresh messages such as gradients, is in its parameters and stays there.

        Raises:
            ValueError: no such site, or it has left before; or the population was made without withdrawals.
        """
        run.server = run.server._replace(total=tree.subtract(run.server.total, run.clients.withdraw(site)))

    def __repr__(self) -> str:
        return f"Remote({len(self.names)} clients of {len(self.plan.sites.names)} sites, {self.plan.algorithm!r})"


def _nobody(rows: Tree) -> ClientData:
    """Return a block of no clients, with rows like `rows` `(0, ...)`."""
    block = tree.map(lambda leaf: leaf.new_zeros(0, 1, *leaf.shape[1:]), rows)
    return ClientData(block, torch.zeros(0, dtype=torch.int64))


def _brought_to(path: Path | str | None, sites: Sequence[str]) -> dict[str, Brings] | None:
    """Return what these sites have brought to a checkpoint's run, if that is over; None if they are waited for.

    Raises:
        ValueError: the file is no checkpoint.
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
