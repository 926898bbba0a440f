"""Messages of a secure sum: signed messages are verified, and everything else is refused.

A client's message is signed, and contains its session, phase and client. The server passes on only bundles of such
messages, or envelopes that only the receiver can open, so that clients need not trust it. The session limits all
sizes by `most_up` and `most_down`, for the transport.

The signature of masked words covers their hash and the list of clients with whom they are masked, so that this head can
be shown to others without the words.

>>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
>>> from fedtorch.sites.secure import messages
>>> from fedtorch.sites.secure.messages import Session
>>> from fedtorch.sites.secure.neighbours import Neighbourhoods
>>> keys = {k: Ed25519PrivateKey.from_private_bytes(bytes([k]) * 32) for k in (1, 2, 3)}
>>> public = {k: key.public_key().public_bytes_raw() for k, key in keys.items()}
>>> session = Session(b"run", 0, 0, public, size=2, graph=Neighbourhoods(2, 2), minimum=3)
>>> messages.session_of(session.encoded()) == session
True
>>> message = messages.sign(session, messages.COMPLAIN, 1, messages.NUMBER.pack(3), keys[1])  # 1 accuses 3
>>> len(message) == 9 + 8 + 64 <= messages.most_up(session, messages.COMPLAIN)  # head, number, signature
True
>>> messages.verified(session, messages.COMPLAIN, message) == (1, messages.body_of(message))
True
>>> messages.records(messages.body_of(message), messages.NUMBER)
[(3,)]
>>> messages.verified(session._replace(attempt=1), messages.COMPLAIN, message)
Traceback (most recent call last):
...
ValueError: Expected a message that client 1 has signed in this session, but it has not
>>> masked = messages.with_words(session, 1, [2, 3], bytes(16), keys[1])  # two words of 8 bytes
>>> head, words = messages.split_words(session, masked)
>>> messages.listed(session, messages.verified(session, messages.MASKED, head)[1]), len(masked) - len(head)
({2, 3}, 16)
>>> digests = [messages.sign(session, messages.CONFIRM, k, bytes(32), keys[k]) for k in (2, 3)]
>>> messages.unbundle(messages.bundle(digests)) == digests
True
>>> len(messages.bundle(digests)) == messages.most_down(session, messages.REVEAL)
True
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedtorch.sites.secure import shamir
from fedtorch.sites.secure.neighbours import ADVERSARIES, Adversary, Neighbourhoods

ADVERT, SHARES, COMPLAIN, MASKED, CONFIRM, REVEAL = PHASES = range(1, 7)  # in order
KEYS = struct.Struct(">32s32s32s")  # mask key, envelope key, commitment
ENVELOPE = struct.Struct(f">Q{2 * shamir.WIDTH + 16}s32s32s")  # receiver or sender, sealed shares, their commitments
SHARE = struct.Struct(f">QB{shamir.WIDTH}s")  # owner, whether of its own mask (1) or mask key (0), the share
NUMBER = struct.Struct(">Q")  # a client
DIGEST = 32
_MAGIC = b"fedtorch secure sum 3"
_HEAD = struct.Struct(">BQ")
_SESSION = struct.Struct(">QqqQQQQQQQQQ")
_LENGTH = struct.Struct(">I")
_SIGNATURE = 64
_NAME = 1024  # most bytes of a run's name


class Aborted(RuntimeError):
    """Raised if the protocol ends without a sum, because the sum would not be correct or not safe.

    Args:
        message: the reason.
        members: numbers of the clients that are known to have broken the protocol.

    Attributes:
        members: these numbers in order; empty if no client can be named.

    Example:
        >>> import torch
        >>> from fedtorch.trust import privacy, secure
        >>> from fedtorch.sites.secure.simulation import secure_sum
        >>> secure_sum(torch.ones(2, 1), entropy=privacy.from_seed(0))  # each of two would know the other's
        Traceback (most recent call last):
        ...
        fedtorch.sites.secure.messages.Aborted: Expected at least 3 clients for a sum, but got 2
    """

    def __init__(self, message: str = "", members: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.members = tuple(sorted(members))


class Session(NamedTuple):
    """The parameters of one sum, on which all parties agree; messages of one session are refused in every other."""

    run: bytes  # unique name of the run
    round: int
    attempt: int  # attempt of the round
    keys: dict[int, bytes]  # public Ed25519 key by client, numbered from 1 on
    size: int  # words of a message
    graph: Neighbourhoods
    minimum: int  # least clients of a sum: with fewer it discloses too much of each
    width: int = 1  # words of a number, with carries between them
    apart: int = 1  # least clients of every combination with earlier sums
    adversary: Adversary = "active"  # kind of server from which secrets are kept; see `neighbourhoods`

    @property
    def everybody(self) -> bool:
        """Return whether all other clients are neighbours."""
        return self.graph.neighbours >= len(self.keys) - 1

    @property
    def honest(self) -> int:
        """Return the least number of honest clients in any sum that the server can learn; the proof is in `parties`."""
        near = self.graph.threshold - self.graph.colluding + 1
        return max(near, self.minimum - self.graph.colluding) if self.everybody else near

    def check(self) -> None:
        """Raise ValueError unless the threshold protects secrets and single clients from the adversary."""
        near = self.graph._replace(neighbours=min(self.graph.neighbours, len(self.keys) - 1))
        least = max(near.least(self.adversary), 1 if self.everybody else self.minimum - 1)
        if not least <= near.threshold <= near.neighbours:
            raise ValueError(
                f"Expected a threshold from {least} to {near.neighbours} for {near.neighbours} neighbours, of whom "
                f"{near.colluding} work with a server that is {self.adversary}, and sums of at least {self.minimum}, "
                f"but got {near.threshold}; use that of neighbourhoods(clients, ...)"
            )

    def encoded(self) -> bytes:
        """Return the session as bytes."""
        sizes = (self.round, self.attempt, self.size, *self.graph, self.minimum, self.width, self.apart)
        head = _SESSION.pack(len(self.run), *sizes, ADVERSARIES.index(self.adversary), len(self.keys))
        return head + self.run + b"".join(NUMBER.pack(client) + self.keys[client] for client in sorted(self.keys))

    def digest(self) -> bytes:
        """Return a SHA-256 digest of the session."""
        return hashlib.sha256(_MAGIC + self.encoded()).digest()


def session_of(data: bytes, most: int = 2**20) -> Session:
    """Return the session from its `encoded` bytes.

    Args:
        data: the bytes.
        most: most clients.

    Raises:
        ValueError: the bytes are not a session.
    """
    if len(data) < _SESSION.size:
        raise ValueError(f"Expected a session, but got {len(data)} bytes")
    name, round, attempt, size, *near, minimum, width, apart, adversary, clients = _SESSION.unpack_from(data)
    start = _SESSION.size + name
    if name > _NAME or clients > most or len(data) != start + clients * (NUMBER.size + DIGEST):
        raise ValueError(f"Expected a session of at most {most} clients, but got {len(data)} other bytes")
    rows = list(struct.iter_unpack(f">Q{DIGEST}s", data[start:]))
    keys = dict(rows)
    known = adversary < len(ADVERSARIES)
    if sorted(keys) != [client for client, _ in rows] or 0 in keys or not 1 <= width <= size or not known:
        raise ValueError("Expected a session of distinct clients in their order and of numbers, but got another")
    run, against = data[_SESSION.size : start], ADVERSARIES[adversary]
    return Session(run, round, attempt, keys, size, Neighbourhoods(*near), minimum, width, apart, against)


def most_up(session: Session, phase: int) -> int:
    """Return the most bytes of a client's message in a phase; exact except for shares, complaints and revelations."""
    return _signed_size(session, phase) + (8 * session.size if phase == MASKED else 0)


