"""The server's halves of a run over sites: its requests, and the result of a round from the sites' answers.

`Sites` drives the halves over streams. Keys and envelopes, which sites need from each other, are requested before a
round; the later phases of a masked sum follow after it.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import checkpoint
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.algorithms.fedavg import rows_weight
from fedtorch.federation.exchanges.exchange import weights
from fedtorch.federation.populations.clients import LocalClients, joined
from fedtorch.federation.populations.population import Pending
from fedtorch.federation.turn import Turn
from fedtorch.protocol.halves import Half, Receive, Send
from fedtorch.random.named import numbers
from fedtorch.sites.audit.recording import ServerRecording
from fedtorch.sites.envelopes.envelopes import Envelopes
from fedtorch.sites.envelopes.keyring import DIRECTORY, Keyring
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds._account import Account
from fedtorch.sites.rounds._answer_looks import AnswerLooks, not_finite_in
from fedtorch.sites.rounds._masked import Asked, Sums, name_of_sum, start_for_all
from fedtorch.sites.rounds.fingerprint import fingerprint
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.plan import Plan
from fedtorch.sites.rounds.policy import OTHER_ROWS
from fedtorch.sites.rounds.sites import LATE, reasons
from fedtorch.tree import Tree

_NOBODY = torch.zeros(0, dtype=torch.int64)


class Answer(NamedTuple):
    """A site's answer to a round."""

    ids: Tensor  # (M,) its clients that answered
    info: dict[str, Tensor]  # (M,) each
    refused: dict[int, str]
    partial: Tree  # None if no client answered; bytes by name if the server may not read it


