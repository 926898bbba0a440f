"""Sums under masks between sites: what the server carries, and what a site answers, phase by phase.

Every site masks the sum of its clients' messages, see `sites.masked`. In the name of the sum is a digest of what
clients were sent, so that a server which sends sites different models gets no sum of them. Which sums a site takes part
in is decided by `past_sums`, when it hears who is asked and again before it confirms who has stayed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from fedtorch import tree, wire
from fedtorch.federation.algorithm import Algorithm, Turn
from fedtorch.federation.exchanges.carry import Carry
from fedtorch.federation.exchanges.exchange import RowsOf
from fedtorch.sites.envelopes.keyring import Ask, SiteKeys
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.fingerprint import fingerprint
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.past_sums import digest_of_start
from fedtorch.sites.rounds.terms import Refusal
from fedtorch.sites.secure.masked import Masked, Parties, SiteSums
from fedtorch.sites.secure.messages import PHASES
from fedtorch.sites.secure.parties import Client
from fedtorch.tree import Tree


class Guard(Protocol):
    """Decides whether a site takes part in a sum of some sites; raises `Refusal` where it does not."""

    def __call__(self, sites: frozenset[str], *, confirmed: bool) -> None: ...


def start_of_sum(algorithm: Algorithm, inbox: Tree) -> bytes:
    """Return a digest of what one client is sent, and of the algorithm but for its masks."""
    return digest_of_start(inbox, fingerprint(algorithm))


def start_for_all(algorithm: Algorithm, carry: Carry, outbox: Tree) -> bytes:
    """Return `start_of_sum` of what all clients are sent; nothing where messages are not under masks."""
    if carry.masks is None:
        return b""
    return start_of_sum(algorithm, tree.map(lambda leaf: leaf[0], algorithm.exchange.scatter(outbox, slice(0, 1))))


def name_of_sum(start: bytes, turn: Turn) -> bytes:
    """Return a digest of a start and of the round."""
    return hashlib.sha256(start + wire.encode({"key": turn.key.cpu()}, {"round": turn.round})).digest()


class Asked(NamedTuple):
    """A sum that the server asks for."""

    number: int  # of the request
    least: int  # sites that the server wants in it; with fewer no site is asked to confirm it
    start: bytes = b""  # of a round's
    about: bytes = b""  # its name
    missing: Mapping[str, str] = MappingProxyType({})  # why sites are not asked, or have not answered


class SumLost(RuntimeError):
    """There is no sum.

    Attributes:
        failed: how sites have broken the protocol, or that they sent nothing once others had confirmed the sum.
        bound: the sites that had confirmed it, or could have: they take part in sums over its start only together.
    """

    def __init__(self, why: str, failed: Mapping[str, str], bound: frozenset[str]) -> None:
        super().__init__(why)
        self.failed, self.bound = failed, bound


class SumOfSites:
    """The server's half of one sum.

    Args:
        masks: of the population.
        parties: who adds up.
        firsts: the number of each site's first client, by name.
        message: what clients send, `(0, ...)`.
        ask: how sites are asked.
        next_sequence: a number for requests.
        wanted: what the server asks for.
    """

    def __init__(
        self,
        masks: Masked,
        parties: Parties,
        firsts: Mapping[str, int],
        message: Tree,
        ask: Ask,
        next_sequence: Callable[[], int],
        wanted: Asked,
    ) -> None:
        self._masks, self._firsts, self._ask, self._next = masks, firsts, ask, next_sequence
        self._number, self._least = parties.attempt, wanted.least
        self._sum: SiteSums = masks.server(parties, message)
        self._reasons = dict(wanted.missing)  # why sites have not answered
        self._confirmed: list[frozenset[str]] = []  # who has answered, by phase, once it is clear whose sum it is

    def finish(self, first: Mapping[str, bytes], run: str) -> tuple[Tree, list[str]]:
        """(the aggregate, the sites that are in it), from what sites have said in the first phase.

        Raises:
            SumLost: there is no sum.
        """
        said = first
        try:
            for phase in PHASES:
                if phase != PHASES[0]:
                    said = self._answers(phase, said, run)
                taken = {site: message for site, message in said.items() if self._sum.take(phase, message)}
                self._reasons.update(dict.fromkeys(said.keys() - taken.keys(), "it sent what the protocol refuses"))
                said = taken
            aggregate = self._sum.aggregate()
        except RuntimeError as error:
            raise self._lost(error) from error
        return aggregate, self._survivors

    @property
    def guilty(self) -> dict[str, str]:
        """The sites that have broken the protocol, and how."""
        return {
            name: self._sum.guilty[first + 1] for name, first in self._firsts.items() if first + 1 in self._sum.guilty
        }

    @property
    def _survivors(self) -> list[str]:
        survivors = set(self._sum.survivors)
        return [name for name, first in self._firsts.items() if first + 1 in survivors]

    def _answers(self, phase: int, sites: Iterable[str], run: str) -> Mapping[str, bytes]:
        """Ask sites for their messages of a phase; raise RuntimeError rather than for the sum of too few."""
        survivors, number = self._survivors, self._next()
        if self._masks.sites <= len(survivors) < self._least and not self._confirmed:
            raise RuntimeError(f"Expected a sum of at least {self._least} sites, but only {survivors} are left")
        requests = {
            site: frames.encode_blobs(
                "phase", {"payload": self._sum.request(phase, self._firsts[site] + 1)},
                run=run, sequence=number, sum=self._number, phase=phase,
            )
            for site in sites
        }  # fmt: skip
        heard = self._ask(requests, number, lambda site, frame: frame.blob("said"))
        self._reasons.update(heard.missing)
        if survivors:
            self._confirmed.append(frozenset(heard.answers))
        return heard.answers

    def _lost(self, error: RuntimeError) -> SumLost:
        """Say why there is no sum, whose fault it is, and who can still add up."""
        bound = frozenset(self._survivors) if any(self._confirmed) else frozenset()
        withheld = next((bound - answered for answered in self._confirmed if bound - answered), frozenset())
        failed = {
            **{site: "it sent nothing" for site in withheld},
            **{site: f"it sent {why}" for site, why in self.guilty.items()},
        }
        told = [str(error), *(f"{site!r}: {why}" for site, why in self._reasons.items())]
        if bound:
            told.append(
                f"the round is lost, for {sorted(failed)} failed it after others had confirmed the sum of "
                f"{sorted(bound)}: as a server may have come to it, these add up over the same start all together or "
                "not at all; do the round again by run.step() when all of them answer, or begin a run from other "
                "parameters, which leaves those out that failed"
            )
        else:
            told.append("nothing of the round was kept: do it again by run.step()")
        return SumLost("; ".join(told), failed, bound)


class PartOfSite:
    """A site's half of one sum.

    Args:
        masks: of the population.
        keys: of the site.
        data: the book of keys.
        number: of the request that it answers.
        about: a digest of what its clients were sent.
        found: their messages.
        guard: decides with whom the site takes part, and remembers what it has confirmed.

    Attributes:
        begun: the answer to that request.

    Raises:
        Refusal: the book is not to be believed, or the site takes part in no sum of its sites.
    """

    begun = b""

    def __init__(
        self,
        masks: Masked,
        keys: SiteKeys,
        data: bytes,
        number: int,
        about: bytes,
        found: RowsOf,
        guard: Guard,
    ) -> None:
        speakers, place = keys.read(data)
        if len(speakers) < masks.sites:
            raise Refusal(f"the site adds up under masks with {masks.sites} sites at least, not {len(speakers)}")
        try:
            masks.check(sum(each.clients for each in speakers), len(speakers))
        except ValueError as error:
            raise Refusal(str(error)) from None
        self._names = {each.first + 1: each.name for each in speakers}
        guard(frozenset(self._names.values()), confirmed=False)
        parties = parties_of(keys.run, number, about, {each.first: each.signing for each in speakers})
        self.number, self._said = number, dict[int, bytes]()
        self._guard, self._confirmed, self._ended = guard, False, ""
        me = speakers[place].first + 1
        self._part: Client = masks.party(parties, me, keys.signing, found)

    def first(self) -> bytes:
        """What it says in the first phase."""
        return self._answer(PHASES[0], b"")

    def answer(self, frame: Frame) -> bytes:
        """The answer to a request of a later phase; one that is repeated is answered with the same bytes.

        Raises:
            Refusal: it goes no further.
        """
        if frame.integer("sum") != self.number:
            raise Refusal("the site is not in this sum under masks; it may have begun anew since")
        phase = frame.integer("phase", PHASES[0] + 1, PHASES[-1])
        said = self._answer(phase, frame.blob("payload"))
        return frames.encode_blobs("answer", {"said": said}, sequence=frame.integer("sequence", 1))

    def _answer(self, phase: int, payload: bytes) -> bytes:
        if phase in self._said:
            return self._said[phase]
        if self._ended:
            raise Refusal(self._ended)
        self._ended = "the site could not go on with this sum under masks"  # unless it answers now
        try:
            said = self._part.answer(phase, payload)
            self._confirm(self._part.survivors)
        except (RuntimeError, ValueError) as error:
            self._ended = f"the site ends its part of a sum under masks: {error}"
            raise Refusal(self._ended) from error
        self._ended, self._said[phase] = "", said
        return said

    def _confirm(self, survivors: frozenset[int]) -> None:
        """Remember whose sum it is, once that stands, before the site says anything more."""
        if survivors and not self._confirmed:
            self._guard(frozenset(self._names[party] for party in survivors), confirmed=True)
            self._confirmed = True


def parties_of(run: str, number: int, about: bytes, signing: Mapping[int, bytes]) -> Parties:
    """Who adds up: sites with the numbers of their first clients, and one more, which they have in every sum."""
    return Parties(bytes.fromhex(run) + about, number, {first + 1: key for first, key in signing.items()})


def one_of(inbox: Tree) -> Tree:
    """What one client hears `(...)`, where all hear the same `(K, ...)`.

    Raises:
        Refusal: they do not.
    """
    for leaf in tree.leaves(inbox):
        if not torch.equal(leaf, leaf[:1].expand_as(leaf)):
            raise Refusal("the site adds messages up under masks only where all clients were sent the same")
    return tree.map(lambda leaf: leaf[0], inbox)