def _signed_size(session: Session, phase: int) -> int:
    """Return the most bytes of a message's signed part."""
    near = session.graph.neighbours
    bodies = (KEYS.size, near * ENVELOPE.size, near * NUMBER.size, _bits(session) + DIGEST, DIGEST, near * SHARE.size)
    return _HEAD.size + bodies[phase - 1] + _SIGNATURE


def most_down(session: Session, phase: int) -> int:
    """Return the most bytes that the server sends a client before a phase."""
    clients, near = len(session.keys), session.graph.neighbours
    if phase == ADVERT:
        return 0
    if phase in (COMPLAIN, MASKED):
        return near * (ENVELOPE if phase == COMPLAIN else NUMBER).size
    if phase == CONFIRM:
        return _LENGTH.size + clients * NUMBER.size + near * (_LENGTH.size + _signed_size(session, MASKED))
    return (clients if phase == SHARES else near) * (_LENGTH.size + most_up(session, phase - 1))


def sign(
    session: Session, phase: int, sender: int, body: bytes, key: Ed25519PrivateKey, digest: bytes | None = None
) -> bytes:
    """Return a client's signed message; `digest` is the session's, if already computed."""
    signed = _HEAD.pack(phase, sender) + body
    return signed + key.sign(_signed(digest or session.digest(), signed))


