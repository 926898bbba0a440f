"""The settings of a population of sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.exchanges.carry import Carry
from fedtorch.sites.audit.audit import AuditRecord
from fedtorch.sites.rounds.sites import Sites
from fedtorch.sites.rounds.status import Status


class Lost(NamedTuple):
    """A record of failed masked sums."""

    failed: dict[str, str]  # sites left out of sums over other starts, with reasons
    bound: dict[bytes, frozenset[str]]  # by start, sites that add up over it only all together


class Plan(NamedTuple):
    """The settings of a `Remote`, see there."""

    sites: Sites
    names: tuple[str, ...]  # names of all clients
    firsts: list[int]  # number of each site's first client
    counts: list[int]  # number of clients by site
    algorithm: str
    settings: Mapping[str, Any]
    seconds: float
    quorum: float
    checkpoints: int
    withdrawals: bool
    carry: Carry  # transport of messages
    roster: bytes | None  # signed by the authority
    rotate: int  # number of rounds after which sites make new keys
    nobody: ClientData  # an empty block, with rows like those of the sites
    validation: FederatedData  # placeholder for the sites' validation rows
    record: AuditRecord | None  # log of requests and answers
    lost: Lost
    status: Status  # a file beside the checkpoint
