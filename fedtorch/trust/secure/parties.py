r"""A client's side of a secure sum: what it says in five phases, so that the server (`server.py`) comes to the sum.

1. *Advert*: two X25519 keys, for masks and for letters, and a commitment to a mask of its own.
2. *Shares*: neighbours on a circle that depends on all adverts get Shamir shares of the client's mask key and of its
   own mask, each in a letter of AES-256-GCM.
3. *Masked*: the words plus the own mask, plus a mask with every neighbour of higher number, minus those of lower.
4. *Confirm*: every client signs who has begun and who has sent masked words, so that nobody is told two versions.
5. *Reveal*: of each neighbour that has, the share of its own mask; of each that has not, of its mask key; never both.

The server recovers the own masks of those that stayed and the pairs of those that did not, checks them against adverts
and commitments, and takes them out of the sum. Too few of anything ends in `Aborted`, never in a wrong sum.

It sees sums only: no rule that looks at single messages (medians, norms, NaN) can act. What replaces them is done by
the client before masking: clipping, and the range check of the grid. That clients do so, nobody can see either: a
client that masks other words than it should moves the sum by whatever it likes.

Secrecy holds against a server that works with as many clients as the neighbourhoods were made for, and with fewer than
the minimum less one: who may leave whole clients out could otherwise surround one with its own.

Sources: Bonawitz et al. (2017), "Practical secure aggregation for privacy-preserving machine learning", Figure 4; Bell
et al. (2020), Algorithm 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from fedtorch.trust.privacy.entropy import Entropy, Purpose, derived, expanded
from fedtorch.trust.secure import ring, shamir
from fedtorch.trust.secure._both_sides import commitment, graph, opened_adverts, pair_mask
from fedtorch.trust.secure._combinations import refusal
from fedtorch.trust.secure.messages import (
    ADVERT,
    CONFIRM,
    KEYS,
    LETTER,
    MASKED,
    NUMBER,
    REVEAL,
    SHARE,
    SHARES,
    Aborted,
    Session,
    most_down,
    records,
    sign,
    unbundle,
    verified,
)

_NONCE = bytes(12)  # every letter has a key of its own


class Client:
    """One client's side; each phase can be called once, in their order.

    Args:
        session: what was agreed.
        number: of the client.
        signing: its Ed25519 key.
        entropy: where its secrets come from.
        words: what it adds, `(size,)` int64; may be given later, before phase 3.
        earlier: the survivors of earlier sums of the same words, of which no combination with this one may be of fewer
            clients than the session's `apart`.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        signing: Ed25519PrivateKey,
        entropy: Entropy,
        words: Tensor | None = None,
        earlier: Sequence[frozenset[int]] = (),
    ) -> None:
        self.words, self._earlier = words, earlier
        self.session, self.number, self._signing, self._entropy = session, number, signing, entropy
        self._digest, self._done = session.digest(), 0
        self._mask_key = X25519PrivateKey.from_private_bytes(self._secret("mask key"))
        self._letter_key = X25519PrivateKey.from_private_bytes(self._secret("letter key"))
        self._own = self._secret("own mask")
        self._adverts: dict[int, tuple[bytes, bytes, bytes]] = {}
        self._neighbours: list[int] = []
        self._held: dict[int, tuple[bytes, bytes]] = {}  # by neighbour: shares of own mask and of mask key
        self._survivors: frozenset[int] = frozenset()

    def answer(self, phase: int, payload: bytes) -> bytes:
        """The message of a phase, from what the server has passed on before it: `Server.request`.

        Raises:
            Aborted: this client goes no further.
            ValueError: the payload is not what belongs here.
        """
        most = most_down(self.session, phase)
        if len(payload) > most:
            raise ValueError(f"Expected at most {most} bytes before phase {phase}, but got {len(payload)}")
        if phase == ADVERT:
            return self.advertise()
        if phase == CONFIRM:
            return self.confirm([int(client) for (client,) in records(payload, NUMBER)])
        messages = unbundle(payload)
        if phase == SHARES:
            return self.share(messages)
        if phase == REVEAL:
            return self.reveal(messages)
        if self.words is None:
            raise ValueError(f"Expected client {self.number} to have words for phase {phase}, but it has none yet")
        return self.mask(self.words, messages)

    @property
    def survivors(self) -> frozenset[int]:
        """Whose sum this one is, as far as this client has confirmed; to be kept for later ones as `earlier`."""
        return self._survivors

    def advertise(self) -> bytes:
        """Phase 1."""
        self._enter(ADVERT)
        public = [key.public_key().public_bytes_raw() for key in (self._mask_key, self._letter_key)]
        return self._sign(ADVERT, KEYS.pack(*public, commitment(self._own)))

    def share(self, adverts: Sequence[bytes]) -> bytes:
        """Phase 2, from everybody's adverts.

        Raises:
            Aborted: too few, some twice, or its own is missing.
            ValueError: some are not of this session.
        """
        self._enter(SHARES)
        self._adverts = opened_adverts(self.session, adverts)
        if self.number not in self._adverts:
            raise Aborted(f"Expected client {self.number}'s own advert among those of all, but it is missing")
        self._neighbours = graph(self.session, self._adverts)[self.number]
        threshold = self.session.graph.threshold
        body = b""
        parts = []
        for name, secret in (("own", self._own), ("key", self._mask_key.private_bytes_raw())):
            words = self._entropy.words(self._purpose(f"shares of {name}"), 9 * (threshold - 1))
            parts.append(shamir.split(secret, threshold, self._neighbours, words.numpy().tobytes()))
        for other in self._neighbours:
            both = b"".join(part[other].to_bytes(shamir.WIDTH, "big") for part in parts)
            body += LETTER.pack(other, AESGCM(self._letter(self.number, other)).encrypt(_NONCE, both, self._digest))
        return self._sign(SHARES, body)

    def mask(self, words: Tensor, shares: Sequence[bytes]) -> bytes:
        """Phase 3: the masked words, from the shares of those neighbours that have sent some.

        Raises:
            Aborted: too few of them, or a letter that cannot be opened.
            ValueError: messages or words that do not belong here.
        """
        self._enter(MASKED)
        if words.dtype != torch.int64 or tuple(words.shape) != (self.session.size,):
            raise ValueError(f"Expected {self.session.size} int64 words, but got {words.dtype} {tuple(words.shape)}")
        for message in shares:
            sender, body = verified(self.session, SHARES, message)
            if sender in self._held or sender not in self._neighbours:
                raise Aborted(f"Client {self.number} got shares of client {sender}, who is no neighbour or came twice")
            self._held[sender] = self._open(sender, body)
        if len(self._held) < self.session.graph.threshold:
            raise Aborted(f"Client {self.number} has {len(self._held)} neighbours left, too few to recover anything")
        masked = ring.add(expanded(self._own, self.session.size), words, self.session.width)
        for other in self._held:
            ring.add(masked, self._pair(other), self.session.width)
        return self._sign(MASKED, masked.numpy().tobytes())

    def confirm(self, survivors: Sequence[int]) -> bytes:
        """Phase 4: signs who has sent masked words.

        Raises:
            Aborted: too few, or it is not among them itself.
        """
        self._enter(CONFIRM)
        self._survivors = frozenset(survivors)
        if self.number not in self._survivors or not self._survivors <= self._adverts.keys():
            raise Aborted(f"Expected client {self.number} among the survivors, and only clients that have begun")
        if len(self._survivors) < self.session.minimum:
            raise Aborted(f"A sum of {len(self._survivors)} clients is smaller than the minimum {self.session.minimum}")
        if (why := refusal(self._earlier, self._survivors, self.session.apart)) is not None:
            raise Aborted(why)
        return self._sign(CONFIRM, _agreed(survivors, self._adverts))

    def reveal(self, confirmations: Sequence[bytes]) -> bytes:
        """Phase 5: one share of each neighbour, once enough of them have confirmed the same survivors.

        Raises:
            Aborted: too few have.
        """
        self._enter(REVEAL)
        same = set()
        for message in confirmations:
            sender, body = verified(self.session, CONFIRM, message)
            if body != _agreed(sorted(self._survivors), self._adverts):
                raise Aborted(f"Client {sender} was told of other survivors than client {self.number}")
            same.add(sender)
        if len(same & set(self._neighbours) & self._survivors) < self.session.graph.threshold:
            raise Aborted(f"Too few neighbours of client {self.number} have confirmed who has stayed")
        body = b""
        for other, (own, key) in self._held.items():
            stayed = other in self._survivors
            body += SHARE.pack(other, stayed, own if stayed else key)
        return self._sign(REVEAL, body)

    def _open(self, sender: int, body: bytes) -> tuple[bytes, bytes]:
        letters = [sealed for to, sealed in records(body, LETTER) if to == self.number]
        try:
            (sealed,) = letters
            both = AESGCM(self._letter(sender, self.number)).decrypt(_NONCE, bytes(sealed), self._digest)
        except (InvalidTag, ValueError):
            raise Aborted(f"Client {self.number} cannot open the letter of client {sender}") from None
        return both[: shamir.WIDTH], both[shamir.WIDTH :]

    def _letter(self, sender: int, receiver: int) -> bytes:
        other = self._adverts[receiver if sender == self.number else sender][1]
        shared = self._letter_key.exchange(X25519PublicKey.from_public_bytes(other))
        return derived(shared, self._purpose(f"letter from {sender} to {receiver}"))

    def _pair(self, other: int) -> Tensor:
        shared = self._mask_key.exchange(X25519PublicKey.from_public_bytes(self._adverts[other][0]))
        return pair_mask(self.session, self._digest, shared, self.number, other)

    def _secret(self, name: str) -> bytes:
        return self._entropy.key(self._purpose(f"{name} of {self.number}"))

    def _purpose(self, phase: str) -> Purpose:
        return Purpose(self.session.run, self.session.round, self.session.attempt, phase, self._digest)

    def _sign(self, phase: int, body: bytes) -> bytes:
        return sign(self.session, phase, self.number, body, self._signing)

    def _enter(self, phase: int) -> None:
        if phase != self._done + 1:
            raise Aborted(f"Expected phase {self._done + 1} of client {self.number}, but got phase {phase}")
        self._done = phase


def _agreed(survivors: Sequence[int], adverts: dict[int, tuple[bytes, bytes, bytes]]) -> bytes:
    """What survivors sign: who has stayed, and of whom and with which keys they know that they began."""
    begun = [NUMBER.pack(client) + b"".join(adverts[client]) for client in sorted(adverts)]
    return hashlib.sha256(b"".join([*(NUMBER.pack(k) for k in sorted(survivors)), b"of", *begun])).digest()
