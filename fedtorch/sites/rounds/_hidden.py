"""The server's part in what it may not read: keys that it passes on, sums under masks, and sealed envelopes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fedtorch.federation.exchanges.carry import Carry
from fedtorch.sites.envelopes.envelopes import Envelopes
from fedtorch.sites.envelopes.keyring import DIRECTORY, Ask, Keyring
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds._masked import Asked, SumLost, add_up, parties_of
from fedtorch.sites.rounds.plan import Lost
from fedtorch.sites.rounds.sites import Answers
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)


class Hidden:
    """Passes on what sites send each other in a run.

    Args:
        carry: with masks, or sealed.
        keyring: of the run.
        clients: the numbers of each site's clients, by name, in their order.
        rotate: so many rounds keys are used.
        ask: how sites are asked.
        next_sequence: a number for requests.
        envelopes: (site, number of the request) -> a request for envelopes.
        lost: what has become of sums, to which this one adds.
    """

    def __init__(
        self,
        carry: Carry,
        keyring: Keyring,
        clients: Mapping[str, range],
        rotate: int,
        ask: Ask,
        next_sequence: Callable[[], int],
        envelopes: Callable[[str, int], bytes],
        lost: Lost,
    ) -> None:
        self._masks, self._keyring, self._clients, self._rotate = carry.masks, keyring, clients, rotate
        self._ask, self._next, self._rounds, self._lost = ask, next_sequence, 0, lost
        self._envelopes = None if carry.network is None else Envelopes(envelopes, ask, next_sequence)
        self._parties: list[str] = []  # the sites of the directory, in its order
        self._directory = b""

    def begin(self, sites: Sequence[str], run: str, start: bytes = b"") -> dict[str, str]:
        """See to keys, and to envelopes, before sites are asked for something over a start.

        Returns:
            Why some are not to be asked: they have no keys, or are left out of sums.
        """
        out = self._left_out(sites, start)
        sites = [site for site in sites if site not in out]
        return {**out, **self._begin(sites, run)}

    def _left_out(self, sites: Sequence[str], start: bytes) -> dict[str, str]:
        bound = self._lost.bound.get(start)
        if bound is None:
            return {site: self._lost.failed[site] for site in sites if site in self._lost.failed}
        why = "others have confirmed a sum over the same start without it, which was lost"
        return {site: why for site in sites if site not in bound}

    def _begin(self, sites: Sequence[str], run: str) -> dict[str, str]:
        epoch, asked = self._rounds // self._rotate, {site: self._clients[site] for site in sites}
        missing = self._keyring.gather(asked, run, self._keyring.epoch)
        if not missing and epoch > self._keyring.epoch:
            missing = self._keyring.gather(asked, run, epoch)
        self._rounds += 1
        there = [site for site in sites if site not in missing]
        self._parties = [name for name in self._clients if name in there]
        self._directory = self._keyring.directory(list(self._clients) if self._envelopes is not None else self._parties)
        if self._envelopes is not None:
            self._envelopes.begin(there, self._directory)
        return missing

    def to(self, site: str) -> dict[str, bytes]:
        """The directory, and envelopes for a site, by name."""
        return {DIRECTORY: self._directory, **({} if self._envelopes is None else self._envelopes.to(site))}

    def keep(self, envelopes: Mapping[str, dict[str, bytes]]) -> None:
        """Take envelopes that go with a round that is kept."""
        if self._envelopes is not None:
            self._envelopes.keep(envelopes)

    def forget(self) -> None:
        """Go back to another round, maybe of another run; sites have to announce keys and write envelopes anew."""
        self._keyring.forget()
        if self._envelopes is not None:
            self._envelopes.forget()

    def add_up(self, first: Mapping[str, bytes], run: str, message: Tree, wanted: Asked) -> tuple[Tree, list[str]]:
        """(the aggregate of what sites have under masks, the sites in it); see `_masked.add_up`.

        Args:
            first: what sites have said in the first phase.
            run: the run.
            message: what clients send, `(0, ...)`.
            wanted: of the sum.

        Raises:
            SumLost: there is no sum; who has ended it is left out of those over other starts.
        """
        firsts = {name: self._clients[name].start for name in self._parties}
        signing = dict(zip(firsts.values(), self._keyring.signing(self._parties)))
        parties = parties_of(run, wanted.number, wanted.about, signing)

        def ask(phase: int, sent: Mapping[str, bytes]) -> Answers:
            number = self._next()
            encode = partial(frames.encode_blobs, "phase", run=run, sequence=number, sum=wanted.number, phase=phase)
            requests = {site: encode(blobs={"payload": payload}) for site, payload in sent.items()}
            return self._ask(requests, number, lambda site, frame: frame.blob("said"))

        try:
            made = add_up(self._masks, parties, firsts, message, first, wanted, ask)
        except SumLost as lost:
            if wanted.start:
                self._leave_out(lost.failed)
                if lost.bound:
                    self._lost.bound[wanted.start] = lost.bound
            raise
        self._lost.bound.pop(wanted.start, None)
        for site in made.sites:
            self._lost.failed.pop(site, None)
        self._leave_out({site: f"it sent {why}" for site, why in made.guilty.items()})
        return made.aggregate, made.sites

    def _leave_out(self, sites: Mapping[str, str]) -> None:
        """Leave sites out of later sums, but for one that others have confirmed with them."""
        for site, why in sites.items():
            self._lost.failed[site] = f"it is left out of sums under masks, in one of which {why}"
            _LOG.warning("site %r is left out of sums under masks: in one %s", site, why)