def with_words(session: Session, sender: int, others: Iterable[int], words: bytes, key: Ed25519PrivateKey) -> bytes:
    """Return a client's masked words after a signed head, with the clients with whom they are masked and their hash."""
    place, bits = {client: i for i, client in enumerate(sorted(session.keys))}, bytearray(_bits(session))
    for other in others:
        bits[place[other] // 8] |= 1 << place[other] % 8
    return sign(session, MASKED, sender, bytes(bits) + hashlib.sha256(words).digest(), key) + words


def split_words(session: Session, message: bytes) -> tuple[bytes, bytes]:
    """Return (the head, the words) of a message of masked words.

    Raises:
        ValueError: the message has a wrong length, or the head has another hash.
    """
    if len(message) != most_up(session, MASKED):
        raise ValueError(f"Expected {most_up(session, MASKED)} bytes, but got {len(message)}")
    head, words = message[: _signed_size(session, MASKED)], message[_signed_size(session, MASKED) :]
    if body_of(head)[_bits(session) :] != hashlib.sha256(words).digest():
        raise ValueError("Expected the words whose hash is in their head, but got others")
    return head, words


def listed(session: Session, body: bytes) -> set[int]:
    """Return the clients with whom words are masked, from the verified body of the head."""
    if len(body) != _bits(session) + DIGEST:
        raise ValueError(f"Expected a head with a list of {_bits(session)} bytes, but got {len(body)} bytes")
    return {client for i, client in enumerate(sorted(session.keys)) if body[i // 8] >> i % 8 & 1}


def _bits(session: Session) -> int:
    """Return the bytes of a list of clients with one bit each."""
    return -(-len(session.keys) // 8)


def _signed(digest: bytes, message: bytes) -> bytes:
    """Return the bytes to sign for a message: its digest, because signing hashes its input twice."""
    return _MAGIC + digest + hashlib.sha256(message).digest()


def verified(session: Session, phase: int, message: bytes, digest: bytes | None = None) -> tuple[int, bytes]:
    """Return (sender, body) of a message of this session and phase; of masked words pass the head.

    `digest` is the session's, if already computed.

    Raises:
        ValueError: the message is invalid; the error gives the reason.
    """
    most = _signed_size(session, phase)
    if not isinstance(message, bytes) or not _HEAD.size + _SIGNATURE <= len(message) <= most:
        raise ValueError(f"Expected a signed message of at most {most} bytes, but got {len(message)} bytes")
    stated, sender = _HEAD.unpack_from(message)
    if stated != phase:
        raise ValueError(f"Expected a message of phase {phase}, but got one of phase {stated}")
    if sender not in session.keys:
        raise ValueError(f"Expected a message of one of the session's clients, but got one of client {sender}")
    signed, signature = message[:-_SIGNATURE], message[-_SIGNATURE:]
    try:
        Ed25519PublicKey.from_public_bytes(session.keys[sender]).verify(
            signature, _signed(digest or session.digest(), signed)
        )
    except InvalidSignature:
        raise ValueError(
            f"Expected a message that client {sender} has signed in this session, but it has not"
        ) from None
    return sender, signed[_HEAD.size :]


def body_of(message: bytes) -> bytes:
    """Return the body of a message that has been `verified`."""
    return message[_HEAD.size : -_SIGNATURE]


def records(body: bytes, form: struct.Struct) -> list[tuple[int | bytes, ...]]:
    """Return a body as records of one form.

    Raises:
        ValueError: its length is not a multiple of a record's.
    """
    if len(body) % form.size:
        raise ValueError(f"Expected records of {form.size} bytes, but got {len(body)} bytes")
    return list(form.iter_unpack(body))


def bundle(messages: Sequence[bytes]) -> bytes:
    """Return messages joined, each after its length."""
    return b"".join(_LENGTH.pack(len(message)) + message for message in messages)


def unbundle(data: bytes) -> list[bytes]:
    """Return the messages of a bundle.

    Raises:
        ValueError: the bytes are not a bundle.
    """
    messages, place = [], 0
    while place < len(data):
        if place + _LENGTH.size > len(data):
            raise ValueError(f"Expected a bundle of messages, but its {len(data)} bytes end within one")
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size + length
        if place > len(data):
            raise ValueError(f"Expected a bundle of messages, but its {len(data)} bytes end within one")
        messages.append(data[place - length : place])
    return messages
