"""Signed messages of a secure sum: bytes in, verified bodies out, and everything else refused."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedtorch.trust.secure.neighbours import Neighbourhoods

ADVERT, SHARES, MASKED, CONFIRM, REVEAL = range(1, 6)  # phases, in their order
_MAGIC = b"fedtorch secure sum 1"
_HEAD = struct.Struct(">BQ")
_SIGNATURE = 64


class Aborted(RuntimeError):
    """The protocol ended without a sum, because it could not have been a right one or a safe one."""


class Session(NamedTuple):
    """What all parties of one sum agree on beforehand; messages of one session are refused in every other."""

    run: bytes  # a name of the run that no other has
    round: int
    attempt: int  # of the round
    keys: dict[int, bytes]  # by client (positive numbers), who signs with which Ed25519 key
    size: int  # words of a message
    graph: Neighbourhoods
    minimum: int  # clients of a sum, below which it says too much of each

    def digest(self) -> bytes:
        """32 bytes of all of it."""
        head = struct.pack(
            ">QqqQQQQ", len(self.run), self.round, self.attempt, self.size, *self.graph, self.minimum
        )  # fmt: skip
        roster = b"".join(struct.pack(">Q", client) + self.keys[client] for client in sorted(self.keys))
        return hashlib.sha256(_MAGIC + head + self.run + roster).digest()


def sign(session: Session, phase: int, sender: int, body: bytes, key: Ed25519PrivateKey) -> bytes:
    """A message of a client."""
    head = _HEAD.pack(phase, sender)
    return head + body + key.sign(_MAGIC + session.digest() + head + body)


def verified(session: Session, phase: int, message: bytes) -> tuple[int, bytes]:
    """(sender, body) of a message of this session and phase.

    Raises:
        ValueError: it is anything else, with the reason.
    """
    if not isinstance(message, bytes) or len(message) < _HEAD.size + _SIGNATURE:
        raise ValueError(f"Expected a signed message, but got {len(message)} bytes")
    told, sender = _HEAD.unpack_from(message)
    if told != phase:
        raise ValueError(f"Expected a message of phase {phase}, but got one of phase {told}")
    if sender not in session.keys:
        raise ValueError(f"Expected a message of one of the session's clients, but got one of client {sender}")
    signed, signature = message[:-_SIGNATURE], message[-_SIGNATURE:]
    try:
        Ed25519PublicKey.from_public_bytes(session.keys[sender]).verify(signature, _MAGIC + session.digest() + signed)
    except InvalidSignature:
        raise ValueError(
            f"Expected a message that client {sender} has signed in this session, but it has not"
        ) from None
    return sender, signed[_HEAD.size :]


def records(body: bytes, form: struct.Struct) -> list[tuple[int | bytes, ...]]:
    """A body as records of one form.

    Raises:
        ValueError: it does not consist of whole ones.
    """
    if len(body) % form.size:
        raise ValueError(f"Expected records of {form.size} bytes, but got {len(body)} bytes")
    return list(form.iter_unpack(body))
