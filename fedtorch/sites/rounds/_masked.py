"""Masked sums between sites: the server's requests and a site's answers, phase by phase.

Every site masks the sum of its clients' messages, see `sites.masked`. The sum's name contains a digest of what clients
were sent, so that a server which sends different models to sites gets no sum. `past_sums` decides whether a site takes
part: first for the sites that are asked, and again before the site confirms those that remain.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import Carry
from fedtorch.federation.turn import Turn
from fedtorch.protocol.halves import Half, Heard, Receive, Send, packed, unpacked, wrapped
from fedtorch.sites.envelopes.keyring import Keyring, SiteKeys, Wait
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.fingerprint import fingerprint
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.past_sums import digest_of_start
from fedtorch.sites.rounds.plan import Lost
from fedtorch.sites.rounds.policy import Refusal
from fedtorch.sites.secure.halves import client_half, server_half
from fedtorch.sites.secure.masked import Masked, Parties, Summand
from fedtorch.sites.secure.messages import ADVERT, CONFIRM, PHASES
from fedtorch.sites.secure.server import Server
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)


class Guard(Protocol):
    """Decides whether a site takes part in a sum of some sites; raises `Refusal` where it does not."""

    def __call__(self, sites: frozenset[str], *, confirmed: bool) -> None: ...


def start_of_sum(algorithm: Algorithm, inbox: Tree) -> bytes:
    """Return a digest of one client's inbox and of the algorithm without its masks."""
    return digest_of_start(inbox, fingerprint(algorithm))


def start_for_all(algorithm: Algorithm, carry: Carry, outbox: Tree) -> bytes:
    """Return `start_of_sum` of the inbox that all clients get; empty if messages are not masked."""
    if carry.masks is None:
        return b""
    return start_of_sum(algorithm, tree.map(lambda leaf: leaf[0], algorithm.exchange.scatter(outbox, slice(0, 1))))


def name_of_sum(start: bytes, turn: Turn) -> bytes:
    """Return a digest of a start and of the round."""
    return hashlib.sha256(start + wire.encode({"key": turn.key.cpu()}, {"round": turn.round})).digest()


class Asked(NamedTuple):
    """A sum that the server asks for."""

    number: int  # number of the request
    least: int  # least number of sites in it; with fewer no site is asked to confirm it
    start: bytes = b""  # digest of a round's start
    about: bytes = b""  # name of the sum
    missing: Mapping[str, str] = MappingProxyType({})  # reasons why sites are not asked or have not answered


class SumLost(RuntimeError):
    """Raised if a masked sum fails.

    Attributes:
        failed: faults by site: a violation of the protocol, or no message after others had confirmed the sum.
        bound: sites that have confirmed it, or may have: they take part in sums over its start only all together.
    """

    def __init__(self, why: str, failed: Mapping[str, str], bound: frozenset[str]) -> None:
        super().__init__(why)
        self.failed, self.bound = failed, bound


