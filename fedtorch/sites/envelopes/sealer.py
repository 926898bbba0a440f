"""Sealed envelopes between sites, which their server carries and cannot read, change, swap or repeat.

The two sites' X25519 keys in a `directory` give a key for each direction (HKDF-SHA256), and every envelope is sealed by
ChaCha20-Poly1305 with an increasing number. The run, both sites with their keys, and the number are authenticated. A
receiver refuses a lower number than the last; the last envelope itself may come again, unchanged, until its sender has
a newer one.

Source: Nir and Langley (2018), RFC 8439; Langley, Hamburg and Turner (2016), RFC 7748; RFC 5869.
"""

from __future__ import annotations

import hashlib
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedtorch.sites.identity.key_directory import Speaker

_SALT = b"fedtorch envelopes 1"
_HEAD = struct.Struct(">Q32s32s")  # number, the sender's key, the receiver's key
_TAG = 16


class Sealer:
    """Seals and opens a site's envelopes with one secret key.

    Args:
        run: identity of the run.
        name: name of the site.
        secret: its X25519 key.
    """

    def __init__(self, run: str, name: str, secret: X25519PrivateKey) -> None:
        self._run, self._name, self._secret = run, name, secret
        self._public = secret.public_key().public_bytes_raw()
        self._sent = 0
        self._opened: dict[bytes, tuple[int, bytes]] = {}  # number and digest of the last envelope, by the sender's key

    def seal(self, receiver: Speaker, content: bytes) -> bytes:
        """Return an envelope with `content` for a site."""
        self._sent += 1
        head = _HEAD.pack(self._sent, self._public, receiver.sealing)
        edge = _edge(self._run, self._name, receiver.name, head)
        nonce = self._sent.to_bytes(12, "big")
        return head + ChaCha20Poly1305(self._key(receiver, edge[:-8])).encrypt(nonce, content, edge)

    def open(self, sender: Speaker, envelope: bytes) -> bytes:
        """Return the content of an envelope of a site.

        Raises:
            ValueError: the envelope is malformed or altered, or is for another edge, run, key or time.
        """
        who = f"an envelope of {sender.name!r}"
        if len(envelope) < _HEAD.size + _TAG:
            raise ValueError(f"Expected {who}, but got {len(envelope)} bytes")
        number, theirs, mine = _HEAD.unpack_from(envelope)
        if theirs != sender.sealing:
            raise ValueError(
                f"Expected {who} sealed with its key in the directory, but got one with a key that is not there"
            )
        if mine != self._public:
            raise ValueError(f"Expected {who} for this site's key, but got one for an old key, or for another site's")
        last, digest = self._opened.get(theirs, (0, b""))
        now = hashlib.sha256(envelope).digest()
        if number < last or (number == last and now != digest):
            raise ValueError(f"Expected {who} after its number {last}, but number {number} comes again")
        edge = _edge(self._run, sender.name, self._name, envelope[: _HEAD.size])
        try:
            key = ChaCha20Poly1305(self._key(sender, edge[:-8]))
            content = key.decrypt(number.to_bytes(12, "big"), envelope[_HEAD.size :], edge)
        except (InvalidTag, ValueError):
            raise ValueError(
                f"Expected {who} as it was sealed, but it was altered, or is of another edge or run"
            ) from None
        self._opened[theirs] = number, now
        return content

    def _key(self, other: Speaker, edge: bytes) -> bytes:
        shared = self._secret.exchange(X25519PublicKey.from_public_bytes(other.sealing))
        return HKDF(SHA256(), 32, _SALT, edge).derive(shared)


def _edge(run: str, sender: str, receiver: str, head: bytes) -> bytes:
    """Return the run, both sites and their keys, each after its length, and the number."""
    number, *keys = _HEAD.unpack(head)
    fields = [run.encode(), sender.encode(), receiver.encode(), *keys]
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields) + number.to_bytes(8, "big")
