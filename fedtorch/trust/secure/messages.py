"""Messages of a secure sum: bytes in, verified bodies out, and everything else refused.

Clients' messages are signed, and say of which session, phase and client they are. What the server passes on is a bundle
of such messages, so that nobody has to believe it. All have a largest size that the session gives, `most_up` and
`most_down`, for whoever carries them.

>>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
>>> from fedtorch.trust.secure import Neighbourhoods, Session, messages
>>> keys = {k: Ed25519PrivateKey.from_private_bytes(bytes([k]) * 32) for k in (1, 2, 3)}
>>> public = {k: key.public_key().public_bytes_raw() for k, key in keys.items()}
>>> session = Session(b"run", 0, 0, public, size=2, graph=Neighbourhoods(2, 2), minimum=3)
>>> messages.session_of(session.encoded()) == session
True
>>> words = messages.NUMBER.pack(7) + messages.NUMBER.pack(8)  # 8 bytes each
>>> message = messages.sign(session, messages.MASKED, 1, words, keys[1])
>>> len(message) == messages.most_up(session, messages.MASKED) == 9 + 2 * 8 + 64  # head, words, signature
True
>>> messages.verified(session, messages.MASKED, message) == (1, messages.body_of(message))
True
>>> messages.records(messages.body_of(message), messages.NUMBER)
[(7,), (8,)]
>>> messages.verified(session._replace(attempt=1), messages.MASKED, message)
Traceback (most recent call last):
...
ValueError: Expected a message that client 1 has signed in this session, but it has not
>>> digests = [messages.sign(session, messages.CONFIRM, k, bytes(32), keys[k]) for k in keys]
>>> messages.unbundle(messages.bundle(digests)) == digests
True
>>> len(messages.bundle(digests)) == messages.most_down(session, messages.REVEAL)
True
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedtorch.trust.secure import shamir
from fedtorch.trust.secure.neighbours import Neighbourhoods

ADVERT, SHARES, MASKED, CONFIRM, REVEAL = PHASES = range(1, 6)  # in their order
KEYS = struct.Struct(">32s32s32s")  # mask key, letter key, commitment
LETTER = struct.Struct(f">Q{2 * shamir.WIDTH + 16}s")  # to whom, sealed shares
SHARE = struct.Struct(f">QB{shamir.WIDTH}s")  # whose, of the own mask (1) or of the mask key (0), the share
NUMBER = struct.Struct(">Q")  # a client
DIGEST = 32
_MAGIC = b"fedtorch secure sum 2"
_HEAD = struct.Struct(">BQ")
_SESSION = struct.Struct(">QqqQQQQQQQ")
_LENGTH = struct.Struct(">I")
_SIGNATURE = 64
_NAME = 1024  # bytes of a run's name, at most


class Aborted(RuntimeError):
    """The protocol ended without a sum, because it could not have been a right one or a safe one.

    Example:
        >>> import torch
        >>> from fedtorch.trust import privacy, secure
        >>> secure.secure_sum(torch.ones(2, 1), entropy=privacy.from_seed(0))  # each of two would know the other's
        Traceback (most recent call last):
        ...
        fedtorch.trust.secure.messages.Aborted: Expected at least 3 clients for a sum, but got 2
    """


class Session(NamedTuple):
    """What all parties of one sum agree on beforehand; messages of one session are refused in every other."""

    run: bytes  # a name of the run that no other has
    round: int
    attempt: int  # of the round
    keys: dict[int, bytes]  # by client (positive numbers), who signs with which Ed25519 key
    size: int  # words of a message
    graph: Neighbourhoods
    minimum: int  # clients of a sum, below which it says too much of each
    width: int = 1  # words of a number, which carry
    apart: int = 1  # clients of every combination with earlier sums, at least

    def encoded(self) -> bytes:
        """The session as bytes."""
        numbers = (self.round, self.attempt, self.size, *self.graph, self.minimum, self.width, self.apart)
        head = _SESSION.pack(len(self.run), *numbers, len(self.keys))
        return head + self.run + b"".join(NUMBER.pack(client) + self.keys[client] for client in sorted(self.keys))

    def digest(self) -> bytes:
        """32 bytes of all of it."""
        return hashlib.sha256(_MAGIC + self.encoded()).digest()


def session_of(data: bytes, most: int = 2**20) -> Session:
    """The session whose `encoded` these bytes are.

    Args:
        data: the bytes.
        most: clients, at most.

    Raises:
        ValueError: they are of no session.
    """
    if len(data) < _SESSION.size:
        raise ValueError(f"Expected a session, but got {len(data)} bytes")
    name, round, attempt, size, near, threshold, minimum, width, apart, clients = _SESSION.unpack_from(data)
    start = _SESSION.size + name
    if name > _NAME or clients > most or len(data) != start + clients * (NUMBER.size + DIGEST):
        raise ValueError(f"Expected a session of at most {most} clients, but got {len(data)} bytes that are none")
    rows = list(struct.iter_unpack(f">Q{DIGEST}s", data[start:]))
    keys = dict(rows)
    if sorted(keys) != [client for client, _ in rows] or 0 in keys or not 1 <= width <= size:
        raise ValueError("Expected a session of distinct clients in their order and of numbers, but got another")
    graph = Neighbourhoods(near, threshold)
    return Session(data[_SESSION.size : start], round, attempt, keys, size, graph, minimum, width, apart)


def most_up(session: Session, phase: int) -> int:
    """Bytes of a client's message of a phase, at most; but for shares and revelations exactly."""
    near = session.graph.neighbours
    bodies = (KEYS.size, near * LETTER.size, 8 * session.size, DIGEST, near * SHARE.size)
    return _HEAD.size + bodies[phase - 1] + _SIGNATURE