class Sums:
    """The server's part of masked sums; sites that made one fail are left out of later sums.

    Args:
        masks: the population's masks.
        keyring: the run's keys.
        clients: numbers of each site's clients, by site, in order.
        wait: returns the step that waits for sites.
        next_sequence: returns a new number for a request.
        lost: record of failed sums, which is updated.
    """

    def __init__(
        self,
        masks: Masked,
        keyring: Keyring,
        clients: Mapping[str, range],
        wait: Wait,
        next_sequence: Callable[[], int],
        lost: Lost,
    ) -> None:
        self._masks, self._keyring, self._clients = masks, keyring, clients
        self._wait, self._next, self._lost = wait, next_sequence, lost

    def left_out(self, sites: Iterable[str], start: bytes) -> dict[str, str]:
        """Return the sites that are not asked for a sum over a start, with reasons."""
        bound = self._lost.bound.get(start)
        if bound is None:
            return {site: self._lost.failed[site] for site in sites if site in self._lost.failed}
        why = "others have confirmed a sum over the same start without it, and that sum failed"
        return {site: why for site in sites if site not in bound}

    def add_up(self, sites: Sequence[str], first: Mapping[str, bytes], run: str, message: Tree, wanted: Asked) -> Half:
        """Return (the aggregate of the sites' masked messages, the sites in it).

        Args:
            sites: sites of the directory that was sent.
            first: their messages of the first phase.
            run: identity of the run.
            message: structure of clients' messages, `(0, ...)`.
            wanted: the sum.

        Raises:
            SumLost: the sum failed; sites at fault are left out of sums over other starts.
            RuntimeError: the sum has numbers beyond the grid.
        """
        numbers = {site: self._clients[site].start + 1 for site in sites}
        names, signing = {number: site for site, number in numbers.items()}, self._keyring.signing(sites)
        parties = parties_of(run, wanted.number, wanted.about, dict(zip((n - 1 for n in names), signing)))
        server, phases = self._masks.server(parties, message), _Phases(self, numbers, first, run, wanted.number)
        try:
            total = yield from wrapped(server_half(server, wanted.least, names), phases)
        except RuntimeError as error:
            lost = _lost(error, server, names, wanted.missing)
            if wanted.start:
                self._leave_out(lost.failed)
                if lost.bound:
                    self._lost.bound[wanted.start] = lost.bound
            raise lost from error
        survivors = [names[number] for number in server.survivors]
        self._lost.bound.pop(wanted.start, None)
        for site in survivors:
            self._lost.failed.pop(site, None)
        self._leave_out({names[number]: f"it sent {why}" for number, why in server.guilty.items()})
        clients = sum(len(self._clients[site]) for site in survivors)
        return self._masks.aggregate(total, message, clients), survivors

    def ask(self, run: str, number: int, phase: int, sent: Mapping[str, Tensor]) -> Half:
        """Request sites' messages of a later phase of a sum."""
        sequence = self._next()
        encode = partial(frames.encode_blobs, "phase", run=run, sequence=sequence, sum=number, phase=phase)
        for site, payload in sent.items():
            yield Send(site, encode({"payload": unpacked(payload)}), sequence=sequence)
        return (yield self._wait(sent, lambda site, frame: frame.blob("said")))

    def _leave_out(self, sites: Mapping[str, str]) -> None:
        """Leave sites out of later sums, except one that others have confirmed together with them."""
        for site, why in sites.items():
            self._lost.failed[site] = f"it is left out of sums under masks, because in one {why}"
            _LOG.warning("site %r is left out of sums under masks, because in one %s", site, why)


class _Phases:
    """Carries out the steps of the server's half of a sum, whose first messages are the answers to a round.

    Args:
        sums: the server's sums.
        numbers: numbers of the parties, by site.
        first: sites' messages of the first phase.
        run: identity of the run.
        number: number of the sum.
    """

    def __init__(
        self, sums: Sums, numbers: Mapping[str, int], first: Mapping[str, bytes], run: str, number: int
    ) -> None:
        self._sums, self._numbers, self._first, self._run, self._sum = sums, numbers, first, run, number
        self._sites = {number: site for site, number in numbers.items()}
        self._phases, self._sent = iter(PHASES), dict[str, Tensor]()

    def __call__(self, step: Send | Receive) -> Half:
        if isinstance(step, Send):
            self._sent[self._sites[int(step.to)]] = step.message
            return None
        phase, sent, self._sent = next(self._phases), self._sent, {}
        answers = Heard(dict(self._first), {})
        if phase != ADVERT:
            answers = yield from self._sums.ask(self._run, self._sum, phase, sent)
        messages = {self._numbers[site]: packed(answer) for site, answer in answers.messages.items()}
        return Heard(messages, {self._numbers[site]: why for site, why in answers.missing.items()})


def _lost(error: RuntimeError, server: Server, names: Mapping[int, str], missing: Mapping[str, str]) -> SumLost:
    """Return the error of a failed sum, with the sites at fault and those that can still take part."""
    bound, withheld = (frozenset(names[number] for number in some) for some in server.withheld())
    failed = {
        **dict.fromkeys(withheld, "it sent nothing"),
        **{names[number]: f"it sent {why}" for number, why in server.guilty.items()},
    }
    reasons = {**missing, **{names[number]: why for number, why in server.missing.items()}}
    sentences = [str(error), *(f"{site!r}: {why}" for site, why in reasons.items())]
    if bound:
        sentences.append(
            f"the round is lost, because {sorted(failed)} failed after others had confirmed the sum of "
            f"{sorted(bound)}; a server may have computed that sum, so these sites add up over the same start only "
            "all together; repeat the round by run.step() when all of them answer, or begin a run from other "
            "parameters, which leaves the failed sites out"
        )
    else:
        sentences.append("the round was discarded: repeat it by run.step()")
    return SumLost("; ".join(sentences), failed, bound)


