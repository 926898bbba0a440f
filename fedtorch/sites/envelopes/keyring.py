"""Sites' keys for messages to each other: the server passes them on, and a site checks their signatures."""

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
Wait = Callable[[Iterable[str], Callable[[str, Frame], Any]], Receive]  # (sites, reader of answers) -> step


class Keyring:
    """The server's store of sites' keys, which it requests and passes on.

    Args:
        roster: the roster signed by the authority.
        clients: numbers of each site's clients, by site, in order.
        rotate: number of rounds after which sites make new keys.
        wait: returns the step that waits for sites.
        next_sequence: returns a new number for a request.
    """

    def __init__(
        self, roster: bytes, clients: Mapping[str, range], rotate: int, wait: Wait, next_sequence: Callable[[], int]
    ) -> None:
        self._roster, self._clients, self._rotate = roster, clients, rotate
        self._wait, self._next, self._epoch, self._rounds = wait, next_sequence, 0, 0
        self._announced: dict[str, tuple[bytes, Speaker]] = {}

    def gather(self, sites: Sequence[str], run: str) -> Half:
        """Request sites' keys, and new ones when it is time; return the reasons of sites without keys."""
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
        self._announced.update(answers.messages)
        return answers.missing

    def _read(self, run: str, site: str, frame: Frame) -> tuple[bytes, Speaker]:
        """Return a site's announcement after checking it, so that an invalid one does not spoil the directory."""
        word = frame.blob("keys")
        try:
            speaker = key_directory.speaker(word, self._roster, run)
        except ValueError as error:
            raise PayloadError(str(error)) from None
        if speaker.name != site or range(speaker.first, speaker.first + speaker.clients) != self._clients[site]:
            raise frame.refused(f"keys of {site!r} with its clients", speaker[:3])
        return word, speaker

    def forget(self) -> None:
        """Discard all keys, for another run."""
        self._announced.clear()

    def directory(self, sites: Iterable[str]) -> bytes:
        """Return the directory of those `sites` that have announced keys; `sites` are in the order of their clients."""
        return key_directory.write(
            self._roster, [self._announced[name][0] for name in sites if name in self._announced]
        )

    def signing(self, sites: Iterable[str]) -> list[bytes]:
        """Return sites' public signing keys."""
        return [self._announced[name][1].signing for name in sites]


class SiteKeys:
    """A site's keys in a run, and its check of key directories.

    Args:
        identity: the site's identity; None if it has none.
        run: identity of the run.
        first: number of the site's first client.
        clients: number of its clients.

    Raises:
        Refusal: there is no identity.
    """

    def __init__(self, identity: Identity | None, run: str, first: int, clients: int) -> None:
        if identity is None:
            raise Refusal("the site has no identity to sign keys with; it was not given to join(identity=...)")
        self._authority, self.run, self._issued = identity.authority, run, 0.0
        self.name, self.keys = identity.name, key_directory.RunKeys(identity, run, first, clients)

    def announce(self, frame: Frame) -> bytes:
        """Return the answer to a request for keys."""
        announcement = self.keys.announcement(frame.integer("epoch"))
        return frames.encode_blobs("answer", {"keys": announcement}, sequence=frame.integer("sequence", 1))

    @property
    def signing(self) -> bytes:
        """Return the private Ed25519 key."""
        return self.keys.signing.private_bytes_raw()

    def read(self, data: bytes) -> tuple[tuple[Speaker, ...], int]:
        """Return (the sites of a directory, the position of this one).

        Raises:
            Refusal: it is invalid, lacks this site's keys, or has an older roster than an earlier directory.
        """
        try:
            directory = key_directory.read(data, self._authority, self.run)
        except ValueError as error:
            raise Refusal(str(error)) from None
        self._check(directory)
        place = [speaker.name for speaker in directory.speakers].index(self.name)
        return directory.speakers, place

    def _check(self, directory: KeyDirectory) -> None:
        if directory.issued < self._issued:
            raise Refusal("the roster is older than one that the site has seen; a revoked site may be in it")
        self._issued = directory.issued
        mine = [each for each in directory.speakers if each.name == self.name]
        if self.keys.epoch is None or not mine or mine[0].signing != self.keys.signing.public_key().public_bytes_raw():
            raise Refusal("the signed key directory does not have this site's current keys; ask it for them again")