def most_down(session: Session, phase: int) -> int:
    """Bytes of what the server passes on before a phase, at most."""
    clients, near = len(session.keys), session.graph.neighbours
    if phase == ADVERT:
        return 0
    if phase == CONFIRM:
        return clients * NUMBER.size
    count = near if phase == MASKED else clients
    return count * (_LENGTH.size + most_up(session, phase - 1))


def sign(session: Session, phase: int, sender: int, body: bytes, key: Ed25519PrivateKey) -> bytes:
    """A message of a client."""
    signed = _HEAD.pack(phase, sender) + body
    return signed + key.sign(_signed(session, signed))


def _signed(session: Session, message: bytes) -> bytes:
    """What stands for a message under its signature, which would hash it twice."""
    return _MAGIC + session.digest() + hashlib.sha256(message).digest()


def verified(session: Session, phase: int, message: bytes) -> tuple[int, bytes]:
    """(sender, body) of a message of this session and phase.

    Raises:
        ValueError: it is anything else, with the reason.
    """
    most = most_up(session, phase)
    if not isinstance(message, bytes) or not _HEAD.size + _SIGNATURE <= len(message) <= most:
        raise ValueError(f"Expected a signed message of at most {most} bytes, but got {len(message)} bytes")
    told, sender = _HEAD.unpack_from(message)
    if told != phase:
        raise ValueError(f"Expected a message of phase {phase}, but got one of phase {told}")
    if sender not in session.keys:
        raise ValueError(f"Expected a message of one of the session's clients, but got one of client {sender}")
    signed, signature = message[:-_SIGNATURE], message[-_SIGNATURE:]
    try:
        Ed25519PublicKey.from_public_bytes(session.keys[sender]).verify(signature, _signed(session, signed))
    except InvalidSignature:
        raise ValueError(
            f"Expected a message that client {sender} has signed in this session, but it has not"
        ) from None
    return sender, signed[_HEAD.size :]


def body_of(message: bytes) -> bytes:
    """The body of a message that has been `verified`."""
    return message[_HEAD.size : -_SIGNATURE]


def records(body: bytes, form: struct.Struct) -> list[tuple[int | bytes, ...]]:
    """A body as records of one form.

    Raises:
        ValueError: it does not consist of whole ones.
    """
    if len(body) % form.size:
        raise ValueError(f"Expected records of {form.size} bytes, but got {len(body)} bytes")
    return list(form.iter_unpack(body))


def bundle(messages: Sequence[bytes]) -> bytes:
    """Messages as one, each behind its length."""
    return b"".join(_LENGTH.pack(len(message)) + message for message in messages)


def unbundle(data: bytes) -> list[bytes]:
    """The messages of a bundle.

    Raises:
        ValueError: it is none.
    """
    found, place = [], 0
    while place < len(data):
        if place + _LENGTH.size > len(data):
            raise ValueError(f"Expected a bundle of messages, but its {len(data)} bytes end within one")
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size + length
        if place > len(data):
            raise ValueError(f"Expected a bundle of messages, but its {len(data)} bytes end within one")
        found.append(data[place - length : place])
    return found