def site_half(
    masks: Masked, keys: SiteKeys, data: bytes, number: int, about: bytes, summand: Summand, guard: Guard
) -> Half:
    """Return a site's half of one masked sum.

    Args:
        masks: masks of the site's policy.
        keys: the site's keys.
        data: the signed key directory.
        number: number of the request that it answers.
        about: digest of what its clients were sent.
        summand: the clients' messages.
        guard: decides with which sites this one takes part, and records confirmed sums.

    Raises:
        Refusal: the directory is invalid, or the guard refuses a sum of its sites.
    """
    speakers, place = keys.read(data)
    if len(speakers) < masks.sites:
        raise Refusal(f"the site adds up under masks with {masks.sites} sites at least, not {len(speakers)}")
    try:
        masks.check(sum(each.clients for each in speakers), len(speakers))
    except ValueError as error:
        raise Refusal(str(error)) from None
    names = {each.first + 1: each.name for each in speakers}
    guard(frozenset(names.values()), confirmed=False)
    parties = parties_of(keys.run, number, about, {each.first: each.signing for each in speakers})
    client = masks.party(parties, speakers[place].first + 1, keys.signing, summand)

    def answer(phase: int, payload: bytes) -> bytes:
        message = client.answer(phase, payload)
        if phase == CONFIRM:  # the sum's sites are recorded before the confirmation is sent
            guard(frozenset(names[party] for party in client.survivors), confirmed=True)
        return message

    return client_half(answer)


class Part:
    """Drives a site's half of one sum; a repeated request gets the same bytes.

    Args:
        half: the site's half.
        number: number of the first request.

    Attributes:
        begun: the answer to that request.
    """

    begun = b""

    def __init__(self, half: Half, number: int) -> None:
        self._half, self.number = half, number
        self._messages: list[bytes] = []  # by phase
        self._ended = ""  # reason for ending; empty while the sum goes on

    def first(self) -> bytes:
        """Return the site's message of the first phase."""
        return self._answer(PHASES[0], b"")

    def answer(self, frame: Frame) -> bytes:
        """Return the answer to a request of a later phase.

        Raises:
            Refusal: the site has ended its part, or is not in this sum.
        """
        if frame.integer("sum") != self.number:
            raise Refusal("the site is not in this sum under masks; it may have restarted since")
        phase = frame.integer("phase", PHASES[0] + 1, PHASES[-1])
        message = self._answer(phase, frame.blob("payload"))
        return frames.encode_blobs("answer", {"said": message}, sequence=frame.integer("sequence", 1))

    def _answer(self, phase: int, payload: bytes) -> bytes:
        if phase <= len(self._messages):
            return self._messages[phase - 1]
        if self._ended:
            raise Refusal(self._ended)
        self._ended = "the site could not go on with this sum under masks"  # cleared below if it answers
        try:
            if phase != len(self._messages) + 1:
                raise ValueError(f"Expected phase {len(self._messages) + 1} next, but got phase {phase}")
            step = self._half.send(packed(payload) if self._messages else None)
        except (RuntimeError, ValueError) as error:
            self._ended = f"the site ends its part of a sum under masks: {getattr(error, 'told', None) or error}"
            raise Refusal(self._ended) from error
        assert isinstance(step, Send)
        self._messages.append(unpacked(step.message))
        next(self._half, None)  # advance to the next Receive
        self._ended = ""
        return self._messages[-1]


def parties_of(run: str, number: int, about: bytes, signing: Mapping[int, bytes]) -> Parties:
    """Return the parties of a sum; a site's number, the same in every sum, is that of its first client plus one."""
    return Parties(bytes.fromhex(run) + about, number, {first + 1: key for first, key in signing.items()})


def one_of(inbox: Tree, alike: str = "were sent the same") -> Tree:
    """Return one client's inbox `(...)` of inboxes `(K, ...)` that are all equal.

    Args:
        inbox: inboxes of all clients, or other values that must be equal.
        alike: the condition in words, for the error.

    Raises:
        Refusal: they differ.
    """
    for leaf in tree.leaves(inbox):
        if not torch.equal(leaf, leaf[:1].expand_as(leaf)):
            raise Refusal(
                "the site adds up messages, under masks or of clients with few rows, only where all of its clients "
                f"{alike}"
            )
    return tree.map(lambda leaf: leaf[0], inbox)
