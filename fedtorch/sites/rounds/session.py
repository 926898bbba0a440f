"""A site's part in one run: its clients, what they are asked, and which round they stand in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import _files as files, checkpoint, functional, tree, wire
from fedtorch.data import FederatedData
from fedtorch.data.digests import different, noted
from fedtorch.federation.algorithm import Reply, first_total, start_of
from fedtorch.federation.disclosure import of_reply
from fedtorch.federation.exchanges.exchange import RowsOf
from fedtorch.federation.populations.clients import Gathered, LocalClients
from fedtorch.federation.populations.in_process import SMALL_BLOCK
from fedtorch.federation.turn import Turn
from fedtorch.learns import Field
from fedtorch.protocol.versions import FIRST, Versions
from fedtorch.sites.envelopes.envelopes import SiteEnvelopes
from fedtorch.sites.envelopes.keyring import DIRECTORY, SiteKeys
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.rounds import _after_fit as after_fit, frames as frames
from fedtorch.sites.rounds._behind import Behind, behind
from fedtorch.sites.rounds._masked import Guard, Part, name_of_sum, one_of, site_half, start_of_sum
from fedtorch.sites.rounds._pseudonyms import Pseudonyms
from fedtorch.sites.rounds.configuration import SiteConfiguration
from fedtorch.sites.rounds.disclosed import conversation
from fedtorch.sites.rounds.fingerprint import built, fingerprint
from fedtorch.sites.rounds.frames import Frame, run_of
from fedtorch.sites.rounds.in_use import take
from fedtorch.sites.rounds.past_sums import PastSums, Step, digest_of_start
from fedtorch.sites.rounds.policy import OTHER_ROWS, Refusal, Watch, check_sizes, in_one
from fedtorch.sites.secure.grid import largest_of
from fedtorch.sites.secure.masked import Found
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
MOST_CLIENTS = 10_000_000
_KEY = torch.zeros((), dtype=torch.int64)
_BEGUN = ("algorithm", "settings", "fingerprint", "clients", "first")  # of a server's `begin`


class SiteSession:
    """A site's part in a run, from the server's `begin`.

    Where the site's policy has a minimum above one, its clients draw by keys that its secret makes of all that is
    asked: the server's key, the settings of the algorithm, the tensors that are sent, which clients are asked, and the
    states that they are in. By the server's key alone a batch would be a sum over rows that the server knows. Without
    the others a server could ask for two sums that differ by a row, or by a client's batch, or for the same few rows at
    many starts. Draws are each client's own, by its name: nothing that sites must have in common, such as cohorts,
    faults, or what sums under masks are called, is drawn here.

    Args:
        configuration: what the site brings.
        watch: over its policy, one for each site.
        begin: the server's frame.
        folder: where versions of the states are kept, in a folder of the run's own; None for nowhere.
        identity: with which the site signs the keys that sums under masks and sealed envelopes need.
        past: the sums under masks that the site has taken part in; default: those of the folder.
        versions: of the states, where the run goes on that the site was in; default: those of the folder.
        secret: of the site, by which it draws; default: one of the session's own.
        approve: raises `Refusal` where the site's people do not want the session, of which it may ask what leaves.

    Attributes:
        run: the run's identity, in hexadecimal.
        algorithm: as the site has built it.
        clients: of the site.
        over: whether the run has ended.
        about: what the server has begun it with.
        versions: of the clients' states.
        leaves: what leaves the site in a round, field by field, of all rounds so far; nothing before the first.

    Raises:
        Refusal: the site does not offer that, or would run something else under that name.
        PayloadError: the frame is not as it should be.
    """

    def __init__(
        self,
        configuration: SiteConfiguration,
        watch: Watch,
        begin: Frame,
        folder: Path | None,
        identity: Identity | None = None,
        past: PastSums | None = None,
        versions: Versions | None = None,
        secret: Pseudonyms | None = None,
        approve: Callable[[SiteSession], None] = lambda session: None,
    ) -> None:
        self.about = {name: begin.about.get(name) for name in _BEGUN}
        self.configuration, self.watch, self.run, self.over = configuration, watch, run_of(begin), False
        self.algorithm, self._carry = built(configuration, begin)
        take(watch, begin.text("algorithm"), self.algorithm)
        self._secret = Pseudonyms(folder) if secret is None else secret
        self._count = len(configuration.data)
        total = begin.integer("clients", self._count, MOST_CLIENTS)
        self.first = begin.integer("first", 0, total - self._count)
        watch.begin(self.algorithm, total)
        self._rows = behind(configuration, self.first)
        start = tree.map(lambda leaf: leaf.detach().clone(), start_of(self.algorithm))
        server, like = self.algorithm.init(start, total)
        if self.algorithm.told is not None:
            server = server._replace(total=first_total(self.algorithm, like, total))
        first = self.algorithm.exchange.scatter(self.algorithm.outbox(server), slice(self.first, self.first + 1))
        self._heard = tree.map(lambda leaf: leaf[0], first)  # one client's inbox
        sent = begin.tree({"state": like, "names": torch.zeros(self._count, dtype=torch.int64)}, finite=False)
        state = sent["state"]
        check_sizes(state)
        self._names = torch.zeros(total, dtype=torch.int64)  # by which the clients draw: those that the server knows
        self._names[self.first : self.first + self._count] = sent["names"]
        self._past = PastSums(folder, configuration.policy.remember_sums) if past is None else past
        self._keys = self._hide(identity, total)
        self._part: Part | None = None
        self._sent = 0.0  # the largest number that clients have heard last, in size
        self._envelopes = self._correspond(server, like)
        at_site = self._carry.carried(self.algorithm)
        at_site = replace(at_site, exchange=frames.at_site(at_site.exchange))
        names = ("",) * self.first + configuration.data.names + ("",) * (total - self.first - self._count)
        blocks = [(ids + self.first, block) for ids, block in configuration.data.buckets(small=SMALL_BLOCK)]
        self.clients = LocalClients(at_site, state, names, blocks, total, configuration.chunk)
        approve(self)
        self._lasting = bool(tree.leaves(state))
        self.versions = Versions(None if folder is None else folder / self.run) if versions is None else versions
        if self.versions.folder is not None:
            anyway = begin.about.get("anyway") is True
            check_begun(self.versions, begin.text("algorithm"), configuration.data, anyway)
        self.versions.put(FIRST, self.clients.state_dict())
        self.leaves: list[Field] = []
        self._noted = set[str]()  # names of what clients tell beside their messages, as `leaves` has them
        self._version: int | None = FIRST
        self._wanted: set[int] | None = None  # versions to which the server may go back; None: no others are here
        self._last: frames.Inboxes | None = None
        self._rounds: frames.Known = {}
        self._everybody = torch.arange(self.first, self.first + self._count)
        self._few, self._silent = len(self._rows.few(self._everybody)) > 0, False

    def _hide(self, identity: Identity | None, clients: int) -> SiteKeys | None:
        """Return keys, where the server may not read what clients send."""
        carry = self._carry
        try:
            carry.check(clients)
        except ValueError as error:
            raise Refusal(str(error)) from None
        if carry.masks is not None:
            self._past.open()
        hidden = carry.masks is not None or carry.network is not None
        return SiteKeys(identity, self.run, self.first, self._count) if hidden else None

    def _correspond(self, server: Tree, state: Tree) -> SiteEnvelopes | None:
        """Return envelopes, where neighbours hear each other through the server."""
        network = self._carry.network
        if network is None or self._keys is None or self.algorithm.told is None:
            return None
        initial = self.algorithm.told.of(tree.expand(state, 1))
        return SiteEnvelopes(self._keys, self.algorithm, network, server, initial, self._own)

    @cached_property
    def _settings(self) -> dict[str, str]:
        return fingerprint(self.algorithm)

    @property
    def _own(self) -> range:
        """Return the numbers of the site's clients."""
        return range(self.first, self.first + self._count)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the site's clients, in the order in which the server hears of them; see `Site`."""
        return self.configuration.data.names

    def goes_on_as(self, begin: Frame) -> bool:
        """Return whether a server that begins the run again wants what the site does already."""
        return self.about == {name: begin.about.get(name) for name in _BEGUN}

    def disclosed(self) -> list[Field]:
        """Return what may leave the site in the run, as `Run.disclosure` does, but for what its policy refuses."""
        turn = Turn(_KEY, 0, names=self._names)
        nobody = frames.Inboxes(torch.zeros(0, dtype=torch.int64), tree.expand(self._heard, 0))
        answered = self.clients.disclosed(self.algorithm, self._carry, nobody, turn, at_sites=True)
        every = [*answered, *conversation(self.algorithm, self._carry, ["neighbours' sites"], answered)]
        return [field for field in every if self._may_leave(field.message)]

    def _may_leave(self, message: str) -> bool:
        """Return whether the site would send a message of a kind at all."""
        from fedtorch.inference.questions import QUESTIONS

        configuration, asked = self.configuration, message.removeprefix("ask ")
        if message == "agree":
            return configuration.frame is not None
        if message == "evaluate":
            return configuration.validation is not None
        return asked == message or QUESTIONS[asked].tells in configuration.policy.after_fit

    def settle(self, frame: Frame) -> None:
        """Go to the version that the server counts on; what it does not go back to is left to `forget`.

        Raises:
            Refusal: that version is lost.
        """
        kept, keep = frame.integer("kept"), frame.integers("keep")
        if kept != self._version and self._lasting:
            states = self.versions.get(kept)
            if states is None:
                raise Refusal(f"the site does not have version {kept} of its states of run {self.run} any more")
            self._version = None  # until all of it is loaded
            self.clients.load_state_dict(states)
        self._version, self._wanted = kept, {kept, *keep}

    def forget(self) -> None:
        """Forget the versions of the states that the server does not go back to, as it has said last.

        To be called when an answer has left, since deleting files may take as long as computing one.

        Raises:
            OSError: a file cannot be deleted.
        """
        wanted, self._wanted = self._wanted, None
        if wanted is not None and self._lasting and self._version is not None:
            self.versions.retain({self._version, *wanted})

    def round(self, frame: Frame) -> bytes:
        """Run the clients that are asked, keeps their new states as a version of its own, and answers."""
        number = frame.integer("sequence", 1)
        if self._part is not None and self._part.number == number:  # under the same masks nothing is said twice
            return self._part.begun
        silent = frame.integer("lost", 0, self._count)
        more = {"key": _KEY, "lost": torch.zeros(silent, dtype=torch.int64) if silent else None}
        inboxes, more, blobs = self._hear(frame, more, self._rounds if self._keys is None else None)
        turn = Turn(more["key"], frame.integer("round"), names=self._names)
        start = start_of_sum(self.algorithm, one_of(inboxes.inbox)) if self._carry.masks is not None else b""
        self._silent = self._few and self._sends_nothing(inboxes, turn)
        self.watch.count()  # also what is refused then, which may tell whose rows are whose
        self._check_rows(inboxes.ids)
        lost = self._wait(inboxes.ids, more["lost"])
        drawing = turn.with_key(lambda: self._key_of_round(turn, inboxes, lost))
        self.watch.before(self.algorithm, drawing, inboxes.ids)
        cohort = None if inboxes.ids is self._everybody else inboxes.ids
        gathered = self._gathered(inboxes, cohort, drawing, lost)
        if gathered.message is not None and (not self.leaves or self.clients.noted.keys() - self._noted):
            self._noted = set(self.clients.noted)
            reply = Reply(gathered.message, None, dict.fromkeys(self.clients.noted, torch.empty(0)))
            self.leaves = of_reply(self.algorithm, self._carry, reply, at_sites=True)
        unfit, spent = {**gathered.failed, **gathered.refused}, self._is_spent
        if unfit and (self._adds or self._carry.masks is not None):
            why = f"fail, or their messages are not finite: {next(iter(unfit.values()))}"
            self._rows.note("no sum", torch.tensor(list(unfit)), why)
            self.watch.failed(hidden=self._carry.masks is not None)
            if self._carry.masks is None:
                raise Refusal(
                    "the site adds up clients with few rows, and not every message is finite; its own log says whose; "
                    "take smaller steps or another start, or leave out clients whose rows are at fault"
                )
        if spent:
            _LOG.warning("so many rounds under masks have failed here that they are chance: see Policy(refusals=)")
        if spent or (unfit and self._carry.masks is not None):
            gathered = self._chance(inboxes, lost, turn)
        for client, error in gathered.failed.items():
            raise ValueError(f"client {self.names[client - self.first]!r} could not take part: {error}") from error
        self._check_rows(gathered.ids)  # some may be lost, or refused
        taken = self._taken(drawing)
        if taken is not None and self._carry.masks is None and not self.watch.counts(self.algorithm.budget):
            self._rows.check_taken(gathered.ids, self._silent or self.algorithm.exchange.additive, taken)
        self._rows.check_first(self._first(gathered.ids))
        self._remember(inboxes.inbox, gathered)
        step = None if self.algorithm.told is None else Step(self.run, self._version or FIRST, number)
        self._version = None  # until the new states are kept
        self.clients.commit(gathered.states)
        if self._lasting:
            self.versions.put(number, self.clients.state_dict())
        self._version = number
        info = {} if self._keys is not None else self._told_of(gathered.info, gathered.ids, drawing)
        everybody = len(gathered.ids) == self._count
        tensors = {"ids": None if everybody else gathered.ids, "info": info, "partial": gathered.partial}
        refused = {str(client): field for client, field in gathered.refused.items()}
        about: dict[str, Any] = {"clients": len(gathered.ids), "info": list(info), "refused": refused}
        about |= {frames.EVERYBODY: True} if everybody else {}
        if self._keys is None:
            return frames.encode("answer", tensors, sequence=number, **about)
        said: dict[str, bytes] = {}
        if self._envelopes is not None:
            said = self._envelopes.write(blobs.get(DIRECTORY, b""), self._told())
        elif len(gathered.ids):
            clients = [self.names[client - self.first] for client in gathered.ids.tolist()]
            guard = partial(self._past.of_round, start, clients, step)
            found = Found(gathered.partial, not (unfit or spent), self._sent)
            self._part = self._sum(number, name_of_sum(start, turn), blobs, found, guard)
            said = {"said": self._part.first()}
        elif step is not None:
            self._past.advance(step)
        coded, sizes = frames.coded(said)
        answer = frames.encode("answer", {**tensors, "partial": coded}, sequence=number, sizes=sizes, **about)
        if self._part is not None:
            self._part.begun = answer
        return answer

    def _key(self, purpose: str, key: Tensor, sent: Tree, about: Any) -> Tensor:
        """Return the key of the draws of an answer: the server's, or the site's own where its policy counts rows.

        Args:
            purpose: what is asked.
            key: of the server.
            sent: the tensors that are sent beside it.
            about: what else is asked, as JSON.
        """
        if self.watch.policy.minimum == 1:
            return key
        settings = {"about": about, "settings": self._settings}
        return self._secret.key(purpose, wire.encode({"key": key, "sent": sent}, settings))

    def _key_of_round(self, turn: Turn, inboxes: frames.Inboxes, lost: Tensor | None) -> Tensor:
        """Return the key of the draws of a round, another for every set of clients whose messages count.

        Were it the same for two sets, their sums would differ by the batch of a client. Nor may it be for two states
        of a client: what it makes of the same few rows at many states tells of these rows.
        """
        ids = self._counted(inboxes.ids, lost)
        sent = {
            "inbox": tree.map(_once, inboxes.inbox),
            "states": self.clients.table.read(ids),
            "names": self._names[ids],  # that the server has given them
        }
        clients = [self.names[client - self.first] for client in ids.tolist()]
        return self._key("a round", turn.key, sent, {"round": turn.round, "clients": clients})

    def _counted(self, ids: Tensor, lost: Tensor | None) -> Tensor:
        """Return those of the clients that were asked whose messages count."""
        return ids if lost is None else ids[~torch.isin(ids, lost)]

    def _gathered(self, inboxes: frames.Inboxes, cohort: Tensor | None, turn: Turn, lost: Tensor | None) -> Gathered:
        """Return what clients answer; under masks all of them as failed where anything fails, whatever it is."""
        try:
            return self.clients.gather(inboxes, cohort, turn, lost)
        except Exception as error:
            if self._carry.masks is None:
                raise
            _LOG.exception("clients could not answer")
            return Gathered(None, [], inboxes.ids, {}, 0, 0, {}, dict.fromkeys(inboxes.ids.tolist(), error), None)

    def _chance(self, inboxes: frames.Inboxes, lost: Tensor | None, turn: Turn) -> Gathered:
        """Return a round of all clients that were asked, whose messages are in no sum: it is chance."""
        ids = self._counted(inboxes.ids, lost)
        nobody = self.clients.reply(self.clients.empty_block(), inboxes, turn).message
        return Gathered(RowsOf(ids[:0], nobody), [], ids, {}, 0, 0, {}, {}, None)

    def total(self, frame: Frame) -> bytes:
        """Return the total of what the site's clients tell for good."""
        number = frame.integer("sequence", 1)
        if self.algorithm.told is None:
            raise Refusal("the algorithm's clients tell nothing for good")
        if self._envelopes is not None:
            raise Refusal("the site tells what its nodes tell to their neighbours only")
        self._check_rows(self._everybody)
        if self._carry.masks is None:
            return frames.encode("answer", {"told": self.clients.told_here()}, sequence=number)
        if self._part is None or self._part.number != number:
            version = self._version or FIRST
            guard = partial(self._past.of_total, Step(self.run, version, version))
            found = Found(self.clients.told_here(), whole=not self._is_spent, largest=self._sent)
            self._part = self._sum(number, b"", frame.blobs(), found, guard)
            self._part.begun = frames.encode_blobs("answer", {"said": self._part.first()}, sequence=number)
        return self._part.begun

    def keys(self, frame: Frame) -> bytes:
        """Return the keys with which the site speaks to others in this run."""
        if self._keys is None:
            raise Refusal("the algorithm lets the server read what clients send, and needs no keys")
        return self._keys.announce(frame)

    def phase(self, frame: Frame) -> bytes:
        """Return the site's message of a later phase of a sum under masks."""
        if self._part is None:
            raise Refusal("the site is in no sum under masks; it may have begun anew since")
        return self._part.answer(frame)

    def envelopes(self, frame: Frame) -> bytes:
        """Return envelopes to the sites of a directory, of what the site's nodes have told last."""
        if self._envelopes is None:
            raise Refusal("the algorithm's clients write no envelopes")
        said = self._envelopes.write(frame.blobs().get(DIRECTORY, b""), self._told())
        return frames.encode_blobs("answer", said, sequence=frame.integer("sequence", 1))

    def _sends_nothing(self, inboxes: frames.Inboxes, turn: Turn) -> bool:
        """Return whether clients send no message, as in separate training, so that only losses leave."""
        return not tree.leaves(self.clients.reply(self.clients.empty_block(), inboxes, turn).message)

    def _check_rows(self, ids: Tensor) -> None:
        """Refuse an answer of clients with few rows; of sums under masks, which are of several sites, none is known.

        Where nothing but losses is sent, clients train all together: else one that has trained alone would be what two
        means of all clients differ by.
        """
        if self._silent and len(ids) < self._count:
            raise Refusal(
                "the site's clients send nothing but losses, and one of them has few rows; where some trained without "
                "the others, the mean of all would tell of these; ask all clients of the site"
            )
        if self._carry.masks is None and not self._silent:
            self._rows.check(ids, self.algorithm.exchange.additive)

    @property
    def _is_spent(self) -> bool:
        """Return whether the site says chance under masks, as it has failed there too often."""
        return self._carry.masks is not None and self.watch.is_spent()

    @property
    def _adds(self) -> bool:
        """Return whether the server reads sums of the site's clients, some of whom have few rows."""
        return self._few and self.algorithm.exchange.additive and self._carry.masks is None

    def _first(self, ids: Tensor) -> Tensor:
        """Return those of some clients that would tell for good for the first time, where that leaves as a sum."""
        if self.algorithm.told is None or not self._adds:
            return ids[:0]
        return ids[~torch.isin(ids, self.clients.table.touched())]

    def _wait(self, ids: Tensor, lost: Tensor | None) -> Tensor | None:
        """Return the clients whose messages do not count, those among them that wait for others to tell with."""
        asked = self._counted(ids, lost)
        first = self._first(asked)
        if len(first) == len(asked):  # then there is nobody else who could answer
            self._rows.check_first(first)
        if self._rows.is_enough(first):
            return lost
        self._rows.note("left out until others tell for good for the first time with them", first)
        return first if lost is None else torch.cat([lost, first])

    def _remember(self, inbox: Tree, gathered: Gathered) -> None:
        """Refuse a sum that tells of few rows with earlier ones, and remember it otherwise.

        Earlier ones are those over the same start and, of what clients tell for good, those of the run: where it goes
        back and then on with other clients, totals differ by these. A sum over several starts is none of them, and
        refused: two that differ in one client's start would tell what that client makes of both.
        """
        if not self._adds or not tree.leaves(gathered.partial):
            return
        start = digest_of_start(one_of(inbox), fingerprint(self.algorithm))
        sums = {start: gathered.ids}
        if self.algorithm.told is not None:
            sums[bytes.fromhex(self.run)] = torch.cat([self.clients.table.touched(), gathered.ids]).unique()
        for key, ids in sums.items():
            clients = [self.names[client - self.first] for client in ids.tolist()]
            self._past.cohorts.add(key, clients, self.names, self._rows.named, self._rows.least)

    def _taken(self, drawing: Turn, name: str = "") -> int | None:
        """Return how many rows, or persons, each client has taken in a round at least; None for all of its own.

        Args:
            drawing: in the round.
            name: of what it tells beside its message, which may be of fewer.
        """
        taken = [drawing.taken[each] for each in {"", name} & drawing.taken.keys()]
        return max(1, min(taken) // self.configuration.rows_of_a_person()) if taken else None

    def _told_of(self, info: dict[str, Tensor], ids: Tensor, drawing: Turn) -> dict[str, Tensor]:
        """Return clients' diagnostics `(M,)`, joined where one is of few rows, of those that a client has and takes.

        Means of two cohorts, and the values of one of them, tell those that are in one of them only. Where the memory
        of past sums does not know their rows, only the mean of all clients is told, NaN of others.
        """
        told = {}
        for name, values in info.items():
            taken = self._taken(drawing, name)
            if not self._silent and len(self._rows.few(ids, taken)) == 0:
                told[name] = values
            elif len(ids) == self._count or self._is_remembered(ids, taken):
                told[name] = self._rows.joined(values, ids, taken)
            else:
                told[name] = torch.full_like(values, torch.nan)
        return told

    def _is_remembered(self, ids: Tensor, taken: int | None) -> bool:
        """Return whether past sums keep two cohorts apart by enough of the rows that are in a number of theirs.

        They count all rows of clients, of which a last batch has fewer, and know no cohorts where nothing is sent.
        """
        return not self._silent and len(self._rows.few(ids, taken)) == len(self._rows.few(ids))

    def _sum(self, number: int, about: bytes, blobs: dict[str, bytes], found: Found, guard: Guard) -> Part:
        """Return the site's part of a sum."""
        assert self._keys is not None
        directory = blobs.get(DIRECTORY, b"")
        return Part(site_half(self._carry.masks, self._keys, directory, number, about, found, guard), number)

    def _told(self) -> Tree:
        """Return what all the site's clients tell for good, `(K, ...)`."""
        assert self.algorithm.told is not None
        return self.algorithm.told.of(self.clients.table.read(slice(self._own.start, self._own.stop)))

    def evaluate(self, frame: Frame) -> bytes:
        """Return the sums of the metrics that are asked for, of each client's model on its validation rows."""
        wanted = frame.texts("metrics")
        if self.configuration.validation is None or not set(wanted) <= self.configuration.metrics.keys():
            raise Refusal(f"the site has validation rows for {sorted(self.configuration.metrics)}, not for {wanted}")
        inboxes, _, _ = self._hear(frame)
        self.watch.count()
        validation, additive = self.configuration.validation, self.algorithm.exchange.additive
        known = (self.watch.policy, validation.counts, validation.names, self.first)
        rows = Behind(*known, rows="validation rows")
        few = len(rows.few(self._everybody)) > 0
        if few and additive and len(inboxes.ids) != self._count:
            raise frame.refused("all clients of the site, some of which have few validation rows", inboxes.ids.tolist())
        rows.check(inboxes.ids, additive)  # where each client has a model of its own, a sum of scores may follow one's
        if few and additive:
            one_of(inboxes.inbox)
            one_of(self.clients.algorithm.model(inboxes.inbox, self.clients.table.read(inboxes.ids)), "have one model")
        made = after_fit.scoring(self.algorithm, {name: self.configuration.metrics[name] for name in wanted})
        every = after_fit.by_client(self.clients, inboxes, validation.select(inboxes.ids - self.first), made)
        every = in_one(every) if few and additive else every
        return frames.encode("answer", {"sums": every}, sequence=frame.integer("sequence", 1))

    def ask(self, frame: Frame, beside: Callable[[str | None], SiteConfiguration]) -> bytes:
        """Return the answer to a question after the fit, if the site's policy lets it tell that.

        Args:
            frame: that asks.
            beside: returns the configuration with the rows of another run, by its design.
        """
        from fedtorch.federation.runs.holders import Holder, is_key, on_cpu

        if self._keys is not None:
            raise Refusal("the site lets the server read nothing, as its policy's carry= says, also after a fit")
        kind, like = after_fit.question(frame, self.algorithm)
        inboxes, sent, _ = self._hear(frame, like)
        if len(inboxes.ids) != self._count:
            raise frame.refused("all clients of the site", inboxes.ids.tolist())
        each = kind.by_client or kind.alone
        least = int(self._rows.each(inboxes.ids).min()) if each else self._rows.all(inboxes.ids)
        self.watch.after_fit(kind.tells, least)
        if self._few and self.algorithm.exchange.additive:
            one_of(inboxes.inbox)
        evaluate = on_cpu(partial(after_fit.by_client, self.clients, inboxes))
        configuration = self.configuration
        minimum = self.watch.policy.minimum * configuration.rows_of_a_person()  # so many rows are of enough persons
        data, names = configuration.data.to("cpu"), self._names[self._everybody]
        holder = Holder(self.algorithm, data, names, evaluate, self.first, configuration.frame, minimum)
        others = after_fit.others(frame, beside)
        of_draws = {
            "sent": sent,
            "names": names,
            "rows": noted(data),  # of which one may be new
            "beside": {str(number): noted(its.data) for number, (its, _) in enumerate(others)},
        }
        about = {"question": kind.name, "about": dict(frame.names("about")), "minimum": minimum}
        own = {name: self._key("a question", sent[name], of_draws, about) for name in sent if is_key(name)}
        return after_fit.answer(frame, kind, {**sent, **own}, holder, others)

    def end(self, frame: Frame) -> None:
        """Keep what the clients hear last; the run is over."""
        self._last, _, _ = self._hear(frame)
        self.over = True
        self.versions.finish()

    def tensors(self) -> Tree:
        """Return the tensors that the site's clients predict with after the run, `(K, ...)` in the order of `names`.

        Raises:
            ValueError: the server has not said that the run is over.
        """
        if self._last is None:
            raise ValueError("Expected a run that is over, but the server has not said so yet; it does by finish(run)")
        return self.clients.tensors(self._last, self._last.ids)

    def client_module(self, client: str) -> nn.Module:
        """Return a copy of the module with the tensors that a client of the site, by name, predicts with."""
        if client not in self.names:
            raise ValueError(f"Expected one of the site's clients {self.names}, but got {client!r}")
        if self.algorithm.module is None:
            raise ValueError("Expected an algorithm of a module, but got one without; use tensors()")
        number = self.names.index(client)
        module = functional.load(self.algorithm.module, tree.map(lambda leaf: leaf[number].clone(), self.tensors()))
        if self.algorithm.posterior is not None:
            self.algorithm.posterior.finish(module, self.configuration.data[number])
        return module

    def save(self, path: Path | str) -> None:
        """Write the tensors that the site's clients predict with after the run, by client and name, as safetensors.

        The file is for its owner alone, as all of a site are.
        """
        tensors = tree.flatten(self.tensors())
        flat = {f"{client}.{name}": leaf[k] for k, client in enumerate(self.names) for name, leaf in tensors.items()}
        files.private_folder(Path(path).parent)
        checkpoint.write(path, flat, private=True)

    def _hear(
        self, frame: Frame, more: Tree = None, known: frames.Known | None = None
    ) -> tuple[frames.Inboxes, Tree, dict[str, bytes]]:
        """Return (what the site's clients hear, the tensors beside it, bytes by name)."""
        room = {} if self._keys is None else frame.room()
        like = None if self._envelopes is not None else self._heard
        beside = {"more": more, "blobs": room}
        inboxes, came = frames.decode_inboxes(frame, like, self._everybody, beside, known)
        blobs = frames.plain(came["blobs"])
        if self._envelopes is not None:
            inboxes = inboxes._replace(inbox=self._envelopes.heard(blobs, self._told(), inboxes.ids))
        check_sizes({"inbox": inboxes.inbox, "more": came["more"]})
        self._sent = largest_of(inboxes.inbox)
        if self.clients.device.type != "cpu":
            inboxes = inboxes._replace(inbox=tree.to(inboxes.inbox, self.clients.device))
        return inboxes, came["more"], blobs


def _once(leaf: Tensor) -> Tensor:
    """Return clients' values `(K, ...)`, those that all have in common once."""
    same = len(leaf) > 0 and (leaf.stride(0) == 0 or torch.equal(leaf, leaf[:1].expand_as(leaf)))
    return leaf[:1] if same else leaf


def check_begun(versions: Versions, algorithm: str, data: FederatedData, anyway: bool) -> None:
    """Note what a run begins with at a site, or compare it with what was noted; `anyway` takes and notes other rows.

    A server that goes on with a run, or a site that does after it was killed, finds the same there or is refused. What
    is noted of rows stays at the site, which says only whether they are the same.

    Raises:
        Refusal: it is another algorithm, or the rows are others.
        ValueError: what was noted is damaged.
    """
    before, rows = versions.beginning(), dict(noted(data))
    if before is not None:
        check_name(bytes(before["algorithm"].tolist()).decode(), algorithm)
        same = different(before, rows, data.names) is None
        if same:
            return
        if not anyway:
            raise Refusal(OTHER_ROWS)
    text = torch.tensor(list(algorithm.encode()), dtype=torch.uint8)
    versions.note_beginning({**rows, "algorithm": text})


def check_name(before: str, now: str) -> None:
    """Refuse another algorithm than that with which a run began: states of one would be told by the rules of another.

    Example:
        >>> check_name("fedavg", "gibbs")
        Traceback (most recent call last):
        fedtorch.sites.rounds.policy.Refusal: the run has begun as 'fedavg' at the site, and does not go on as 'gibbs'
    """
    if before != now:
        raise Refusal(f"the run has begun as {before!r} at the site, and does not go on as {now!r}")
