"""Sites in threads of this process, each with a part of some clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fedtorch as ft
from fedtorch.federation.exchanges.carry import Carry, plain
from fedtorch.sites import AuditRecord, Hub, Policy, Remote, SiteConfiguration, join
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.rounds.session import SiteSession
from fedtorch.sites.streams import memory
from fedtorch.tree import Tree


def parts(data: ft.data.FederatedData, sites: int) -> list[ft.data.FederatedData]:
    """The clients in their order, shared out among so many sites."""
    clients = len(data)
    ends = [round(i * clients / sites) for i in range(sites + 1)]
    return [data.select(list(range(first, last))) for first, last in pairwise(ends)]


class Carried:
    """An algorithm's maker, and how its messages are carried."""

    def __init__(self, make: Callable[..., ft.Algorithm], carry: Carry) -> None:
        self.make, self.carry = make, carry

    def __call__(self, *arguments: Any, **settings: Any) -> ft.Algorithm:
        return self.make(*arguments, **settings)


def carry_of(make: Callable[..., ft.Algorithm]) -> Carry:
    """How the messages of what `make` returns are carried; readable, if it does not say."""
    return getattr(make, "carry", plain())


def offers(
    data: ft.data.FederatedData, make: Callable[..., ft.Algorithm], start: Tree = None, sites: int = 3, **more: Any
) -> dict[str, SiteConfiguration]:
    """What sites "a", "b", … bring: their part of the clients, however few rows, and one algorithm."""

    def made(**settings: Any) -> ft.Algorithm:
        algorithm = make(**settings)
        return algorithm if algorithm.start is not None else replace(algorithm, start=start)

    more["policy"] = more.pop("policy", Policy(minimum=1))._replace(carry=carry_of(make))
    return {
        chr(ord("a") + i): SiteConfiguration(part, {"it": made}, **more) for i, part in enumerate(parts(data, sites))
    }


class Thread(threading.Thread):
    """A site that ends by itself once the run is over, or at the latest when its hub closes."""

    def __init__(
        self,
        host: Hub,
        name: str,
        configuration: SiteConfiguration,
        folder: Path | None = None,
        identity: Identity | None = None,
        record: AuditRecord | None = None,
        timeout: float = 20.0,
        ask: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(daemon=True, name=f"site {name}")
        self.host, self.site, self.configuration, self.folder, self.identity = (
            host,
            name,
            configuration,
            folder,
            identity,
        )
        self.record, self.timeout, self.ask = record, timeout, ask
        self.session: SiteSession | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            dial = lambda: memory.link(self.host, self.site)
            own = {"identity": self.identity, "record": self.record, "ask": self.ask}
            self.session = join(dial, self.configuration, self.folder, timeout=self.timeout, **own)
        except Exception as error:
            self.error = error


@contextmanager
def joined(
    brought: Mapping[str, SiteConfiguration],
    *,
    rows: Tree = None,
    settings: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    identities: Mapping[str, Identity] | None = None,
    records: Mapping[str, AuditRecord] | None = None,
    **more: Any,
) -> Iterator[tuple[Remote, Mapping[str, Thread]]]:
    """(the population of such sites, the threads in which they run)."""
    host = Hub()
    known, recorded = identities or {}, records or {}
    threads = {
        name: Thread(host, name, configuration, folder and folder / name, known.get(name), recorded.get(name))
        for name, configuration in brought.items()
    }
    for thread in threads.values():
        thread.start()
    more = {"quorum": 1.0, "seconds": 20.0, **more}
    try:
        yield Remote(host, list(brought), "it", settings, rows=rows, **more), threads
    finally:
        for name in brought:
            host.drop(name, "the test is over")
        for thread in threads.values():
            thread.join(10.0)


@contextmanager
def servers_keys() -> Iterator[None]:
    """Have sites draw by the server's keys also where they count rows, as clients of one process do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SiteSession, "_key", lambda site, purpose, key, sent, about: key)
        yield