class ServerSession:
    """The server's part in a run over sites.

    Args:
        plan: the population's plan.
        algorithm: what clients compute.
        state: one client's initial state.
        account: sites' persistent contributions, and which sites have left.
        recording: audit record of the sites' answers.

    Attributes:
        run: the run's identity, in hexadecimal.
        local: an empty set of clients, for the structure and aggregation of messages.
        message: structure `(0, ...)` of clients' messages; None before the first round.
        kept: each site's last request whose answer was used.
        saved: `kept` at the last checkpoints.
        hidden: whether the server may not read messages.
        anyway: whether sites may take part whose rows have changed since the run began there.
        resumed: whether no round has finished since the run was loaded.
    """

    def __init__(
        self, plan: Plan, algorithm: Algorithm, state: Tree, account: Account, recording: ServerRecording
    ) -> None:
        self.plan, self.algorithm, self.account, self._recording = plan, algorithm, account, recording
        self.run, sites, self.anyway, self.resumed = secrets.token_hex(16), len(plan.sites.names), False, False
        self.hidden = plan.carry.masks is not None or plan.carry.network is not None
        self._ranges = {site: range(f, f + n) for site, f, n in zip(plan.sites.names, plan.firsts, plan.counts)}
        self._index = {site: index for index, site in enumerate(plan.sites.names)}
        self._all = {site: torch.arange(numbers.start, numbers.stop) for site, numbers in self._ranges.items()}
        self._keyring, self._sums, self._envelopes = self._hidden_transport()
        at_server = algorithm
        if self.hidden:  # hidden messages arrive as finished aggregates
            at_server = replace(algorithm, exchange=algorithm.exchange._replace(finish=lambda aggregate: aggregate))
        self.local = LocalClients(at_server, state, plan.names, [(_NOBODY, plan.nobody)], len(plan.names), None)
        self.message: Tree = None
        self._looks = AnswerLooks(algorithm.exchange)
        self._directory, self._senders = b"", list[str]()
        self.kept = [0] * sites
        self.saved: deque[tuple[int, ...]] = deque([(0,) * sites], maxlen=plan.checkpoints)

    def _hidden_transport(self) -> tuple[Keyring | None, Sums | None, Envelopes | None]:
        """Return (keyring, masked sums, envelopes), each None if the run does not need it."""
        plan, carry = self.plan, self.plan.carry
        carry.check(len(plan.names))
        if not self.hidden:
            return None, None, None
        least = 2 if carry.masks is None else carry.masks.sites
        if plan.roster is None or len(plan.sites.names) < least:
            raise ValueError(
                "Expected roster=identity.sign_roster(authority, roster), by which sites verify each other's keys, and "
                f"at least {least} sites, but got {len(plan.sites.names)} sites and "
                f"{'no roster' if plan.roster is None else 'a roster'}"
            )
        carry.check(len(plan.names), len(plan.sites.names))
        wait, number = self.wait, plan.sites.next_sequence
        keyring = Keyring(plan.roster, self._ranges, plan.rotate, wait, number)
        if carry.masks is None:
            return keyring, None, Envelopes(lambda site, number: self.request("envelopes", site, number), wait, number)
        return keyring, Sums(carry.masks, keyring, self._ranges, wait, number, plan.lost), None

    # -- a round ---------------------------------------------------------------------------------------------------

    def round(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None) -> Half:
        """Ask the sites of the cohort; return `Pending`, see `Clients.step`.

        Raises:
            RuntimeError: fewer sites than the quorum answered; the message says why, and the round can be repeated.
        """
        if self.message is None:
            self.message = self.local.reply(self.local.empty_block(), outbox, turn).message
        every = {site: self.of_site(site, cohort) for site in self.members()}
        asked = [site for site, ids in every.items() if len(ids)]
        start = b"" if self._sums is None else start_for_all(self.algorithm, self.plan.carry, outbox)
        missing = yield from self.prepare(asked, start)
        number, key = self.plan.sites.next_sequence(), turn.key.to("cpu", torch.int64)
        named = [site for site in asked if site not in missing]
        for site in named:
            ids, silent = every[site], self.of_site(site, _NOBODY if lost is None else lost)
            more, about = {"key": key, "lost": silent if len(silent) else None}, {"lost": len(silent)}
            yield self.request("round", site, number, self.inboxes(outbox, ids), more, round=turn.round, **about)
        received = yield self.wait(named, self.read)
        missing = {**missing, **received.missing}
        self._check_resumed(missing)
        self._check_quorum(received.messages, missing, len(asked))
        about_sum = b"" if self._sums is None else name_of_sum(start, turn)
        wanted = Asked(number, self.least(len(asked)), start, about_sum, missing)
        aggregate, answers = yield from self._aggregate(received.messages, wanted)
        if dropped := [site for site in received.messages if site not in answers]:
            out = {site: self.plan.sites.troubles.get(site, "it is not in the sum") for site in dropped}
            self._recording.left_out(self.run, out)
            missing = {**out, **missing}
        if self.plan.record is not None:
            self.plan.record.sync()
        self._check_quorum(answers, missing, len(asked))
        useful = [answer for answer in answers.values() if answer.partial is not None]
        ids, info = joined([(answer.ids, answer.info) for answer in useful])
        late = [site for site, why in missing.items() if why == LATE]
        away = [site for site in self.plan.sites.names if site not in answers and site not in late]
        return Pending(
            aggregate,
            ids,
            info,
            bytes_up=0,
            bytes_down=0,
            commit=lambda: self._commit(answers, number),
            refused={client: field for answer in answers.values() for client, field in answer.refused.items()},
            away=self._asked_of(away, cohort, lost),
            late=self._asked_of(late, cohort, lost),
        )

    def _aggregate(self, answers: dict[str, Answer], wanted: Asked) -> Half:
        """Return (the aggregate, the answers that are in it)."""
        partials = {site: answer.partial for site, answer in answers.items() if answer.partial is not None}
        exchange = self.algorithm.exchange
        if not partials:
            return None, answers
        if self._sums is not None:
            first = {site: blobs.get("said", b"") for site, blobs in partials.items()}
            wanted = wanted._replace(least=wanted.least - len(answers) + len(partials))  # others have nothing to add
            total, included = yield from self.add_up(first, self.message, wanted)
            answers = {site: answer for site, answer in answers.items() if site in included or answer.partial is None}
        elif self._envelopes is not None:
            total = exchange.finish(exchange.gather(self.message, _NOBODY))  # empty: only neighbours get messages
        else:
            total = exchange.merge(list(partials.values()))
        return self.local.finish(total, self.message), answers

    def _check_quorum(self, answers: Mapping[str, Any], missing: Mapping[str, str], asked: int) -> None:
        if len(answers) < (least := self.least(asked)):
            raise RuntimeError(
                f"Expected answers of at least {least} of {asked} sites, but got {len(answers)}, without "
                f"{reasons(missing)}; the round was discarded: repeat it by run.step(), or lower quorum"
            )

    def _check_resumed(self, missing: Mapping[str, str]) -> None:
        """Refuse to resume a run if rows at a site have changed; later rounds leave such sites out."""
        other = [site for site, why in missing.items() if why == OTHER_ROWS]
        if self.resumed and other:
            raise ValueError(
                f"Expected a checkpoint of a run on the rows that sites have, but those of {other} have changed since; "
                f"the round was discarded; pass {checkpoint.ANYWAY}"
            )

    def _asked_of(self, sites: Iterable[str], cohort: Tensor | None, lost: Tensor | None) -> Tensor:
        """Return the clients of some sites that were asked, without those whose messages are lost anyway."""
        every = [self.of_site(site, cohort) for site in sites]
        ids = torch.cat(every) if every else _NOBODY
        return ids if lost is None else ids[~torch.isin(ids, lost)]

    def _commit(self, answers: Mapping[str, Answer], number: int) -> None:
        self.resumed = False
        for index, site in enumerate(self.plan.sites.names):
            if site in answers:
                self.kept[index], partial = number, answers[site].partial
                if self._envelopes is not None and partial is not None:
                    self._envelopes.keep({site: partial})
                contributes = partial is not None and self.algorithm.told is not None
                if self.plan.withdrawals and not self.hidden and contributes:
                    self.account.add(index, partial.told.value)

    # -- answers ---------------------------------------------------------------------------------------------------

    def read(self, site: str, frame: Frame) -> Answer:
        """Read an answer to a round; raise `PayloadError` for anything else."""
        numbers = self._ranges[site]
        look = self._looks.of(frame, self.message, len(numbers), self.hidden)
        came = frame.tree(look.like, finite=False)
        self.local.noted.update(dict.fromkeys(came["info"]))
        ids = self._all[site] if look.everybody else came["ids"]
        clients = [] if look.everybody and not look.refused else [*ids.tolist(), *look.refused]
        if any(client not in numbers for client in clients) or len(set(clients)) != len(clients):
            raise frame.refused(f"different clients from {numbers.start} to {numbers.stop - 1}", clients)
        partial = came["partial"]
        if self.hidden:
            return Answer(ids, came["info"], look.refused, frames.plain(partial) if look.clients else None)
        ids_of_messages = getattr(partial, "ids", None)
        if ids_of_messages is not None and not torch.equal(ids_of_messages, ids):
            raise frame.refused("a message of each client that answered", "messages of others")
        if look.clients and (field := not_finite_in(partial)) is not None:
            raise frame.refused(f"finite numbers in {field!r}", "NaN or Inf")
        self._check_weights(frame, site, ids, partial)
        return Answer(ids, came["info"], look.refused, partial)

    def _check_weights(self, frame: Frame, site: str, ids: Tensor, partial: Tree) -> None:
        """Refuse negative weights, and weights above the rows that the site has reported for its clients."""
        every = weights(partial)
        if any(float(weight) < 0 if weight.ndim == 0 else bool((weight < 0).any()) for weight in every):
            raise frame.refused("weights of at least 0", "negative weights")
        if self.algorithm.weight is not rows_weight:
            return
        rows = sum(self._rows_of(site, ids))
        for weight in every:
            if (total := float(weight if weight.ndim == 0 else weight.sum())) > rows:
                raise frame.refused(f"a weight of at most {rows}, the rows that the site has reported", total)

    def _rows_of(self, site: str, ids: Tensor) -> Iterable[int]:
        """Return the reported row counts of some clients; those of all the site's clients if some are a mean."""
        site_data, first = self.plan.sites.bring[site], self._ranges[site].start
        rows = site_data.rows
        return rows if ids is self._all[site] or site_data.joined else [rows[k - first] for k in ids.tolist()]

    # -- requests --------------------------------------------------------------------------------------------------

    def prepare(self, asked: list[str], start: bytes = b"") -> Half:
        """Collect keys, and all sites' envelopes if there are any; return reasons by site not to ask it."""
        if self._keyring is None:
            return {}
        sites = asked if self._envelopes is None else self.members()
        out = {} if self._sums is None else self._sums.left_out(sites, start)
        missing = yield from self._keyring.gather([site for site in sites if site not in out], self.run)
        missing = {**out, **missing}
        self._senders = [site for site in self._ranges if site in sites and site not in missing]
        self._directory = self._keyring.directory(self._senders if self._envelopes is None else self._ranges)
        if self._envelopes is not None:
            yield from self._envelopes.gather([site for site in sites if site not in missing], self._directory)
        self.plan.sites.troubles.update(missing)
        return missing

    def request(
        self, kind: str, site: str, number: int, inboxes: frames.Inboxes | None = None, more: Tree = None, **about: Any
    ) -> Send:
        """Return a request to a site: its clients' inboxes, other tensors, the key directory and envelopes."""
        index = self._index[site]
        keep = sorted({saved[index] for saved in self.saved})
        about = {**about, "run": self.run, "sequence": number, "kept": self.kept[index], "keep": keep}
        blobs = {} if self._keyring is None else {DIRECTORY: self._directory}
        blobs |= {} if self._envelopes is None else self._envelopes.to(site)
        if inboxes is None:
            return Send(site, frames.encode_blobs(kind, blobs, **about), sequence=number)
        tensors, sizes = frames.coded(blobs)
        everybody = inboxes.ids is self._all[site]
        frame = frames.encode_inboxes(kind, inboxes, {"more": more, "blobs": tensors}, everybody, sizes=sizes, **about)
        return Send(site, frame, sequence=number)

    def inboxes(self, outbox: Tree, ids: Tensor) -> frames.Inboxes:
        """Return the inboxes of a site's clients; without content if the site builds them from envelopes."""
        if self._envelopes is not None:
            return frames.Inboxes(ids, None)
        return frames.Inboxes(ids, self.algorithm.exchange.scatter(outbox, frames.consecutive(ids)))

    def wait(self, sites: Iterable[str], read: Callable[[str, Frame], Any]) -> Receive:
        """Return the step that waits for sites' answers, at least for a quorum even if sites are disconnected."""
        names = tuple(sites)
        return Receive(names, frames.reading(read), least=self.least(len(names)), seconds=self.plan.seconds)

    def least(self, asked: int) -> int:
        """Return the number of answers that the quorum needs from `asked` sites."""
        return math.ceil(self.plan.quorum * asked)

    def members(self) -> list[str]:
        """Return the sites that have not been withdrawn."""
        return [site for site, left in zip(self.plan.sites.names, self.account.left.tolist()) if not left]

    def of_site(self, site: str, ids: Tensor | None = None) -> Tensor:
        """Return the clients of a site among `ids`; all of them if `ids` is None."""
        numbers = self._ranges[site]
        if ids is None:
            return self._all[site]
        return ids[(ids >= numbers.start) & (ids < numbers.stop)] if len(ids) else ids

    def add_up(self, first: Mapping[str, bytes], message: Tree, wanted: Asked) -> Half:
        """Return (the masked sum of messages like `message`, the sites in it), over the sites of `prepare`."""
        assert self._sums is not None
        return self._sums.add_up(self._senders, first, self.run, message, wanted)

    def forget(self) -> None:
        """Discard keys and envelopes, for another round or run: sites then send new ones."""
        if self._keyring is not None:
            self._keyring.forget()
        if self._envelopes is not None:
            self._envelopes.forget()

    def described(self) -> dict[str, Any]:
        """Return the algorithm, settings and fingerprint that sites run."""
        plan = self.plan
        compared = fingerprint(self.algorithm, plan.carry)
        return {"algorithm": plan.algorithm, "settings": plan.settings, "fingerprint": compared}

    def begin(self, site: str) -> bytes:
        """Return the frame that begins the run at a site."""
        about = {
            "run": self.run,
            **self.described(),
            "clients": len(self.plan.names),
            **({"anyway": True} if self.anyway else {}),
            "first": self._ranges[site].start,
        }
        place = slice(self._ranges[site].start, self._ranges[site].stop)
        tensors = {"state": self.local.table.initial, "names": numbers(self.plan.names)[place]}
        return self._recording.begin(site, about, tensors)
