"""Sites that answer in the same thread, so that what happens between any two frames can be chosen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fedtorch.sites import SiteConfiguration
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.rounds import past_sums
from fedtorch.sites.rounds.site import Site


class Clock:
    """Stands for `time` where sites are waited for: it goes on only while somebody waits in vain."""

    seconds = 0.0

    @classmethod
    def monotonic(cls) -> float:
        """Seconds."""
        return cls.seconds


class Killed(BaseException):
    """The server's process ends here."""


class Loopback:
    """A hub, as `Remote` uses one, whose sites work when they are sent something.

    Args:
        brought: what sites bring, by name.
        folder: where they keep their states, and which sums they have taken part in; without one they forget them
            when they are begun anew.
        identities: theirs, where they need some.
    """

    def __init__(
        self,
        brought: Mapping[str, SiteConfiguration],
        folder: Path | None,
        identities: Mapping[str, Identity] | None = None,
    ) -> None:
        self.brought, self.folder, self.identities = dict(brought), folder, identities or {}
        for name, configuration in brought.items():
            if folder is None:
                self.brought[name] = replace(configuration, policy=configuration.policy._replace(remember_sums=False))
            else:
                past_sums.begin(folder / name)
        self.sites: dict[str, Site] = {}
        self.frames: deque[tuple[str, bytes]] = deque()
        self.dropped: dict[str, str] = {}
        self.before: Callable[[str, bytes], bool] = lambda name, frame: True  # whether the site gets a frame
        self.after: Callable[[str, bytes], bytes | None] = lambda name, reply: reply  # what the server gets of a reply
        for name in brought:
            self.start(name)

    @property
    def connected(self) -> frozenset[str]:
        """Sites whose process is there."""
        return frozenset(self.sites)

    def start(self, name: str) -> None:
        """A site's process begins, or begins anew."""
        folder = None if self.folder is None else self.folder / name
        self.sites[name] = Site(self.brought[name], folder, self.identities.get(name))
        self.frames = deque(frame for frame in self.frames if frame[0] != name)
        self.frames.append((name, self.sites[name].hello()))

    def kill(self, name: str) -> None:
        """A site's process ends; what it has said may still arrive, as over a network."""
        self.sites.pop(name, None)

    def send(self, name: str, frame: bytes, answers: int = 1) -> None:
        if name not in self.sites:
            raise ConnectionError(f"Expected {name!r} to be connected, but it is not")
        if not self.before(name, frame):
            return
        reply = self.sites[name].answer(frame)
        if reply is not None and (reply := self.after(name, reply)) is not None:
            self.frames.append((name, reply))
        if name in self.sites:
            self.sites[name].tidy()

    def receive(self, seconds: float) -> tuple[str, bytes]:
        if not self.frames:
            Clock.seconds += seconds
            raise TimeoutError(f"Expected a frame within {seconds:g} s, but got none")
        return self.frames.popleft()

    def drop(self, name: str, reason: str) -> None:
        self.dropped[name] = reason
        self.kill(name)
        self.frames = deque(frame for frame in self.frames if frame[0] != name)
