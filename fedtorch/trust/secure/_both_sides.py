"""What clients and server of a secure sum find alike: who is whose neighbour, and which masks are between them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from fedtorch.trust.privacy.entropy import Purpose, derived, expanded
from fedtorch.trust.secure import ring
from fedtorch.trust.secure.messages import ADVERT, KEYS, Aborted, Session, verified
from fedtorch.trust.secure.neighbours import circle


def opened_adverts(session: Session, adverts: Sequence[bytes]) -> dict[int, tuple[bytes, bytes, bytes]]:
    """(mask key, letter key, commitment) of every client that has advertised.

    Raises:
        Aborted: too few, or one twice.
        ValueError: some are not of this session.
    """
    found: dict[int, tuple[bytes, bytes, bytes]] = {}
    for message in adverts:
        sender, body = verified(session, ADVERT, message)
        if sender in found:
            raise Aborted(f"Expected one advert of client {sender}, but got two")
        found[sender] = KEYS.unpack(body)
    if len(found) < session.minimum:
        raise Aborted(f"Expected at least {session.minimum} clients to begin, but got {len(found)}")
    return found


def graph(session: Session, adverts: dict[int, tuple[bytes, bytes, bytes]]) -> dict[int, list[int]]:
    """Everybody's neighbours: an order that nobody knows before all keys are told."""
    seed = hashlib.sha256(session.digest() + b"".join(b"".join(adverts[client]) for client in sorted(adverts))).digest()
    return circle(sorted(adverts), session.graph.neighbours, seed)


def pair_mask(session: Session, digest: bytes, shared: bytes, client: int, other: int) -> Tensor:
    """What `client` adds for `other`; the other adds the negative."""
    low, high = sorted((client, other))
    purpose = Purpose(session.run, session.round, session.attempt, f"mask of {low} and {high}", digest)
    mask = expanded(derived(shared, purpose), session.size)
    return mask if client == low else ring.negate(mask, session.width)


def commitment(secret: bytes) -> bytes:
    """What is told of a secret before it."""
    return hashlib.sha256(b"commitment " + secret).digest()
