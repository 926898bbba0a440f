"""The sites' clients in one run, as the server sees them."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm, Turn
from fedtorch.federation.algorithms.fedavg import rows_weight
from fedtorch.federation.answers import joined
from fedtorch.federation.clients import LocalClients, Pending
from fedtorch.federation.exchange import Sum, is_finite, not_finite
from fedtorch.federation.remote import frames, inbox
from fedtorch.federation.remote.account import Account
from fedtorch.federation.remote.frames import Frame
from fedtorch.federation.remote.inbox import Inboxes
from fedtorch.federation.remote.sites import LATE, Heard, Question, Sites
from fedtorch.federation.remote.visit import fingerprint
from fedtorch.tree import Tree

_NOBODY = torch.zeros(0, dtype=torch.int64)


class Plan(NamedTuple):
    """What a population asks its sites for, and how it waits; see `Remote`."""

    sites: Sites
    names: tuple[str, ...]  # of all clients
    firsts: list[int]  # the number of each site's first client
    counts: list[int]  # of each site's clients
    algorithm: str
    settings: Mapping[str, Any]
    seconds: float
    quorum: float
    checkpoints: int
    withdrawals: bool
    nobody: ClientData  # a block of no clients, with rows like those of the sites
    validation: FederatedData  # stands for rows that sites keep


class Answer(NamedTuple):
    """A site's part of a round."""

    ids: Tensor  # (M,) of its clients that answered
    info: dict[str, Tensor]  # (M,) each
    refused: dict[int, str]
    partial: Tree  # None if none of them answered


