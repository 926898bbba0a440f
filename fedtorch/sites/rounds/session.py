"""A site's part in one run: its clients, their answers to the server's requests, and the versions of their states."""

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
from fedtorch.sites.secure.masked import Summand
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
MOST_CLIENTS = 10_000_000
_KEY = torch.zeros((), dtype=torch.int64)
_COMPARED = ("algorithm", "settings", "fingerprint", "clients", "first")  # metadata of a server's `begin`


class SiteSession:
    """A site's part in a run, from the server's `begin`.

    If the site's policy has a minimum above one, its clients draw with keys that its secret derives from the whole
    request: the server's key, the settings of the algorithm, the tensors that are sent, which clients are asked, and
    their states. With the server's key alone, the server would know which rows are in a batch's sum. Without the rest,
    a server could ask for two sums that differ by a row or by a client's batch, or for the same few rows at many
    starts. Each client draws by its own name. What sites must have in common is not drawn here: cohorts, faults, and
    names of masked sums.

    Args:
        configuration: the site's clients, algorithms and policy.
        watch: enforces its policy; one for each site.
        begin: the server's frame.
        folder: parent of the folder with versions of this run's states; None to store none.
        identity: signs the site's keys for masked sums and sealed envelopes.
        past: the masked sums in which the site has taken part; default: those recorded in the folder.
        versions: the states' versions, if the site resumes the run; default: those of the folder.
        secret: the site's secret, from which draws are derived; default: that of the folder.
        approve: raises `Refusal` if the site's people reject the session, whose `disclosed` lists what may leave.

    Attributes:
        run: the run's identity, in hexadecimal.
        algorithm: the algorithm, as built by the site.
        clients: the site's clients.
        over: whether the run has ended.
        about: metadata with which the server began the run.
        versions: versions of the clients' states.
        leaves: fields that have left the site in rounds so far; empty before the first.

    Raises:
        Refusal: the site does not offer the algorithm, or would run something else under that name.
        PayloadError: the frame is malformed.
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
        self.about = {name: begin.about.get(name) for name in _COMPARED}
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
        self._inbox = tree.map(lambda leaf: leaf[0], first)  # structure of one client's inbox
        sent = begin.tree({"state": like, "names": torch.zeros(self._count, dtype=torch.int64)}, finite=False)
        state = sent["state"]
        check_sizes(state)
        self._names = torch.zeros(total, dtype=torch.int64)  # names of clients at the server, by which they draw
        self._names[self.first : self.first + self._count] = sent["names"]
        self._past = PastSums(folder, configuration.policy.remember_sums) if past is None else past
        self._keys = self._site_keys(identity, total)
        self._part: Part | None = None
        self._largest = 0.0  # largest magnitude in the last inboxes
        self._envelopes = self._site_envelopes(server, like)
        at_site = self._carry.carried(self.algorithm)
        at_site = replace(at_site, exchange=frames.at_site(at_site.exchange))
        names = ("",) * self.first + configuration.data.names + ("",) * (total - self.first - self._count)
        blocks = [(ids + self.first, block) for ids, block in configuration.data.buckets(small=SMALL_BLOCK)]
        self.clients = LocalClients(at_site, state, names, blocks, total, configuration.chunk)
        approve(self)
        self._stateful = bool(tree.leaves(state))
        self.versions = Versions(None if folder is None else folder / self.run) if versions is None else versions
        if self.versions.folder is not None:
            anyway = begin.about.get("anyway") is True
            check_begun(self.versions, begin.text("algorithm"), configuration.data, anyway)
        self.versions.put(FIRST, self.clients.state_dict())
        self.leaves: list[Field] = []
        self._noted = set[str]()  # names of the diagnostics in `leaves`
        self._version: int | None = FIRST
        self._wanted: set[int] | None = None  # versions to which the server may return; None if no others are stored
        self._last: frames.Inboxes | None = None
        self._rounds: frames.Known = {}
        self._everybody = torch.arange(self.first, self.first + self._count)
        self._few, self._silent = len(self._rows.few(self._everybody)) > 0, False

    def _site_keys(self, identity: Identity | None, clients: int) -> SiteKeys | None:
        """Return the site's keys if the server may not read messages, else None."""
        carry = self._carry
        try:
            carry.check(clients)
        except ValueError as error:
            raise Refusal(str(error)) from None
        if carry.masks is not None:
            self._past.open()
        hidden = carry.masks is not None or carry.network is not None
        return SiteKeys(identity, self.run, self.first, self._count) if hidden else None

    def _site_envelopes(self, server: Tree, state: Tree) -> SiteEnvelopes | None:
        """Return envelopes if neighbours exchange messages through the server, else None."""
        network = self._carry.network
        if network is None or self._keys is None or self.algorithm.told is None:
            return None
        initial = self.algorithm.told.of(tree.expand(state, 1))
        return SiteEnvelopes(self._keys, self.algorithm, network, server, initial, self._ids)

    @cached_property
    def _settings(self) -> dict[str, str]:
        return fingerprint(self.algorithm)

    @property
    def _ids(self) -> range:
        """Return the numbers of the site's clients."""
        return range(self.first, self.first + self._count)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the site's clients, in the server's order; see `Site`."""
        return self.configuration.data.names

    def goes_on_as(self, begin: Frame) -> bool:
        """Return whether a repeated `begin` asks for the run as the site has begun it."""
        return self.about == {name: begin.about.get(name) for name in _COMPARED}

    def disclosed(self) -> list[Field]:
        """Return the fields that may leave the site, as in `Run.disclosure`, without those that its policy refuses."""
        turn = Turn(_KEY, 0, names=self._names)
        nobody = frames.Inboxes(torch.zeros(0, dtype=torch.int64), tree.expand(self._inbox, 0))
        answered = self.clients.disclosed(self.algorithm, self._carry, nobody, turn, at_sites=True)
        every = [*answered, *conversation(self.algorithm, self._carry, ["neighbours' sites"], answered)]
        return [field for field in every if self._may_leave(field.message)]

    def _may_leave(self, message: str) -> bool:
        """Return whether the site may send a kind of message."""
        from fedtorch.inference.questions import QUESTIONS

        configuration, asked = self.configuration, message.removeprefix("ask ")
        if message == "agree":
            return configuration.frame is not None
        if message == "evaluate":
            return configuration.validation is not None
        return asked == message or QUESTIONS[asked].tells in configuration.policy.after_fit

    def settle(self, frame: Frame) -> None:
        """Restore the version of the states that a request names; `forget` deletes those that are not needed any more.

        Raises:
            Refusal: that version is lost.
        """
        version, keep = frame.integer("kept"), frame.integers("keep")
        if version != self._version and self._stateful:
            states = self.versions.get(version)
            if states is None:
                raise Refusal(f"the site does not have version {version} of its states of run {self.run} any more")
            self._version = None  # until the states are loaded completely
            self.clients.load_state_dict(states)
        self._version, self._wanted = version, {version, *keep}

    def forget(self) -> None:
        """Delete the versions of the states to which the server does not return, by its last request.

        Call this once an answer has been sent, because deleting files may take as long as computing one.

        Raises:
            OSError: a file cannot be deleted.
        """
        wanted, self._wanted = self._wanted, None
        if wanted is not None and self._stateful and self._version is not None:
            self.versions.retain({self._version, *wanted})

    def round(self, frame: Frame) -> bytes:
        """Run the clients that are asked, store their new states as a new version, and return the answer."""
        number = frame.integer("sequence", 1)
        # Two messages under the same masks would disclose their difference: a repeated request gets the same bytes.
        if self._part is not None and self._part.number == number:
            return self._part.begun
        silent = frame.integer("lost", 0, self._count)
        more = {"key": _KEY, "lost": torch.zeros(silent, dtype=torch.int64) if silent else None}
        inboxes, more, blobs = self._inboxes(frame, more, self._rounds if self._keys is None else None)
        turn = Turn(more["key"], frame.integer("round"), names=self._names)
        start = start_of_sum(self.algorithm, one_of(inboxes.inbox)) if self._carry.masks is not None else b""
        self._silent = self._few and self._sends_nothing(inboxes, turn)
        self.watch.count()  # also what is refused then, which may tell whose rows are whose
        self._check_rows(inboxes.ids)
        lost = self._not_counted(inboxes.ids, more["lost"])
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
            why = f"failed, or sent messages that are not finite: {next(iter(unfit.values()))}"
            self._rows.note("no sum", torch.tensor(list(unfit)), why)
            self.watch.failed(hidden=self._carry.masks is not None)
            if self._carry.masks is None:
                raise Refusal(
                    "the site adds up clients with few rows, and not every message is finite; its own log says which; "
                    "take smaller steps or another start, or leave out clients whose rows cause it"
                )
        if spent:
            _LOG.warning("too many masked rounds have failed here; sending random numbers, see Policy(refusals=)")
        if spent or (unfit and self._carry.masks is not None):
            gathered = self._random_answer(inboxes, lost, turn)
        for client, error in gathered.failed.items():
            raise ValueError(f"client {self.names[client - self.first]!r} could not take part: {error}") from error
        self._check_rows(gathered.ids)  # again, because messages may be lost or refused
        taken = self._taken(drawing)
        if taken is not None and self._carry.masks is None and not self.watch.counts(self.algorithm.budget):
            self._rows.check_taken(gathered.ids, self._silent or self.algorithm.exchange.additive, taken)
        self._rows.check_first(self._first(gathered.ids))
        self._remember(inboxes.inbox, gathered)
        step = None if self.algorithm.told is None else Step(self.run, self._version or FIRST, number)
        self._version = None  # until the new states are stored
        self.clients.commit(gathered.states)
        if self._stateful:
            self.versions.put(number, self.clients.state_dict())
        self._version = number
        info = {} if self._keys is not None else self._released_info(gathered.info, gathered.ids, drawing)
        everybody = len(gathered.ids) == self._count
        tensors = {"ids": None if everybody else gathered.ids, "info": info, "partial": gathered.partial}
        refused = {str(client): field for client, field in gathered.refused.items()}
        about: dict[str, Any] = {"clients": len(gathered.ids), "info": list(info), "refused": refused}
        about |= {frames.EVERYBODY: True} if everybody else {}
        if self._keys is None:
            return frames.encode("answer", tensors, sequence=number, **about)
        messages: dict[str, bytes] = {}
        if self._envelopes is not None:
            messages = self._envelopes.write(blobs.get(DIRECTORY, b""), self._contributions())
        elif len(gathered.ids):
            clients = [self.names[client - self.first] for client in gathered.ids.tolist()]
            guard = partial(self._past.of_round, start, clients, step)
            summand = Summand(gathered.partial, not (unfit or spent), self._largest)
            self._part = self._sum(number, name_of_sum(start, turn), blobs, summand, guard)
            messages = {"said": self._part.first()}
        elif step is not None:
            self._past.advance(step)
        coded, sizes = frames.coded(messages)
        answer = frames.encode("answer", {**tensors, "partial": coded}, sequence=number, sizes=sizes, **about)
        if self._part is not None:
            self._part.begun = answer
        return answer

    def _key(self, purpose: str, key: Tensor, sent: Tree, about: Any) -> Tensor:
        """Return the key for an answer's draws: the server's, or if the policy has a minimum above one, the site's.

        Args:
            purpose: kind of request.
            key: the server's key.
            sent: tensors of the request.
            about: other content of the request, as JSON.
        """
        if self.watch.policy.minimum == 1:
            return key
        settings = {"about": about, "settings": self._settings}
        return self._secret.key(purpose, wire.encode({"key": key, "sent": sent}, settings))

    def _key_of_round(self, turn: Turn, inboxes: frames.Inboxes, lost: Tensor | None) -> Tensor:
        """Return the key for a round's draws, a different one for every set of clients whose messages count.

        With the same key for two sets, their sums could differ by one client's batch. With the same key for two
        states, the server would get results of the same few rows at many states, which disclose these rows.
        """
        ids = self._counted(inboxes.ids, lost)
        sent = {
            "inbox": tree.map(_once, inboxes.inbox),
            "states": self.clients.table.read(ids),
            "names": self._names[ids],  # given by the server
        }
        clients = [self.names[client - self.first] for client in ids.tolist()]
        return self._key("a round", turn.key, sent, {"round": turn.round, "clients": clients})

    def _counted(self, ids: Tensor, lost: Tensor | None) -> Tensor:
        """Return the clients among `ids` whose messages count."""
        return ids if lost is None else ids[~torch.isin(ids, lost)]

    def _gathered(self, inboxes: frames.Inboxes, cohort: Tensor | None, turn: Turn, lost: Tensor | None) -> Gathered:
        """Return the clients' answers; under masks any exception marks all clients as failed."""
        try:
            return self.clients.gather(inboxes, cohort, turn, lost)
        except Exception as error:
            if self._carry.masks is None:
                raise
            _LOG.exception("clients could not answer")
            return Gathered(None, [], inboxes.ids, {}, 0, 0, {}, dict.fromkeys(inboxes.ids.tolist(), error), None)

    def _random_answer(self, inboxes: frames.Inboxes, lost: Tensor | None, turn: Turn) -> Gathered:
        """Return the round's clients without a message, for which a masked sum sends random numbers."""
        ids = self._counted(inboxes.ids, lost)
        nobody = self.clients.reply(self.clients.empty_block(), inboxes, turn).message
        return Gathered(RowsOf(ids[:0], nobody), [], ids, {}, 0, 0, {}, {}, None)

    def total(self, frame: Frame) -> bytes:
        """Return the total of the clients' persistent contributions, see `Told`."""
        number = frame.integer("sequence", 1)
        if self.algorithm.told is None:
            raise Refusal("the algorithm's clients have no persistent contributions")
        if self._envelopes is not None:
            raise Refusal("the site sends its nodes' contributions to their neighbours only")
        self._check_rows(self._everybody)
        if self._carry.masks is None:
            return frames.encode("answer", {"told": self.clients.told_here()}, sequence=number)
        if self._part is None or self._part.number != number:
            version = self._version or FIRST
            guard = partial(self._past.of_total, Step(self.run, version, version))
            summand = Summand(self.clients.told_here(), whole=not self._is_spent, largest=self._largest)
            self._part = self._sum(number, b"", frame.blobs(), summand, guard)
            self._part.begun = frames.encode_blobs("answer", {"said": self._part.first()}, sequence=number)
        return self._part.begun

    def keys(self, frame: Frame) -> bytes:
        """Return the site's signed public keys for this run."""
        if self._keys is None:
            raise Refusal("the algorithm lets the server read messages, and needs no keys")
        return self._keys.announce(frame)

    def phase(self, frame: Frame) -> bytes:
        """Return the site's message in a later phase of a masked sum."""
        if self._part is None:
            raise Refusal("the site is in no sum under masks; it may have restarted since")
        return self._part.answer(frame)

    def envelopes(self, frame: Frame) -> bytes:
        """Return envelopes for the sites of a directory, with the last contributions of this site's nodes."""
        if self._envelopes is None:
            raise Refusal("the algorithm's clients write no envelopes")
        envelopes = self._envelopes.write(frame.blobs().get(DIRECTORY, b""), self._contributions())
        return frames.encode_blobs("answer", envelopes, sequence=frame.integer("sequence", 1))

    def _sends_nothing(self, inboxes: frames.Inboxes, turn: Turn) -> bool:
        """Return whether messages are empty, as in separate training, so that only losses leave."""
        return not tree.leaves(self.clients.reply(self.clients.empty_block(), inboxes, turn).message)

    def _check_rows(self, ids: Tensor) -> None:
        """Refuse an answer from too few rows; a masked sum is not checked, because it spans several sites.

        If only losses are sent, all clients must train together: otherwise the difference of two means over all clients
        would disclose a client that has trained alone.
        """
        if self._silent and len(ids) < self._count:
            raise Refusal(
                "the site's clients send only losses, and one of them has few rows; if some trained without others, "
                "the mean of all would disclose these; ask all clients of the site"
            )
        if self._carry.masks is None and not self._silent:
            self._rows.check(ids, self.algorithm.exchange.additive)

    @property
    def _is_spent(self) -> bool:
        """Return whether the site sends random numbers under masks, because too many masked rounds have failed."""
        return self._carry.masks is not None and self.watch.is_spent()

    @property
    def _adds(self) -> bool:
        """Return whether the server reads sums of the site's clients and some have few rows."""
        return self._few and self.algorithm.exchange.additive and self._carry.masks is None

    def _first(self, ids: Tensor) -> Tensor:
        """Return the clients of `ids` whose first contribution would be in a sum that the server reads."""
        if self.algorithm.told is None or not self._adds:
            return ids[:0]
        return ids[~torch.isin(ids, self.clients.table.touched())]

    def _not_counted(self, ids: Tensor, lost: Tensor | None) -> Tensor | None:
        """Return the clients whose messages do not count: `lost`, and first contributions from too few rows."""
        asked = self._counted(ids, lost)
        first = self._first(asked)
        if len(first) == len(asked):  # nobody else could answer
            self._rows.check_first(first)
        if self._rows.is_enough(first):
            return lost
        self._rows.note("left out until others contribute for the first time together with them", first)
        return first if lost is None else torch.cat([lost, first])

    def _remember(self, inbox: Tree, gathered: Gathered) -> None:
        """Refuse a sum that would disclose few rows by comparison with earlier sums; remember it otherwise.

        It is compared with earlier sums over the same start and, for persistent contributions, with those of the run:
        if the run returns to a checkpoint and continues with other clients, totals differ by their contributions. A sum
        over several starts is refused: two sums that differ in one client's start would disclose that client's change.
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
        """Return the least number of rows, or persons, that any client used in a round; None if each used all its rows.

        Args:
            drawing: the round's turn, with which clients have drawn.
            name: a diagnostic, which may use fewer rows than the message.
        """
        taken = [drawing.taken[each] for each in {"", name} & drawing.taken.keys()]
        return max(1, min(taken) // self.configuration.rows_of_a_person()) if taken else None

    def _released_info(self, info: dict[str, Tensor], ids: Tensor, drawing: Turn) -> dict[str, Tensor]:
        """Return clients' diagnostics `(M,)`, replaced by their mean if any client has, or used, too few rows.

        The means over two cohorts disclose the clients that are in only one of them. Past sums are a protection only if
        they have recorded the same rows. Otherwise the mean over all clients is released, and NaN for smaller cohorts.
        """
        released = {}
        for name, values in info.items():
            taken = self._taken(drawing, name)
            if not self._silent and len(self._rows.few(ids, taken)) == 0:
                released[name] = values
            elif len(ids) == self._count or self._is_remembered(ids, taken):
                released[name] = self._rows.joined(values, ids, taken)
            else:
                released[name] = torch.full_like(values, torch.nan)
        return released

    def _is_remembered(self, ids: Tensor, taken: int | None) -> bool:
        """Return whether past sums protect a diagnostic, so that any two cohorts differ by enough of its rows.

        Past sums count all rows of a client, of which its last batch has fewer. Without messages they know no cohorts.
        """
        return not self._silent and len(self._rows.few(ids, taken)) == len(self._rows.few(ids))

    def _sum(self, number: int, about: bytes, blobs: dict[str, bytes], summand: Summand, guard: Guard) -> Part:
        """Return the site's part of a masked sum."""
        assert self._keys is not None
        directory = blobs.get(DIRECTORY, b"")
        return Part(site_half(self._carry.masks, self._keys, directory, number, about, summand, guard), number)

    def _contributions(self) -> Tree:
        """Return the persistent contributions of all the site's clients, `(K, ...)`."""
        assert self.algorithm.told is not None
        return self.algorithm.told.of(self.clients.table.read(slice(self._ids.start, self._ids.stop)))

    def evaluate(self, frame: Frame) -> bytes:
        """Return sums of the requested metrics, of each client's model on its validation rows."""
        wanted = frame.texts("metrics")
        if self.configuration.validation is None or not set(wanted) <= self.configuration.metrics.keys():
            raise Refusal(f"the site has validation rows for {sorted(self.configuration.metrics)}, not for {wanted}")
        inboxes, _, _ = self._inboxes(frame)
        self.watch.count()
        validation, additive = self.configuration.validation, self.algorithm.exchange.additive
        known = (self.watch.policy, validation.counts, validation.names, self.first)
        rows = Behind(*known, rows="validation rows")
        few = len(rows.few(self._everybody)) > 0
        if few and additive and len(inboxes.ids) != self._count:
            raise frame.refused("all clients of the site, some of which have few validation rows", inboxes.ids.tolist())
        # If each client has its own model, a sum of scores may follow a single client's.
        rows.check(inboxes.ids, additive)
        if few and additive:
            one_of(inboxes.inbox)
            one_of(self.clients.algorithm.model(inboxes.inbox, self.clients.table.read(inboxes.ids)), "have one model")
        made = after_fit.scoring(self.algorithm, {name: self.configuration.metrics[name] for name in wanted})
        every = after_fit.by_client(self.clients, inboxes, validation.select(inboxes.ids - self.first), made)
        every = in_one(every) if few and additive else every
        return frames.encode("answer", {"sums": every}, sequence=frame.integer("sequence", 1))

    def ask(self, frame: Frame, beside: Callable[[str | None], SiteConfiguration]) -> bytes:
        """Return the answer to a post-fit query, if the site's policy allows it.

        Args:
            frame: the query.
            beside: design of another run -> the configuration with rows by that design.
        """
        from fedtorch.federation.runs.holders import Holder, is_key, on_cpu

        if self._keys is not None:
            raise Refusal("the site's policy hides all messages from the server by carry=, also after a fit")
        kind, like = after_fit.question(frame, self.algorithm)
        inboxes, sent, _ = self._inboxes(frame, like)
        if len(inboxes.ids) != self._count:
            raise frame.refused("all clients of the site", inboxes.ids.tolist())
        each = kind.by_client or kind.alone
        least = int(self._rows.each(inboxes.ids).min()) if each else self._rows.all(inboxes.ids)
        self.watch.after_fit(kind.tells, least)
        if self._few and self.algorithm.exchange.additive:
            one_of(inboxes.inbox)
        evaluate = on_cpu(partial(after_fit.by_client, self.clients, inboxes))
        configuration = self.configuration
        minimum = self.watch.policy.minimum * configuration.rows_of_a_person()  # so many rows come from enough persons
        data, names = configuration.data.to("cpu"), self._names[self._everybody]
        holder = Holder(self.algorithm, data, names, evaluate, self.first, configuration.frame, minimum)
        others = after_fit.others(frame, beside)
        of_draws = {
            "sent": sent,
            "names": names,
            "rows": noted(data),  # so that a changed row changes the draws
            "beside": {str(number): noted(its.data) for number, (its, _) in enumerate(others)},
        }
        about = {"question": kind.name, "about": dict(frame.names("about")), "minimum": minimum}
        keys = {name: self._key("a question", sent[name], of_draws, about) for name in sent if is_key(name)}
        return after_fit.answer(frame, kind, {**sent, **keys}, holder, others)

    def end(self, frame: Frame) -> None:
        """End the run and keep the clients' final inboxes."""
        self._last, _, _ = self._inboxes(frame)
        self.over = True
        self.versions.finish()

    def tensors(self) -> Tree:
        """Return the tensors with which the site's clients predict after the run, `(K, ...)` in the order of `names`.

        Raises:
            ValueError: the server has not ended the run.
        """
        if self._last is None:
            raise ValueError("Expected a run that is over, but the server has not ended it; it does by finish(run)")
        return self.clients.tensors(self._last, self._last.ids)

    def client_module(self, client: str) -> nn.Module:
        """Return a copy of the module with the final tensors of a client, by name."""
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
        """Write the clients' final tensors, by client and name, as safetensors.

        Only the file's owner may read it, as for all files of a site.
        """
        tensors = tree.flatten(self.tensors())
        flat = {f"{client}.{name}": leaf[k] for k, client in enumerate(self.names) for name, leaf in tensors.items()}
        files.private_folder(Path(path).parent)
        checkpoint.write(path, flat, private=True)

    def _inboxes(
        self, frame: Frame, more: Tree = None, known: frames.Known | None = None
    ) -> tuple[frames.Inboxes, Tree, dict[str, bytes]]:
        """Return (the clients' inboxes, other tensors of the frame, bytes by name)."""
        room = {} if self._keys is None else frame.room()
        like = None if self._envelopes is not None else self._inbox
        beside = {"more": more, "blobs": room}
        inboxes, came = frames.decode_inboxes(frame, like, self._everybody, beside, known)
        blobs = frames.plain(came["blobs"])
        if self._envelopes is not None:
            inboxes = inboxes._replace(inbox=self._envelopes.inboxes(blobs, self._contributions(), inboxes.ids))
        check_sizes({"inbox": inboxes.inbox, "more": came["more"]})
        self._largest = largest_of(inboxes.inbox)
        if self.clients.device.type != "cpu":
            inboxes = inboxes._replace(inbox=tree.to(inboxes.inbox, self.clients.device))
        return inboxes, came["more"], blobs


def _once(leaf: Tensor) -> Tensor:
    """Return clients' values `(K, ...)`, or `(1, ...)` if all are equal."""
    same = len(leaf) > 0 and (leaf.stride(0) == 0 or torch.equal(leaf, leaf[:1].expand_as(leaf)))
    return leaf[:1] if same else leaf


def check_begun(versions: Versions, algorithm: str, data: FederatedData, anyway: bool) -> None:
    """Record the algorithm and digests of the rows with which a run begins, or compare them with the record.

    A run that is resumed, by the server or by a restarted site, must have the same algorithm and rows; `anyway` accepts
    and records other rows. The digests stay at the site, which discloses only whether they are equal.

    Raises:
        Refusal: the algorithm or the rows differ.
        ValueError: the record is damaged.
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
    """Refuse another algorithm than the run's first: its rules would disclose states of the other algorithm.

    Example:
        >>> check_name("fedavg", "gibbs")
        Traceback (most recent call last):
        fedtorch.sites.rounds.policy.Refusal: the run has begun as 'fedavg' at the site, and does not go on as 'gibbs'
    """
    if before != now:
        raise Refusal(f"the run has begun as {before!r} at the site, and does not go on as {now!r}")
