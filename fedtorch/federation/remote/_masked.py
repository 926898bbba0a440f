"""Sums under masks between sites: what the server carries, and what a site answers, phase by phase.

Every site masks the sum of its clients' messages, see `Exchange.masks`. In the name of the sum is a digest of what
clients were sent, so that a server which sends sites different models gets no sum of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch

from fedtorch import tree, wire
from fedtorch.federation.algorithm import Turn
from fedtorch.federation.exchange import RowsOf
from fedtorch.federation.masks import MaskedPart, MaskedSum, Masks, Parties
from fedtorch.federation.remote import _frames as frames
from fedtorch.federation.remote._frames import Frame
from fedtorch.federation.remote._keyring import Ask, SiteKeys
from fedtorch.federation.remote.terms import Refusal
from fedtorch.tree import Tree


def digest_of(inbox: Tree, turn: Turn) -> bytes:
    """Of what one client hears."""
    return hashlib.sha256(wire.encode({"inbox": inbox, "key": turn.key.cpu()}, {"round": turn.round})).digest()


class SumOfSites:
    """The server's half of one sum.

    Args:
        masks: of the exchange.
        parties: who adds up.
        firsts: the number of each site's first client, by name.
        message: what clients send, `(0, ...)`.
        ask: how sites are asked.
        next_sequence: a number for requests.
    """

    def __init__(
        self,
        masks: Masks,
        parties: Parties,
        firsts: Mapping[str, int],
        message: Tree,
        ask: Ask,
        next_sequence: Callable[[], int],
    ) -> None:
        self._masks, self._firsts, self._ask, self._next = masks, firsts, ask, next_sequence
        self._number = parties.attempt
        self._sum: MaskedSum = masks.server(parties, message)

    def finish(self, first: Mapping[str, bytes], run: str) -> tuple[Tree, list[str]]:
        """(the aggregate, the sites that are in it), from what sites have said in the first phase.

        Raises:
            RuntimeError: there is no sum.
        """
        phases, said = self._masks.phases, first
        for phase in phases:
            if phase != phases[0]:
                number = self._next()
                requests = {
                    site: frames.encode_blobs(
                        "phase", {"payload": self._sum.request(phase, self._firsts[site] + 1)},
                        run=run, sequence=number, sum=self._number, phase=phase,
                    )
                    for site in said
                }  # fmt: skip
                said = self._ask(requests, number, lambda site, frame: frame.blob("said")).answers
            said = {site: message for site, message in said.items() if self._sum.take(phase, message)}
        survivors = self._sum.survivors
        return self._sum.aggregate(), [name for name, first in self._firsts.items() if first + 1 in survivors]


class PartOfSite:
    """A site's half of one sum.

    Args:
        masks: of the exchange.
        keys: of the site.
        data: the book of keys.
        number: of the request that it answers.
        about: a digest of what its clients were sent.
        found: their messages.
        earlier: the survivors of sums of the same messages.

    Attributes:
        begun: the answer to that request.
        about: the digest.

    Raises:
        Refusal: the book is not to be believed.
    """

    begun = b""

    def __init__(
        self,
        masks: Masks,
        keys: SiteKeys,
        data: bytes,
        number: int,
        about: bytes,
        found: RowsOf,
        earlier: Sequence[frozenset[int]],
    ) -> None:
        speakers, place = keys.read(data)
        if len(speakers) < masks.minimum:
            raise Refusal(f"the site adds up under masks with {masks.minimum} sites at least, not {len(speakers)}")
        try:
            masks.check(sum(each.clients for each in speakers), len(speakers))
        except ValueError as error:
            raise Refusal(str(error)) from None
        parties = parties_of(keys.run, number, about, {each.first: each.signing for each in speakers})
        self.number, self.about, self._phases, self._said = number, about, masks.phases, dict[int, bytes]()
        me = speakers[place].first + 1
        self._part: MaskedPart = masks.party(parties, me, keys.signing, found, earlier)

    @property
    def survivors(self) -> frozenset[int]:
        """Whose sum it is, once it has confirmed that, in the phase before the last; else nobody."""
        return self._part.survivors if self._phases[-2] in self._said else frozenset()

    def first(self) -> bytes:
        """What it says in the first phase."""
        return self._answer(self._phases[0], b"")

    def answer(self, frame: Frame) -> bytes:
        """The answer to a request of a later phase; one that is repeated is answered with the same bytes.

        Raises:
            Refusal: it goes no further.
        """
        if frame.integer("sum") != self.number:
            raise Refusal("the site is not in this sum under masks; it may have begun anew since")
        phase = frame.integer("phase", self._phases[0] + 1, self._phases[-1])
        said = self._answer(phase, frame.blob("payload"))
        return frames.encode_blobs("answer", {"said": said}, sequence=frame.integer("sequence", 1))

    def _answer(self, phase: int, payload: bytes) -> bytes:
        if phase not in self._said:
            try:
                self._said[phase] = self._part.answer(phase, payload)
            except (RuntimeError, ValueError) as error:
                raise Refusal(f"the site ends its part of a sum under masks: {error}") from error
        return self._said[phase]


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
