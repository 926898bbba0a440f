"""Functions that clients and server of a secure sum share: neighbours, and the masks between them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from torch import Tensor

from fedtorch.random.entropy import Purpose, derived, expanded
from fedtorch.sites.secure import ring
from fedtorch.sites.secure.messages import ADVERT, KEYS, NUMBER, Aborted, Session, verified
from fedtorch.sites.secure.neighbours import circle

Adverts = dict[int, tuple[bytes, bytes, bytes]]  # (mask key, envelope key, commitment to its own mask) by client


def opened_adverts(session: Session, adverts: Sequence[bytes]) -> Adverts:
    """Return (mask key, envelope key, commitment) of every client that has advertised.

    Raises:
        Aborted: too few clients, or one twice.
        ValueError: some adverts are not of this session.
    """
    opened: Adverts = {}
    digest = session.digest()
    for message in adverts:
        sender, body = verified(session, ADVERT, message, digest)
        if sender in opened:
            raise Aborted(f"Expected one advert of client {sender}, but got two")
        opened[sender] = KEYS.unpack(body)
    if len(opened) < session.minimum:
        raise Aborted(f"Expected at least {session.minimum} clients to begin, but got {len(opened)}")
    return opened


def graph(session: Session, adverts: Adverts, of: Collection[int]) -> dict[int, list[int]]:
    """Return the neighbours of clients that have advertised, by an order that nobody knows before all keys are known.

    The order contains all clients of the session. An attacker who keeps honest clients from advertising leaves gaps
    among neighbours, as by dropouts, and brings no corrupt clients closer to anybody.
    """
    seed = hashlib.sha256(session.digest() + b"".join(b"".join(adverts[client]) for client in sorted(adverts))).digest()
    near = circle(sorted(session.keys), session.graph.neighbours, seed, of)
    return {client: [other for other in others if other in adverts] for client, others in near.items()}


def exchanged(secret: X25519PrivateKey, public: bytes) -> bytes | None:
    """Return the secret shared with the owner of a public key; None for a key of low order, which gives no secret."""
    try:
        return secret.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return None


def pair_mask(session: Session, digest: bytes, shared: bytes, client: int, other: int) -> Tensor:
    """Return the mask that `client` adds for `other`; the other adds its negative."""
    low, high = sorted((client, other))
    purpose = Purpose(session.run, session.round, session.attempt, f"mask of {low} and {high}", digest)
    mask = expanded(derived(shared, purpose), session.size)
    return mask if client == low else ring.negate(mask, session.width)


def commitment(secret: bytes) -> bytes:
    """Return the commitment to a secret."""
    return hashlib.sha256(b"commitment " + secret).digest()


def agreed(survivors: Sequence[int], adverts: Mapping[int, tuple[bytes, bytes, bytes]]) -> bytes:
    """Return the digest that survivors sign: the survivors, and all clients that have begun, with their keys."""
    begun = [NUMBER.pack(client) + b"".join(adverts[client]) for client in sorted(adverts)]
    return hashlib.sha256(b"".join([*(NUMBER.pack(k) for k in sorted(survivors)), b"of", *begun])).digest()