class RemoteClients:
    """All sites' clients; see `Clients`. Their states never leave the sites.

    Args:
        plan: of the population.
        algorithm: what they compute.
        state: one client's initial state.
    """

    def __init__(self, plan: Plan, algorithm: Algorithm, state: Tree) -> None:
        self.plan, self.algorithm = plan, algorithm
        self.run, sites = secrets.token_hex(16), len(plan.sites.names)
        names, nobody = plan.names, [(_NOBODY, plan.nobody)]
        self._local = LocalClients(algorithm, state, names, nobody, len(names), None)
        self._kept = [0] * sites  # the last request of each site whose answer was taken in
        self._saved: deque[tuple[int, ...]] = deque([(0,) * sites], maxlen=plan.checkpoints)
        additive = algorithm.told is not None and algorithm.exchange.additive
        nothing = algorithm.exchange.finish(self._told_by(0)).value if plan.withdrawals and additive else None
        self._account = Account(sites, nothing)
        self._message: Tree = None  # (0, ...) what clients answer
        self._sums: Tree = None  # what becomes of it in a partial aggregate

    # -- rounds ----------------------------------------------------------------------------------------------------

    def step(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None = None) -> Pending:
        """Asks the sites of the cohort; see `Clients.step`.

        Raises:
            RuntimeError: fewer sites than the quorum answered; the message says why, and the round can be repeated.
        """
        if self._message is None:
            self._message = self._local.reply(self._local.empty_block(), outbox, turn).message
        number, key = self.plan.sites.next_sequence(), turn.key.to("cpu", torch.int64)
        requests: dict[str, bytes] = {}
        for index, site in enumerate(self.plan.sites.names):
            ids, silent = self._own(index, cohort), self._own(index, _NOBODY if lost is None else lost)
            if len(ids) and not self._account.left[index]:
                more, about = {"key": key, "lost": silent}, {"round": turn.round, "lost": len(silent)}
                requests[site] = self._request("round", index, ids, outbox, number, more, **about)
        heard = self._ask(requests, number, self._read_round)
        self._check_quorum(heard, len(requests))
        found = [answer for answer in heard.answers.values() if answer.partial is not None]
        ids, info = joined([(answer.ids, answer.info) for answer in found])
        late = [site for site, why in heard.missing.items() if why == LATE]
        away = [site for site in self.plan.sites.names if site not in heard.answers and site not in late]
        merged = self._local.algorithm.exchange.merge([answer.partial for answer in found]) if found else None
        return Pending(
            None if merged is None else self._local.finish(merged, self._message),
            ids,
            info,
            heard.bytes_up,
            sum(len(frame) for frame in requests.values()),
            lambda: self._keep(heard.answers, number),
            refused={client: field for answer in heard.answers.values() for client, field in answer.refused.items()},
            away=self._asked_of(away, cohort, lost),
            late=self._asked_of(late, cohort, lost),
        )

    def total(self) -> Tree | None:
        """What all clients tell for good, if all sites answer; see `Clients.total`."""
        number = self.plan.sites.next_sequence()
        requests = {site: self._request("total", index, None, None, number) for index, site in self._members()}
        heard = self._ask(requests, number, self._read_total)
        exchange = self.algorithm.exchange
        left = [self._told_by(self.plan.counts[index]) for index in self._account.left.nonzero()[:, 0].tolist()]
        return None if heard.missing else exchange.finish(exchange.merge([*heard.answers.values(), *left])).value

    def evaluate(self, outbox: Tree, data: FederatedData, function: Callable[[Tree, ClientData], Tree]) -> Tree:
        """The sums of metrics that sites offer under the names that `function` returns; see `Clients.evaluate`.

        Raises:
            ValueError: `data` is not the population's `validation`.
            RuntimeError: a site does not answer; the message says why.
        """
        if data is not self.plan.validation:
            raise ValueError(
                "Expected run.evaluate(population.validation, metrics), for the clients' rows are at the sites, but "
                "got other rows; clients in no site are scored with unseen=True"
            )
        here = self._local.evaluate_parts(outbox, data, function, torch.zeros(len(data), dtype=torch.bool))
        like = tree.take(here[1][0], slice(0, 0))
        number, names = self.plan.sites.next_sequence(), list(like)
        requests = {
            site: self._request("evaluate", index, self._own(index, None), outbox, number, metrics=names)
            for index, site in self._members()
        }
        heard = self._ask(requests, number, lambda site, frame: self._read_sums(site, frame, like))
        if heard.missing:
            raise RuntimeError(f"Expected scores of all sites, but got none of {_reasons(heard.missing)}")
        nothing = [tree.map(lambda leaf, n=n: leaf.new_zeros(n, *leaf.shape[1:]), like) for n in self.plan.counts]
        return tree.concatenate([heard.answers.get(site, none) for site, none in zip(self.plan.sites.names, nothing)])

    def tensors(self, outbox: Tree, ids: Tensor) -> Tree:
        """What clients predict with, where that does not depend on their own states; see `Clients.tensors`.

        Raises:
            ValueError: it does, and their states are at the sites.
        """
        if tree.leaves(self._local.table.initial):
            raise ValueError(
                "Expected an algorithm whose clients have no state of their own, but got one whose clients predict "
                "with it, at their sites; population.finish(run) tells the sites, whose `join` returns the models; "
                "run.global_module() is the server's"
            )
        return self._local.tensors(outbox, ids)

    def finish(self, outbox: Tree) -> None:
        """Tells the sites that the run is over, and what their clients hear last."""
        number, sites = self.plan.sites.next_sequence(), self.plan.sites
        for index, site in enumerate(sites.names):
            frame = self._request("over", index, self._own(index, None), outbox, number)
            sites.tell(site, self.run, self._begin, frame)

    def withdraw(self, site: str) -> Tree:
        """What a site's clients have told beyond their initial states; the site is not asked any more.

        Raises:
            ValueError: no such site, or one that has left, or no account was kept.
        """
        if site not in self.plan.sites.names:
            raise ValueError(f"Expected one of the sites {self.plan.sites.names}, but got {site!r}")
        return self._account.withdraw(self.plan.sites.names.index(site))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The run's identity at the sites, and which of each site's answers was last taken in."""
        kept = tuple(self._kept)
        if kept not in self._saved:
            self._saved.append(kept)
        run = torch.tensor(list(bytes.fromhex(self.run)), dtype=torch.uint8)
        return {"kept": torch.tensor(kept), "run": run, **self._account.state_dict()}

    def load_state_dict(self, flat: dict[str, Tensor]) -> None:
        """Goes back to what `state_dict` said; sites go back with their next request."""
        self.run, self._kept = bytes(flat["run"].tolist()).hex(), flat["kept"].tolist()
        self._saved.append(tuple(self._kept))
        self._account.load_state_dict(flat)

    def meet(self) -> None:
        """Sites are met when they are asked."""

    def introduce(self, about: Callable[[], Mapping[str, str]]) -> None:
        """Sites compare the algorithm's settings with their own when a run begins there."""

    # -- what is said ----------------------------------------------------------------------------------------------

    def _asked_of(self, sites: list[str], cohort: Tensor | None, lost: Tensor | None) -> Tensor:
        """The clients of some sites that were asked, but for those whose messages are lost in any case."""
        own = [self._own(self.plan.sites.names.index(site), cohort) for site in sites]
        ids = torch.cat([_NOBODY, *own])
        return ids if lost is None else ids[~torch.isin(ids, lost)]

    def _members(self) -> list[tuple[int, str]]:
        """The sites that have not left, by number."""
        return [(index, site) for index, site in enumerate(self.plan.sites.names) if not self._account.left[index]]

    def _own(self, index: int, ids: Tensor | None) -> Tensor:
        """Those of `ids`, None for all, that are at a site."""
        first, count = self.plan.firsts[index], self.plan.counts[index]
        if ids is None:
            return torch.arange(first, first + count)
        return ids[(ids >= first) & (ids < first + count)] if len(ids) else ids

    def _request(
        self, kind: str, index: int, ids: Tensor | None, outbox: Tree, number: int, more: Tree = None, **about: Any
    ) -> bytes:
        keep = sorted({saved[index] for saved in self._saved})
        about = {**about, "run": self.run, "sequence": number, "kept": self._kept[index], "keep": keep}
        if ids is None:
            return frames.encode(kind, None, **about)
        heard = Inboxes(ids, self.algorithm.exchange.scatter(outbox, _consecutive(ids)))
        return inbox.encode(kind, heard, more, **about)

    def _begin(self, site: str) -> bytes:
        about = {
            "run": self.run,
            "algorithm": self.plan.algorithm,
            "settings": self.plan.settings,
            "fingerprint": fingerprint(self.algorithm),
            "clients": len(self.plan.names),
            "first": self.plan.firsts[self.plan.sites.names.index(site)],
        }
        return frames.encode("begin", {"state": self._local.table.initial}, **about)

    def _ask(self, requests: dict[str, bytes], number: int, read: Callable[[str, Frame], Any]) -> Heard:
        least = math.ceil(self.plan.quorum * len(requests))
        question = Question(self.run, self._begin, requests, number, read)
        return self.plan.sites.ask(question, seconds=self.plan.seconds, least=least)

    def _check_quorum(self, heard: Heard, asked: int) -> None:
        least = math.ceil(self.plan.quorum * asked)
        if len(heard.answers) < least:
            raise RuntimeError(
                f"Expected answers of at least {least} of {asked} sites, but got {len(heard.answers)}, without "
                f"{_reasons(heard.missing)}; nothing of the round was kept: do it again by run.step(), or lower quorum"
            )

    def _keep(self, answers: Mapping[str, Answer], number: int) -> None:
        for index, site in enumerate(self.plan.sites.names):
            if site in answers:
                self._kept[index], partial = number, answers[site].partial
                if self.plan.withdrawals and partial is not None and self.algorithm.told is not None:
                    self._account.add(index, partial.told.value)

    # -- what is heard ---------------------------------------------------------------------------------------------

    def _read_round(self, site: str, frame: Frame) -> Answer:
        index = self.plan.sites.names.index(site)
        count, names = frame.integer("clients", 0, self.plan.counts[index]), frame.texts("info")
        refused = {
            int(k): str(field)[:200] for k, field in frame.names("refused").items() if len(k) < 20 and k.isdecimal()
        }
        ids = torch.empty(count, dtype=torch.int64)
        like = {
            "ids": ids,
            "info": {name: torch.empty(count, dtype=torch.float64) for name in names},
            "partial": self._partial(count) if count else None,
        }
        came = frame.tree(like, finite=False)
        self._check_ids(frame, index, [*came["ids"].tolist(), *refused])
        if not torch.equal(getattr(came["partial"], "ids", came["ids"]), came["ids"]):
            raise frame.refused("a message of each client that answered", "messages of others")
        if count and not is_finite(came["partial"]):
            field = next(iter(not_finite(tree.map(lambda leaf: leaf[None], came["partial"])).values()))
            raise frame.refused(f"finite numbers in {field!r}", "NaN or Inf")
        self._check_weights(frame, site, came["ids"], came["partial"])
        return Answer(came["ids"], came["info"], refused, came["partial"])

    def _check_weights(self, frame: Frame, site: str, ids: Tensor, partial: Tree) -> None:
        """Refuses messages that count for more rows than the site has said that its clients have."""
        if self.algorithm.settings.get("weight") is not rows_weight:
            return
        first = self.plan.firsts[self.plan.sites.names.index(site)]
        rows = sum(self.plan.sites.bring[site].rows[client - first] for client in ids.tolist())
        for name, leaf in tree.items(partial):
            if name.rpartition(".")[2] == "weight" and leaf.ndim < 2 and float(leaf.sum()) > rows:
                raise frame.refused(f"the weight of {rows} rows, which the site says it has", float(leaf.sum()))

    def _partial(self, count: int) -> Tree:
        """A partial aggregate of so many clients, as it looks; sums look alike of any number."""
        exchange = self.algorithm.exchange
        if exchange.additive and self._sums is not None:
            return self._sums
        rows = 0 if exchange.additive else count
        messages = tree.map(lambda leaf: leaf.new_zeros(rows, *leaf.shape[1:]), self._message)
        self._sums = exchange.gather(messages, torch.arange(rows))
        return self._sums

    def _read_total(self, site: str, frame: Frame) -> Tree:
        exchange, index = self.algorithm.exchange, self.plan.sites.names.index(site)
        return frame.tree({"told": self._told_by(0 if exchange.additive else self.plan.counts[index])})["told"]

    def _told_by(self, clients: int) -> Tree:
        """The partial aggregate of what so many clients tell in their initial state."""
        assert self.algorithm.told is not None
        told = self.algorithm.told(tree.expand(self._local.table.initial, 1))
        messages = Sum(tree.map(lambda leaf: leaf.expand(clients, *leaf.shape[1:]), told))
        return self.algorithm.exchange.gather(messages, torch.arange(clients))

    def _read_sums(self, site: str, frame: Frame, like: Tree) -> Tree:
        count = self.plan.counts[self.plan.sites.names.index(site)]
        sums = tree.map(lambda leaf: leaf.new_zeros(count, *leaf.shape[1:]), like)
        return frame.tree({"sums": sums}, finite=False)["sums"]

    def _check_ids(self, frame: Frame, index: int, ids: list[int]) -> None:
        first, count = self.plan.firsts[index], self.plan.counts[index]
        if any(not first <= client < first + count for client in ids) or len(set(ids)) != len(ids):
            raise frame.refused(f"different clients from {first} to {first + count - 1}", ids)


def _consecutive(ids: Tensor) -> Tensor | slice:
    """A slice, which is read as views, where it will do."""
    first, last = int(ids[0]), int(ids[-1]) + 1
    return slice(first, last) if last - first == len(ids) else ids


def _reasons(missing: Mapping[str, str]) -> str:
    return "; ".join(f"{site!r}: {why}" for site, why in missing.items())
