"""The server's side of a secure sum: it passes messages on, takes masks out of the sum, and learns nothing else."""

from __future__ import annotations

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from torch import Tensor

from fedtorch.trust.privacy.entropy import expanded
from fedtorch.trust.secure import ring, shamir
from fedtorch.trust.secure._both_sides import commitment, graph, opened_adverts, pair_mask
from fedtorch.trust.secure.messages import (
    ADVERT,
    CONFIRM,
    LETTER,
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
    most_up,
    records,
    verified,
)


class Server:
    """The server's side: takes every message in, refuses what is wrong, and ends with the sum.

    Args:
        session: what was agreed.

    Attributes:
        refused: how many messages were refused.

    Example:
        >>> import torch
        >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        >>> from fedtorch.trust import privacy
        >>> from fedtorch.trust.secure import Client, Neighbourhoods, Session
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
        self.session, self._digest, self.refused = session, session.digest(), 0
        self.messages: dict[int, dict[int, bytes]] = {phase: {} for phase in PHASES}
        self._neighbours: dict[int, list[int]] | None = None  # once nobody can advertise any more

    def take(self, phase: int, message: bytes) -> bool:
        """Takes a message of the open phase in; False if it is refused: forged, of somebody else, late, or again."""
        try:
            sender, body = verified(self.session, phase, message)
            if any(self.messages[later] for later in range(phase + 1, REVEAL + 1)):
                raise ValueError(f"phase {phase} is over")
            earlier = self.messages.get(phase - 1, self.session.keys)
            if sender in self.messages[phase] or sender not in earlier:
                raise ValueError(f"client {sender} has been heard, or has dropped out before")
            self._check(phase, sender, body, len(message))
        except (Aborted, ValueError):
            self.refused += 1
            return False
        self.messages[phase][sender] = message
        return True

    def _check(self, phase: int, sender: int, body: bytes, length: int) -> None:
        """Raises ValueError unless a signed body has the form of its phase."""
        if phase in (SHARES, REVEAL):
            form = LETTER if phase == SHARES else SHARE
            about = [int(record[0]) for record in records(body, form)]
            near = self.neighbours[sender]
            if (sorted(about) != near) if phase == SHARES else (len({*about}) < len(about) or not {*about} <= {*near}):
                raise ValueError(f"expected records of the neighbours of client {sender}")
        elif length != most_up(self.session, phase):
            raise ValueError(f"expected {most_up(self.session, phase)} bytes")

    def request(self, phase: int, client: int) -> bytes:
        """What a client has to be sent before it can say its message of a phase."""
        if phase == ADVERT:
            return b""
        if phase == MASKED:
            return bundle(self.shares_for(client))
        if phase == CONFIRM:
            return b"".join(NUMBER.pack(survivor) for survivor in self.survivors)
        return bundle(list(self.messages[phase - 1].values()))

    @property
    def neighbours(self) -> dict[int, list[int]]:
        """Everybody's neighbours, once phase 1 is over.

        Raises:
            Aborted: too few have begun.
        """
        if self._neighbours is None:
            self._neighbours = graph(self.session, opened_adverts(self.session, list(self.messages[ADVERT].values())))
        return self._neighbours

    @property
    def survivors(self) -> list[int]:
        """Who has sent masked words."""
        return sorted(self.messages[MASKED])

    def shares_for(self, client: int) -> list[bytes]:
        """The shares that a client's neighbours have sent."""
        sent = self.messages[SHARES]
        return [sent[other] for other in self.neighbours[client] if other in sent]

    def total(self) -> Tensor:
        """The sum of the survivors' words, `(size,)`.

        Raises:
            Aborted: it cannot be recovered, or would be of too few.
        """
        survivors, adverts = self.survivors, opened_adverts(self.session, list(self.messages[ADVERT].values()))
        if len(survivors) < self.session.minimum:
            raise Aborted(f"A sum of {len(survivors)} clients is smaller than the minimum {self.session.minimum}")
        total, width = torch.zeros(self.session.size, dtype=torch.int64), self.session.width
        for message in self.messages[MASKED].values():
            ring.add(total, torch.frombuffer(bytearray(body_of(message)), dtype=torch.int64), width)
        revealed = self._revealed()
        for client in survivors:
            own = self._recovered(client, True, revealed)
            if commitment(own) != adverts[client][2]:
                raise Aborted(f"The shares of client {client}'s own mask are not of what it has committed to")
            ring.add(total, ring.negate(expanded(own, self.session.size), width), width)
        for client in sorted(self.messages[SHARES].keys() - set(survivors)):
            key = X25519PrivateKey.from_private_bytes(self._recovered(client, False, revealed))
            if key.public_key().public_bytes_raw() != adverts[client][0]:
                raise Aborted(f"The shares of client {client}'s mask key are not of the key in its advert")
            for other in set(self.neighbours[client]) & set(survivors):
                shared = key.exchange(X25519PublicKey.from_public_bytes(adverts[other][0]))
                ring.add(total, pair_mask(self.session, self._digest, shared, client, other), width)
        return total

    def _revealed(self) -> dict[tuple[int, bool], dict[int, int]]:
        """Shares by (whose, of the own mask) and holder."""
        found: dict[tuple[int, bool], dict[int, int]] = {}
        for holder, message in self.messages[REVEAL].items():
            for owner, own, share in records(body_of(message), SHARE):
                found.setdefault((int(owner), bool(own)), {})[holder] = int.from_bytes(bytes(share), "big")
        return found

    def _recovered(self, client: int, own: bool, revealed: dict[tuple[int, bool], dict[int, int]]) -> bytes:
        shares, threshold = revealed.get((client, own), {}), self.session.graph.threshold
        if len(shares) < threshold:
            raise Aborted(f"Expected {threshold} shares of client {client}'s secret, but got {len(shares)}")
        try:
            return shamir.combine(dict(sorted(shares.items())[:threshold]))
        except ValueError as error:
            raise Aborted(f"The shares of client {client}'s secret do not belong together") from error
