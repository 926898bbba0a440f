"""The keys with which sites speak to each other: the server passes them on, and a site believes those who sign."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from fedtorch.protocol.halves import Half, Receive, Send
from fedtorch.sites.identity import key_directory
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.identity.key_directory import KeyDirectory, Speaker
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.policy import Refusal
from fedtorch.wire import PayloadError

DIRECTORY = "directory"  # its name beside other bytes of a frame
Wait = Callable[[Iterable[str], Callable[[str, Frame], Any]], Receive]  # (sites, how their answers are read) -> step


class Keyring:
    """Ask sites for their keys, as the server, and pass on what they announce.

    Args:
        roster: as the authority has signed it.
        clients: the numbers of each site's clients, by name, in their order.
        rotate: so many rounds keys are used; then sites make others.
        wait: makes the step that waits for sites.
        next_sequence: a number for requests.
    """

    def __init__(
        self, roster: bytes, clients: Mapping[str, range], rotate: int, wait: Wait, next_sequence: Callable[[], int]
    ) -> None:
        self._roster, self._clients, self._rotate = roster, clients, rotate
        self._wait, self._next, self._epoch, self._rounds = wait, next_sequence, 0, 0
        self._said: dict[str, tuple[bytes, Speaker]] = {}

    def gather(self, sites: Sequence[str], run: str) -> Half:
        """Ask sites for their keys, and for new ones when it is time; return why some have none."""
        epoch = self._rounds // self._rotate
        missing = yield from self._ask(sites, run, self._epoch)
        if not missing and epoch > self._epoch:
            missing = yield from self._ask(sites, run, epoch)
        self._rounds += 1
        return missing

    def _ask(self, sites: Sequence[str], run: str, epoch: int) -> Half:
        number, self._epoch = self._next(), epoch
        request = frames.encode("keys", run=run, sequence=number, epoch=epoch)
        for site in sites:
            yield Send(site, request, sequence=number)
        answers = yield self._wait(sites, partial(self._read, run))
        self._said.update(answers.messages)
        return answers.missing

    def _read(self, run: str, site: str, frame: Frame) -> tuple[bytes, Speaker]:
        """Return an announcement that others will believe, so that one site does not spoil the directory for all."""
        word = frame.blob("keys")
        try:
            said = key_directory.speaker(word, self._roster, run)
        except ValueError as error:
            raise PayloadError(str(error)) from None
        if said.name != site or range(said.first, said.first + said.clients) != self._clients[site]:
            raise frame.refused(f"keys of {site!r} with its clients", said[:3])
        return word, said

    def forget(self) -> None:
        """Ask sites again, for the keys of another run."""
        self._said.clear()

    def directory(self, sites: Iterable[str]) -> bytes:
        """Return the directory of sites in the order of their clients, as far as they have announced keys."""
        return key_directory.write(self._roster, [self._said[name][0] for name in sites if name in self._said])

    def signing(self, sites: Iterable[str]) -> list[bytes]:
        """Return the keys with which sites sign."""
        return [self._said[name][1].signing for name in sites]


class SiteKeys:
    """A site's: its own keys, and whom it believes.

    Args:
        identity: of the site; None where it has none.
        run: the run.
        first: the number of its first client.
        clients: how many it has.

    Raises:
        Refusal: there is no identity.
    """

    def __init__(self, identity: Identity | None, run: str, first: int, clients: int) -> None:
        if identity is None:
            raise Refusal("the site has no identity to sign keys with; it was not given to join(identity=...)")
        self._authority, self.run, self._issued = identity.authority, run, 0.0
        self.name, self.own = identity.name, key_directory.RunKeys(identity, run, first, clients)

    def announce(self, frame: Frame) -> bytes:
        """Return the answer to a request for keys."""
        said = self.own.announcement(frame.integer("epoch"))
        return frames.encode_blobs("answer", {"keys": said}, sequence=frame.integer("sequence", 1))

    @property
    def signing(self) -> bytes:
        """Return the private Ed25519 key."""
        return self.own.signing.private_bytes_raw()

    def read(self, data: bytes) -> tuple[tuple[Speaker, ...], int]:
        """Return (the sites of a directory, the place of this one).

        Raises:
            Refusal: it cannot be believed, lacks this site, or is of an older roster than another.
        """
        try:
            directory = key_directory.read(data, self._authority, self.run)
        except ValueError as error:
            raise Refusal(str(error)) from None
        self._check(directory)
        place = [speaker.name for speaker in directory.speakers].index(self.name)
        return directory.speakers, place

    def _check(self, found: KeyDirectory) -> None:
        if found.issued < self._issued:
            raise Refusal("the roster is older than one that the site has seen; a revoked site may be in it")
        self._issued = found.issued
        mine = [each for each in found.speakers if each.name == self.name]
        if self.own.epoch is None or not mine or mine[0].signing != self.own.signing.public_key().public_bytes_raw():
            raise Refusal("the signed key directory does not have those that this site has now; ask it for them again")
