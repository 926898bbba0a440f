"""Collect the settings of a population of sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.exchanges.carry import Carry
from fedtorch.sites.audit.audit import AuditRecord
from fedtorch.sites.rounds.sites import Sites
from fedtorch.sites.rounds.status import Status


class Lost(NamedTuple):
    """Of sums under masks that were lost: who has ended them, and who can still add up."""

    failed: dict[str, str]  # why sites are left out of sums over other starts, by name
    bound: dict[bytes, frozenset[str]]  # by start, the sites that add up over it all together or not at all


class Plan(NamedTuple):
    """See `Remote`."""

    sites: Sites
    names: tuple[str, ...]  # of all clients
    firsts: list[int]  # the number of each site's first client
    counts: list[int]  # of each site's clients
    algorithm: str
    settings: Mapping[str, Any]
    seconds: float
    quorum: float
    checkpoints: int
    withdrawals: bool
    carry: Carry  # how messages travel
    roster: bytes | None  # as the authority has signed it
    rotate: int  # rounds in which sites use the same keys
    nobody: ClientData  # a block of no clients, with rows like those of the sites
    validation: FederatedData  # stands for rows that sites keep
    record: AuditRecord | None  # of what sites are asked and answer
    lost: Lost
    status: Status  # a file beside the checkpoint
