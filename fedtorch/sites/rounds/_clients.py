"""The sites' clients in one run, as the server sees them."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm, Turn
from fedtorch.federation.populations.clients import LocalClients, joined
from fedtorch.federation.populations.population import Pending
from fedtorch.sites.audit.recording import ServerRecording
from fedtorch.sites.envelopes.keyring import Keyring
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds._account import Account
from fedtorch.sites.rounds._finished import state_of, tell_all
from fedtorch.sites.rounds._hidden import Hidden
from fedtorch.sites.rounds._masked import Asked, SumLost, name_of_sum, start_for_all
from fedtorch.sites.rounds._reading import Answer, Reader
from fedtorch.sites.rounds.fingerprint import fingerprint
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.plan import Plan
from fedtorch.sites.rounds.sites import LATE, Answers, Question, reasons
from fedtorch.tree import Tree

_NOBODY = torch.zeros(0, dtype=torch.int64)


class RemoteClients:
    """All sites' clients; see `Clients`. Their states never leave the sites.

    Args:
        plan: of the population.
        algorithm: what they compute.
        state: one client's initial state.

    Attributes:
        over: whether sites are told that the run is over.
    """

    def __init__(self, plan: Plan, algorithm: Algorithm, state: Tree) -> None:
        self.plan, self.algorithm = plan, algorithm
        self.run, sites = secrets.token_hex(16), len(plan.sites.names)
        names, nobody = plan.names, [(_NOBODY, plan.nobody)]
        self._up = self._down = 0  # bytes of the round
        self.over = False
        self._hidden, here = self._hide(), algorithm
        if self._hidden is not None:  # what comes of it are aggregates
            here = replace(algorithm, exchange=algorithm.exchange._replace(finish=lambda aggregate: aggregate))
        self._local = LocalClients(here, state, names, nobody, len(names), None)
        self._read = Reader(plan, algorithm, self._local.table.initial)
        self._kept = [0] * sites  # the last request of each site whose answer was taken in
        self._saved: deque[tuple[int, ...]] = deque([(0,) * sites], maxlen=plan.checkpoints)
        additive = algorithm.told is not None and algorithm.exchange.additive
        nothing = algorithm.exchange.finish(self._read.told_by(0)).value if plan.withdrawals and additive else None
        self._account = Account(sites, nothing)
        self._recording = ServerRecording(plan, algorithm)

    def step(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None = None) -> Pending:
        """Ask the sites of the cohort; see `Clients.step`.

        Raises:
            RuntimeError: fewer sites than the quorum answered; the message says why, and the round can be repeated.
        """
        if self._read.message is None:
            self._read.message = self._local.reply(self._local.empty_block(), outbox, turn).message
        self._up = self._down = 0
        self.over = False
        asked = [(index, site) for index, site in self._members() if len(self._own(index, cohort))]
        masked = self.plan.carry.masks is not None
        start = start_for_all(self.algorithm, self.plan.carry, outbox) if masked else b""
        missing = self._prepare(asked, start)
        number, key = self.plan.sites.next_sequence(), turn.key.to("cpu", torch.int64)
        requests: dict[str, bytes] = {}
        for index, site in asked:
            ids, silent = self._own(index, cohort), self._own(index, _NOBODY if lost is None else lost)
            more, about = {"key": key, "lost": silent}, {"round": turn.round, "lost": len(silent)}
            if site not in missing:
                requests[site] = self._request("round", index, ids, outbox, number, more, **about)
        heard = self._ask(requests, number, self._read.round)
        missing = {**missing, **heard.missing}
        self._check_quorum(heard.answers, missing, len(asked))
        wanted = Asked(number, self._least(len(asked)), start, name_of_sum(start, turn) if masked else b"", missing)
        aggregate, answers = self._meet(heard.answers, wanted)
        fell = {site: self.plan.sites.troubles.get(site, "it is not in the sum") for site in heard.answers}
        self._recording.left_out(self.run, {site: why for site, why in fell.items() if site not in answers})
        self._recording.sync()
        self._check_quorum(answers, {**fell, **missing}, len(asked))
        found = [answer for answer in answers.values() if answer.partial is not None]
        ids, info = joined([(answer.ids, answer.info) for answer in found])
        late = [site for site, why in missing.items() if why == LATE]
        away = [site for site in self.plan.sites.names if site not in answers and site not in late]
        return Pending(
            aggregate,
            ids,
            info,
            self._up,
            self._down,
            lambda: self._keep(answers, number),
            refused={client: field for answer in answers.values() for client, field in answer.refused.items()},
            away=self._asked_of(away, cohort, lost),
            late=self._asked_of(late, cohort, lost),
        )

    def total(self) -> Tree | None:
        """Return the total of what all clients tell for good, if all sites answer; see `Clients.total`."""
        exchange, members = self.algorithm.exchange, self._members()
        if self.plan.carry.network is not None:
            return None  # nodes have it, a row each
        if self._prepare(members):
            return None
        number = self.plan.sites.next_sequence()
        requests = {site: self._request("total", index, None, None, number) for index, site in members}
        heard = self._ask(requests, number, self._read.total)
        if heard.missing:
            return None
        if self._hidden is not None:
            try:
                wanted = Asked(number, len(members))
                return self._hidden.add_up(heard.answers, self.run, self._read.told_messages(0), wanted)[0].value
            except SumLost:
                return None
        left = [self._read.told_by(self.plan.counts[index]) for index in self._account.left.nonzero()[:, 0].tolist()]
        return exchange.finish(exchange.merge([*heard.answers.values(), *left])).value

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
        if self.plan.carry.network is not None:
            self._prepare([])
        number, names = self.plan.sites.next_sequence(), list(like)
        requests = {
            site: self._request("evaluate", index, self._own(index, None), outbox, number, metrics=names)
            for index, site in self._members()
        }
        heard = self._ask(requests, number, lambda site, frame: self._read.sums(site, frame, like))
        if heard.missing:
            raise RuntimeError(f"Expected scores of all sites, but got none of {reasons(heard.missing)}")
        nothing = [tree.map(lambda leaf, n=n: leaf.new_zeros(n, *leaf.shape[1:]), like) for n in self.plan.counts]
        return tree.concatenate([heard.answers.get(site, none) for site, none in zip(self.plan.sites.names, nothing)])

    def tensors(self, outbox: Tree, ids: Tensor) -> Tree:
        """Return what clients predict with, where that does not depend on their own states; see `Clients.tensors`.

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

    def finish(self, outbox: Tree, seconds: float = 0.0) -> None:
        """Tell the sites that the run is over, and what their clients hear last; those that are away have time."""
        tell_all(self.plan.sites, partial(self._tell_over, outbox), seconds)

    def _tell_over(self, outbox: Tree, here: Mapping[int, str]) -> list[int]:
        """Tell sites, and return the numbers of those that have it on their stream."""
        if self.plan.carry.network is not None:
            self._prepare([])
        number, sites = self.plan.sites.next_sequence(), self.plan.sites
        requests = {
            site: self._request("over", index, self._own(index, None), outbox, number) for index, site in here.items()
        }
        self._recording.over(self.run, requests)
        return [index for index, site in here.items() if sites.tell(site, self.run, self._begin, requests[site])]

    def withdraw(self, site: str) -> Tree:
        """Return the totals of a site's clients beyond their initial states; the site is not asked any more.

        Raises:
            ValueError: no such site, or one that has left, or no account was kept.
        """
        if site not in self.plan.sites.names:
            raise ValueError(f"Expected one of the sites {self.plan.sites.names}, but got {site!r}")
        taken = self._account.withdraw(self.plan.sites.names.index(site))
        self._recording.withdrawn(self.run, site)
        return taken

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The run's identity at the sites, and which of each site's answers was last taken in."""
        kept = tuple(self._kept)
        if kept not in self._saved:
            self._saved.append(kept)
        run = torch.tensor(list(bytes.fromhex(self.run)), dtype=torch.uint8)
        known = state_of(self.over, self.plan.sites.bring) | self._recording.state_dict() | self._account.state_dict()
        return {"kept": torch.tensor(kept), "run": run, **known}

    def load_state_dict(self, flat: dict[str, Tensor]) -> None:
        """Go back to what `state_dict` said; sites go back with their next request."""
        self._recording.load_state_dict(flat)
        self.run, self._kept = bytes(flat["run"].tolist()).hex(), flat["kept"].tolist()
        self._saved.append(tuple(self._kept))
        self.over = bool(flat["over"])
        self._account.load_state_dict(flat)
        if self._hidden is not None:
            self._hidden.forget()

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
        blobs = {} if self._hidden is None else self._hidden.to(self.plan.sites.names[index])
        if ids is None:
            return frames.encode_blobs(kind, blobs, **about)
        exchange, (tensors, sizes) = self.algorithm.exchange, frames.coded(blobs)
        hears = exchange.scatter(outbox, frames.consecutive(ids)) if self.plan.carry.network is None else None
        return frames.encode_inboxes(
            kind, frames.Inboxes(ids, hears), {"more": more, "blobs": tensors}, sizes=sizes, **about
        )

    def _hide(self) -> Hidden | None:
        """The way of what the server may not read, if the algorithm has such messages."""
        plan, carry = self.plan, self.plan.carry
        carry.check(len(plan.names))
        if carry.masks is None and carry.network is None:
            return None
        least = 2 if carry.masks is None else carry.masks.sites
        if plan.roster is None or len(plan.sites.names) < least:
            raise ValueError(
                f"Expected roster=identity.sign_roster(authority, roster) and at least {least} sites, which "
                f"believe each other's keys by it, but got {len(plan.sites.names)} sites and "
                f"{'no roster' if plan.roster is None else 'a roster'}"
            )
        carry.check(len(plan.names), len(plan.sites.names))
        own = {name: range(f, f + n) for name, f, n in zip(plan.sites.names, plan.firsts, plan.counts)}
        ask, number = self._ask, plan.sites.next_sequence
        keyring = Keyring(plan.roster, ask, number)
        return Hidden(carry, keyring, own, plan.rotate, ask, number, self._envelopes, plan.lost)

    def _envelopes(self, site: str, number: int) -> bytes:
        return self._request("envelopes", self.plan.sites.names.index(site), None, None, number)

    def _prepare(self, asked: list[tuple[int, str]], start: bytes = b"") -> dict[str, str]:
        """See to keys and envelopes, neighbours' envelopes of all; return why sites are not to be asked."""
        if self._hidden is None:
            return {}
        members = asked if self.plan.carry.network is None else self._members()
        missing = self._hidden.begin([site for _, site in members], self.run, start)
        self.plan.sites.troubles.update(missing)
        return missing

    def _meet(self, answers: dict[str, Answer], wanted: Asked) -> tuple[Tree, dict[str, Answer]]:
        """(the aggregate, the answers that are in it)."""
        found = {site: answer.partial for site, answer in answers.items() if answer.partial is not None}
        exchange = self.algorithm.exchange
        if not found:
            return None, answers
        if self._hidden is None:
            made = exchange.merge(list(found.values()))
        elif self.plan.carry.network is not None:
            made = exchange.finish(exchange.gather(self._read.message, _NOBODY))  # of what neighbours hear, nothing
        else:
            first = {site: said.get("said", b"") for site, said in found.items()}
            wanted = wanted._replace(least=wanted.least - len(answers) + len(found))  # others have nothing to add
            made, there = self._hidden.add_up(first, self.run, self._read.message, wanted)
            answers = {site: answer for site, answer in answers.items() if site in there or answer.partial is None}
        return self._local.finish(made, self._read.message), answers

    def _begin(self, site: str) -> bytes:
        about = {
            "run": self.run,
            "algorithm": self.plan.algorithm,
            "settings": self.plan.settings,
            "fingerprint": fingerprint(self.algorithm, self.plan.carry),
            "clients": len(self.plan.names),
            "first": self.plan.firsts[self.plan.sites.names.index(site)],
        }
        return self._recording.begin(site, about, {"state": self._local.table.initial})

    def _ask(self, requests: Mapping[str, bytes], number: int, read: Callable[[str, Frame], Any]) -> Answers:
        least = self._least(len(requests))
        read, digests = self._recording.asked(self.run, requests, read)
        question = Question(self.run, self._begin, requests, number, read)
        heard = self.plan.sites.ask(question, seconds=self.plan.seconds, least=least)
        self._up, self._down = self._up + heard.bytes_up, self._down + sum(map(len, requests.values()))
        self._recording.answered(self.run, number, digests, heard.missing)
        return heard

    def _least(self, asked: int) -> int:
        return math.ceil(self.plan.quorum * asked)

    def _check_quorum(self, answers: Mapping[str, Any], missing: Mapping[str, str], asked: int) -> None:
        least = self._least(asked)
        if len(answers) < least:
            raise RuntimeError(
                f"Expected answers of at least {least} of {asked} sites, but got {len(answers)}, without "
                f"{reasons(missing)}; nothing of the round was kept: do it again by run.step(), or lower quorum"
            )

    def _keep(self, answers: Mapping[str, Answer], number: int) -> None:
        for index, site in enumerate(self.plan.sites.names):
            if site in answers:
                self._kept[index], partial = number, answers[site].partial
                if self._hidden is not None and partial is not None:
                    self._hidden.keep({site: partial})
                told = partial is not None and self.algorithm.told is not None
                if self.plan.withdrawals and self._hidden is None and told:
                    self._account.add(index, partial.told.value)
