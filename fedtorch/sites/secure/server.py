"""The server's side of a secure sum: it passes on messages, and removes the masks from the sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from fedtorch.random.entropy import expanded
from fedtorch.sites.secure import ring
from fedtorch.sites.secure._both_sides import Adverts, agreed, exchanged, graph, opened_adverts, pair_mask
from fedtorch.sites.secure._disputes import settled
from fedtorch.sites.secure._recovery import Recovery
from fedtorch.sites.secure.messages import (
    ADVERT,
    COMPLAIN,
    CONFIRM,
    ENVELOPE,
    KEYS,
    MASKED,
    NUMBER,
    PHASES,
    REVEAL,
    SHARE,
    SHARES,
    Aborted,
    Session,
    body_of,
    bundle,
    listed,
    records,
    split_words,
    verified,
)

_PROBE = X25519PrivateKey.from_private_bytes(bytes([7]) * 32)  # any key gives zeros with a key of low order


class Server:
    """The server's side: checks every message, refuses invalid ones, and computes the sum.

    Args:
        session: the session.

    Attributes:
        refused: number of refused messages.
        guilty: violations of the protocol by client number, which signed messages prove.
        missing: reasons by client number for missing or refused messages.
        confirmed: clients that have answered in each phase after the survivors were known.

    Raises:
        ValueError: a session whose threshold does not protect its clients' secrets; see `Session.check`.

    Example:
        >>> import torch
        >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        >>> from fedtorch.trust import privacy
        >>> from fedtorch.sites.secure.messages import Session
        >>> from fedtorch.sites.secure.neighbours import Neighbourhoods
        >>> from fedtorch.sites.secure.parties import Client
        >>> keys = {k: Ed25519PrivateKey.from_private_bytes(bytes([k]) * 32) for k in (1, 2, 3, 4)}
        >>> public = {k: key.public_key().public_bytes_raw() for k, key in keys.items()}
        >>> session = Session(b"run", 0, 0, public, size=2, graph=Neighbourhoods(3, 2), minimum=3)
        >>> clients = {k: Client(session, k, keys[k], privacy.from_seed(k), torch.tensor([k, 10 * k])) for k in keys}
        >>> server = Server(session)
        >>> for phase in PHASES:
        ...     for k in (1, 2, 3, 4) if phase < MASKED else (1, 2, 3):  # client 4 drops out
        ...         assert server.take(phase, clients[k].answer(phase, server.request(phase, k)))
        >>> server.survivors, server.total()
        ([1, 2, 3], tensor([ 6, 60]))
    """

    def __init__(self, session: Session) -> None:
        session.check()
        self.session, self._digest, self.refused = session, session.digest(), 0
        self.guilty: dict[int, str] = {}
        self.missing: dict[int, str] = {}
        self.confirmed: list[frozenset[int]] = []
        self.messages: dict[int, dict[int, bytes]] = {phase: {} for phase in PHASES}
        self._sealed: dict[int, dict[int, tuple[bytes, ...]]] = {}  # by dealer and receiver
        self._heads: dict[int, bytes] = {}  # heads of masked words
        self._open = ADVERT  # current phase; it ends with the first request or message of the next

    def collect(self, phase: int, messages: Mapping[int, bytes], missing: Mapping[int, str]) -> None:
        """Process all messages of a phase, by client, and the reasons why others have sent none."""
        self.missing.update(missing)
        if self.survivors:
            self.confirmed.append(frozenset(messages))
        for client, message in messages.items():
            if not self.take(phase, message):
                self.missing[client] = "it sent what the protocol refuses"

    def withheld(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return (clients that a failed sum binds together, those of them that were silent after others confirmed)."""
        bound = frozenset(self.survivors) if any(self.confirmed) else frozenset()
        return bound, next((bound - answered for answered in self.confirmed if bound - answered), frozenset())

    def take(self, phase: int, message: bytes) -> bool:
        """Store a message of the current phase; return False if it is refused as forged, late, repeated or not due."""
        try:
            head = split_words(self.session, message)[0] if phase == MASKED else message
            sender, body = verified(self.session, phase, head, self._digest)
            if phase < self._open:
                raise ValueError(f"phase {phase} is over")
            if sender in self.messages[phase] or sender not in self.present(phase):
                raise ValueError(f"client {sender} has already sent one, or has dropped out before")
            wrong = self._wrong(phase, sender, body)
        except (Aborted, ValueError):
            self.refused += 1
            return False
        if wrong:
            self.guilty[sender] = wrong
            self.refused += 1
            return False
        self._open = phase
        self.messages[phase][sender] = message
        if phase == MASKED:
            self._heads[sender] = head
        return True

    def _wrong(self, phase: int, sender: int, body: bytes) -> str:
        """Return the fault of a signed body of the phase, or ""; raise ValueError if it is malformed."""
        if phase == ADVERT:
            low = len(body) == KEYS.size and None in [exchanged(_PROBE, key) for key in KEYS.unpack(body)[:2]]
            return "keys of low order" if low else _unless(len(body) == KEYS.size, "malformed keys")
        near = self.neighbours[sender]
        if phase == SHARES:
            sealed = {int(to): tuple(map(bytes, rest)) for to, *rest in records(body, ENVELOPE)}
            if sorted(sealed) != near or len(body) != len(near) * ENVELOPE.size:
                return "shares for others than its neighbours"
            self._sealed[sender] = sealed
            return ""
        if phase == COMPLAIN:
            right = {*_numbers(body)} <= {*self._senders(sender)}
            return _unless(right, "a complaint about a client that has sent it nothing")
        if phase == MASKED:
            return _unless(listed(self.session, body) == {*self._masking(sender)}, "masks with others than it was told")
        if phase == CONFIRM:
            return _unless(body == self._agreed, "another set of survivors than it was told")
        stayed = {*self.survivors}
        wanted = [(other, other in stayed) for other in sorted(self._masking(sender))]
        shares = [(int(owner), bool(of_mask)) for owner, of_mask, _ in records(body, SHARE)]
        return _unless(shares == wanted, "other shares than those that are due")

    def present(self, phase: int) -> Iterable[int]:
        """Return the clients that may send a message in a phase: those of the phase before that are not left out."""
        if phase == ADVERT:
            return self.session.keys
        return self._remaining if phase == MASKED else self.messages[phase - 1]

    def request(self, phase: int, client: int) -> bytes:
        """Return the payload for a client's message of a phase."""
        self._open = max(self._open, phase)
        if phase == ADVERT:
            return b""
        if phase == SHARES:
            return bundle(list(self.messages[ADVERT].values()))
        if phase == COMPLAIN:
            return b"".join(ENVELOPE.pack(other, *self._sealed[other][client]) for other in self._senders(client))
        if phase == MASKED:
            return b"".join(map(NUMBER.pack, self._masking(client)))
        near = self.neighbours[client]
        if phase == CONFIRM:
            survivors = b"".join(map(NUMBER.pack, self.survivors))
            return bundle([survivors, *(self._heads[k] for k in near if k in self._heads)])
        return bundle([confirmed[k] for k in near if k in (confirmed := self.messages[CONFIRM])])

    @cached_property
    def neighbours(self) -> dict[int, list[int]]:
        """Return the neighbours of every client, after phase 1.

        Raises:
            Aborted: too few have begun.
        """
        return graph(self.session, self._adverts, self._adverts)

    @cached_property
    def _adverts(self) -> Adverts:
        adverts = opened_adverts(self.session, list(self.messages[ADVERT].values()))
        self._open = max(self._open, SHARES)
        return adverts

    def _senders(self, client: int) -> list[int]:
        """Return the neighbours that have sent shares."""
        return [other for other in self.neighbours[client] if other in self.messages[SHARES]]

    @cached_property
    def _remaining(self) -> frozenset[int]:
        """Return the clients that may mask, after the complaints of phase 3."""
        self._open = max(self._open, MASKED)
        complaints = self.messages[COMPLAIN]
        disputes = [(k, other) for k, message in complaints.items() for other in _numbers(body_of(message))]
        liars, out = settled([pair for pair in disputes if pair[1] in complaints], self.session.graph.colluding)
        self.guilty.update(dict.fromkeys(liars, "shares or complaints against more than can be guilty"))
        return frozenset(complaints) - out

    def _masking(self, client: int) -> list[int]:
        """Return the clients with whom one masks; none if it is left out."""
        return [k for k in self.neighbours[client] if k in self._remaining] if client in self._remaining else []

    @property
    def survivors(self) -> list[int]:
        """Return the clients that have sent masked words."""
        return sorted(self.messages[MASKED])

    @cached_property
    def _agreed(self) -> bytes:
        self._open = max(self._open, CONFIRM)
        return agreed(self.survivors, self._adverts)

    def total(self) -> Tensor:
        """Return the sum of the survivors' words, `(size,)`.

        Raises:
            Aborted: it cannot be recovered, or has too few clients; `members` are those known to be guilty.
        """
        survivors, adverts = self.survivors, self._adverts
        if len(survivors) < self.session.minimum:
            raise self._aborted(f"A sum of {len(survivors)} clients is smaller than the minimum {self.session.minimum}")
        dealt = {dealer: {to: rest[1:] for to, rest in sealed.items()} for dealer, sealed in self._sealed.items()}
        recovery = Recovery(self.session.graph.threshold, dealt, self.messages[REVEAL])
        self.guilty.update(dict.fromkeys(recovery.forgers, "another share than it was given"))
        gone = sorted(self._remaining - {*survivors})
        masks = {client: recovery.own_mask(client, adverts[client][2]) for client in survivors}
        keys = {client: recovery.mask_key(client, adverts[client][0]) for client in gone}
        self.guilty.update(dict.fromkeys(recovery.dealers, "shares that do not give its committed secret"))
        total, width = torch.zeros(self.session.size, dtype=torch.int64), self.session.width
        for client, secret in masks.items():
            if secret is None:
                raise self._aborted(recovery.why(client, own=True))
            words = bytearray(split_words(self.session, self.messages[MASKED][client])[1])
            ring.add(total, torch.frombuffer(words, dtype=torch.int64), width)
            ring.add(total, ring.negate(expanded(secret, self.session.size), width), width)
        for client, secret in keys.items():
            if secret is None:
                raise self._aborted(recovery.why(client, own=False))
            for other in {*self._masking(client)}.intersection(survivors):
                shared = exchanged(X25519PrivateKey.from_private_bytes(secret), adverts[other][0])
                assert shared is not None
                ring.add(total, pair_mask(self.session, self._digest, shared, client, other), width)
        return total

    def _aborted(self, message: str) -> Aborted:
        named = "; ".join(f"client {client} has sent {why}" for client, why in sorted(self.guilty.items()))
        return Aborted(f"{message}{'; ' if named else ''}{named}", self.guilty)


def _unless(right: bool, otherwise: str) -> str:
    return "" if right else otherwise


def _numbers(body: bytes) -> list[int]:
    return [int(client) for (client,) in records(body, NUMBER)]
