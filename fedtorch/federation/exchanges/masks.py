"""Sums that nobody sees the parts of, as a population carries them: parties, phases, and bytes between.

How it is done is the business of `fedtorch.sites.secure`; an exchange that does it has a field `masks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from fedtorch.tree import Tree


class Parties(NamedTuple):
    """Who adds up under masks; see `Masks`."""

    run: bytes
    attempt: int  # no other sum of the run has the same
    keys: dict[int, bytes]  # by party, from 1 on, the Ed25519 key with which it signs


class MaskedSum(Protocol):
    """A sum as whoever adds it up sees it: parties say what they have to, phase by phase."""

    def request(self, phase: int, party: int) -> bytes:
        """What a party has to be sent before it can say its message of a phase."""
        ...

    def take(self, phase: int, message: bytes) -> bool:
        """Takes a message in; False if it is refused."""
        ...

    @property
    def survivors(self) -> list[int]:
        """The parties that are in the sum."""
        ...

    @property
    def guilty(self) -> Mapping[int, str]:
        """The parties that have broken the protocol, and how."""
        ...

    def aggregate(self) -> Tree:
        """What `Exchange.finish` makes of all their messages; raises RuntimeError where that cannot be known."""
        ...


class MaskedPart(Protocol):
    """A party's part of a sum."""

    @property
    def survivors(self) -> frozenset[int]:
        """Whose sum it is, as far as it has confirmed that."""
        ...

    def answer(self, phase: int, payload: bytes) -> bytes:
        """Its message of a phase; raises RuntimeError or ValueError where it goes no further."""
        ...


class Masks(Protocol):
    """How the messages of several processes are added up so that nobody sees those of one.

    Example:
        >>> import torch, fedtorch as ft
        >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        >>> from fedtorch.federation.exchanges.exchange import RowsOf
        >>> from fedtorch.trust import secure
        >>> masks: Masks = secure.secure_star(secure.Grid(20), minimum=3, dropouts=0).masks
        >>> keys = {number: Ed25519PrivateKey.generate() for number in (1, 2, 3)}
        >>> parties = Parties(b"run 1", 1, {n: key.public_key().public_bytes_raw() for n, key in keys.items()})
        >>> parts: dict[int, MaskedPart] = {}
        >>> for number, key in keys.items():  # each says its own number
        ...     message = RowsOf(torch.tensor([number - 1]), ft.Sum(torch.tensor([float(number)])))
        ...     parts[number] = masks.party(parties, number, key.private_bytes_raw(), message)
        >>> total: MaskedSum = masks.server(parties, ft.Sum(torch.zeros(0)))
        >>> for phase in masks.phases:
        ...     for number, part in parts.items():
        ...         assert total.take(phase, part.answer(phase, total.request(phase, number)))
        >>> total.aggregate().value, total.survivors
        (tensor(6., dtype=torch.float64), [1, 2, 3])
    """

    @property
    def phases(self) -> Sequence[int]:
        """Their numbers, in order."""
        ...

    @property
    def minimum(self) -> int:
        """Parties of a sum, at least."""
        ...

    @property
    def step(self) -> float:
        """The distance between numbers that are not the same under masks."""
        ...

    def __str__(self) -> str:
        """What all parties have to agree on."""
        ...

    def check(self, clients: int, parties: int | None = None) -> None:
        """Raise ValueError where so many clients of all parties, or so many parties, cannot be added up."""
        ...

    def server(self, parties: Parties, message: Tree) -> MaskedSum:
        """A sum of messages that look like `message` `(0, ...)`."""
        ...

    def party(self, parties: Parties, number: int, signing: bytes, found: Tree) -> MaskedPart:
        """The part of a party with its private Ed25519 key and the messages of its clients, a `RowsOf`."""
        ...
