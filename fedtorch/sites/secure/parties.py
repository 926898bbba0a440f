r"""A client's side of a secure sum: its messages in six phases, from which the server (`server.py`) gets the sum.

1. *Advert*: two X25519 keys, for masks and for envelopes, and a commitment to the client's own mask.
2. *Shares*: neighbours, on a circle that depends on all adverts, get Shamir shares of the client's mask key and of its
   own mask, sealed by AES-256-GCM, with a commitment to each share.
3. *Complain*: the neighbours whose shares the client cannot open, or whose shares differ from their commitments. The
   server leaves out liars (`_disputes.py`), before anybody masks or confirms anything.
4. *Masked*: the words plus the own mask, plus a mask with every neighbour of higher number, minus those of lower; in
   front a signed head, which lists the clients with whom they are masked.
5. *Confirm*: every client signs which clients have begun and which have sent masked words, after it has seen that it
   and its neighbours among them list each other.
6. *Reveal*: once at least t neighbours have signed the same, the share of the own mask of each neighbour that has
   stayed, and of the mask key of each that has not; never both.

The server recovers the own masks of the clients that stayed, and the pairwise masks of those that did not, checks them
against adverts and commitments, and subtracts them from the sum. Too few shares or clients end in `Aborted`, never in a
wrong sum, and the error names the clients that are known to have broken the protocol.

The server sees only sums: rules on single messages (medians, norms, NaN) cannot act. Clients have to clip before
masking instead, which nobody can check: a client that masks other words than it should can move the sum arbitrarily.

*Guarantee.* A server that is active (it may send clients anything) and works with at most c of every honest client's k
neighbours learns only sums of at least t − c + 1 honest clients, `Session.honest`, because t ≥ ⌊(k + c)/2⌋ + 1:

- Never are both secrets of an honest v recovered: each would take t − c honest neighbours, and 2 (t − c) > k − c.
- Let v's own mask be recovered. Then t − c honest neighbours u have revealed a share of it, each of whom v's signed
  head lists, and each with t neighbours that have signed that u stayed. Of these t − c are honest and keep their shares
  of u's mask key; the other k − c − (t − c) < t − c honest ones are too few to recover it. So the masks between v and
  these u remain, and cancel only in sums that contain all of them, by the same factor.
- If all clients are neighbours, two sets of t clients that sign different survivors would share an honest client, which
  signs once. So there is one set of survivors, of at least `minimum` clients. Each revealing client has masked with all
  others of the set, and they with it. Only the sum over the set can be learnt, minus what corrupt clients know anyway.

With drawn neighbours the first holds for all clients except with probability 2⁻⁴⁰ (`neighbours.py`, also for keys that
are chosen last). A *curious* server sends the same to all clients; then t ≥ c + 1 gives the same guarantee. The
session's keys limit invented clients: whose keys they are must be known otherwise, by a roster. A client that is left
out because of a complaint loses no more than by a server that ignores it, so complaints need no proof.

Sources: Bonawitz et al. (2017), "Practical secure aggregation for privacy-preserving machine learning", Figure 4; Bell
et al. (2020), Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from fedtorch.random.entropy import Entropy, Purpose, derived, expanded
from fedtorch.sites.secure import ring, shamir
from fedtorch.sites.secure._both_sides import Adverts, agreed, commitment, exchanged, graph, opened_adverts, pair_mask
from fedtorch.sites.secure._combinations import refusal
from fedtorch.sites.secure.messages import (
    ADVERT,
    COMPLAIN,
    CONFIRM,
    ENVELOPE,
    KEYS,
    MASKED,
    NUMBER,
    REVEAL,
    SHARE,
    SHARES,
    Aborted,
    Session,
    listed,
    most_down,
    records,
    sign,
    unbundle,
    verified,
    with_words,
)

_NONCE = bytes(12)  # constant, because every envelope has its own key


class Client:
    """One client's side; each phase can be called once, in order.

    Args:
        session: the session.
        number: the client's number.
        signing: its Ed25519 key.
        entropy: source of its secrets.
        words: its summand, `(size,)` int64; may be set later, before phase 4.
        earlier: survivors of earlier sums of the same words: a combination of these with this sum must not have fewer
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
        session.check()
        self.words, self._earlier = words, earlier
        self.session, self.number, self._signing, self._entropy = session, number, signing, entropy
        self._digest, self._done = session.digest(), 0
        self._mask_key = X25519PrivateKey.from_private_bytes(self._secret("mask key"))
        self._envelope_key = X25519PrivateKey.from_private_bytes(self._secret("letter key"))
        self._own_mask = self._secret("own mask")
        self._adverts: Adverts = {}
        self._neighbours: list[int] = []
        self._shared: dict[int, tuple[bytes, bytes]] = {}  # shared secrets by neighbour, for envelopes and for masks
        self._held: dict[int, tuple[bytes, bytes]] = {}  # shares by neighbour, of its own mask and of its mask key
        self._listed: frozenset[int] = frozenset()  # neighbours with whom it has masked
        self._survivors: frozenset[int] = frozenset()

    def answer(self, phase: int, payload: bytes) -> bytes:
        """Return the message of a phase, given the server's payload `Server.request`.

        Raises:
            Aborted: this client ends its part.
            ValueError: the payload is invalid.
        """
        most = most_down(self.session, phase)
        if len(payload) > most:
            raise ValueError(f"Expected at most {most} bytes before phase {phase}, but got {len(payload)}")
        if phase == ADVERT:
            return self.advertise()
        if phase == SHARES:
            return self.share(unbundle(payload))
        if phase == COMPLAIN:
            return self.complain(payload)
        if phase == CONFIRM:
            survivors, *heads = unbundle(payload)
            return self.confirm(_numbers(survivors), heads)
        if phase == REVEAL:
            return self.reveal(unbundle(payload))
        if self.words is None:
            raise ValueError(f"Expected client {self.number} to have words for phase {phase}, but it has none yet")
        return self.mask(self.words, _numbers(payload))

    @property
    def survivors(self) -> frozenset[int]:
        """Return the clients in the sum that this client has confirmed; keep them as `earlier` for later sums."""
        return self._survivors

    def advertise(self) -> bytes:
        """Return the message of phase 1."""
        self._enter(ADVERT)
        public = [key.public_key().public_bytes_raw() for key in (self._mask_key, self._envelope_key)]
        return self._sign(ADVERT, KEYS.pack(*public, commitment(self._own_mask)))

    def share(self, adverts: Sequence[bytes]) -> bytes:
        """Return the message of phase 2, given all adverts; a neighbour with keys of low order counts as missing.

        Raises:
            Aborted: too few adverts, some twice, or its own is missing.
            ValueError: some adverts are not of this session.
        """
        self._enter(SHARES)
        self._adverts = opened_adverts(self.session, adverts)
        if self.number not in self._adverts:
            raise Aborted(f"Expected client {self.number}'s own advert among those of all, but it is missing")
        self._neighbours = graph(self.session, self._adverts, [self.number])[self.number]
        for other in self._neighbours:
            mask_key, envelope_key, _ = self._adverts[other]
            envelopes, masks = exchanged(self._envelope_key, envelope_key), exchanged(self._mask_key, mask_key)
            if envelopes is not None and masks is not None:
                self._shared[other] = envelopes, masks
        self._check_enough(len(self._shared), "with keys")
        return self._sign(SHARES, b"".join(self._sealed(other, *both) for other, both in self._split().items()))

    def _split(self) -> dict[int, tuple[bytes, bytes]]:
        """Return shares of the own mask and of the mask key, by neighbour."""
        threshold, holders = self.session.graph.threshold, list(self._shared)
        parts = []
        for name, secret in (("own", self._own_mask), ("key", self._mask_key.private_bytes_raw())):
            words = self._entropy.words(self._purpose(f"shares of {name}"), 9 * (threshold - 1))
            parts.append(shamir.split(secret, threshold, holders, words.numpy().tobytes()))
        mask, key = ({k: share.to_bytes(shamir.WIDTH, "big") for k, share in part.items()} for part in parts)
        return {k: (mask[k], key[k]) for k in holders}

    def _sealed(self, other: int, own: bytes, key: bytes) -> bytes:
        """Return shares sealed for one neighbour, with commitments for it and the server."""
        commitments = commitment(own), commitment(key)
        cipher = AESGCM(self._envelope(self.number, other))
        return ENVELOPE.pack(
            other, cipher.encrypt(_NONCE, own + key, self._digest + b"".join(commitments)), *commitments
        )

    def complain(self, envelopes: bytes) -> bytes:
        """Return the message of phase 3: the senders whose shares cannot be opened or differ from their commitments.

        Raises:
            ValueError: shares twice, or from a client that is not a neighbour.
        """
        self._enter(COMPLAIN)
        wrong = []
        came = records(envelopes, ENVELOPE)
        senders = [int(sender) for sender, *_ in came]
        if len({*senders}) < len(senders) or not {*senders} <= self._shared.keys():
            raise ValueError(f"Expected shares of neighbours of client {self.number}, once each, but got others")
        for sender, (_, sealed, *commitments) in zip(senders, came):
            both = self._open(sender, bytes(sealed), [bytes(each) for each in commitments])
            if both is None:
                wrong.append(sender)
            else:
                self._held[sender] = both
        return self._sign(COMPLAIN, b"".join(NUMBER.pack(sender) for sender in sorted(wrong)))

    def mask(self, words: Tensor, others: Sequence[int]) -> bytes:
        """Return the message of phase 4: the words, masked with the remaining neighbours.

        Raises:
            Aborted: too few neighbours, or some whose shares it does not have.
            ValueError: words of another dtype or shape.
        """
        self._enter(MASKED)
        if words.dtype != torch.int64 or tuple(words.shape) != (self.session.size,):
            raise ValueError(f"Expected {self.session.size} int64 words, but got {words.dtype} {tuple(words.shape)}")
        self._listed = frozenset(others)
        if not self._listed <= self._held.keys():
            lacking = sorted(self._listed - self._held.keys())
            raise Aborted(f"Client {self.number} masks with those whose shares it has, but lacks those of {lacking}")
        self._check_enough(len(self._listed), "that have not left or been left out, as it may have been itself")
        masked = ring.add(expanded(self._own_mask, self.session.size), words, self.session.width)
        for other in sorted(self._listed):  # each once, even if the server has sent duplicates
            mask = pair_mask(self.session, self._digest, self._shared[other][1], self.number, other)
            ring.add(masked, mask, self.session.width)
        return with_words(self.session, self.number, self._listed, masked.numpy().tobytes(), self._signing)

    def confirm(self, survivors: Sequence[int], heads: Sequence[bytes]) -> bytes:
        """Return the message of phase 5: a signature of the survivors, given the heads of its neighbours among them.

        Raises:
            Aborted: too few survivors, it is not among them, or it and a neighbour have not masked with each other.
            ValueError: heads that are not of this session.
        """
        self._enter(CONFIRM)
        self._survivors = frozenset(survivors)
        if self.number not in self._survivors or not self._survivors <= self._adverts.keys():
            raise Aborted(f"Expected client {self.number} among the survivors, and only clients that have begun")
        if len(self._survivors) < self.session.minimum:
            raise Aborted(f"A sum of {len(self._survivors)} clients is smaller than the minimum {self.session.minimum}")
        if (why := refusal(self._earlier, self._survivors, self.session.apart)) is not None:
            raise Aborted(why)
        self._check_mutual(heads)
        return self._sign(CONFIRM, agreed(sorted(self._survivors), self._adverts))

    def _check_mutual(self, heads: Sequence[bytes]) -> None:
        """Raise Aborted unless this client and each neighbour that has stayed have masked with each other."""
        both = set()
        for head in heads:
            sender, body = verified(self.session, MASKED, head, self._digest)
            if sender in self._listed and self.number in listed(self.session, body):
                both.add(sender)
        if alone := sorted(self._survivors.intersection(self._neighbours) - both):
            raise Aborted(
                f"Expected client {self.number} and its neighbours that stayed to have masked with each other, but it "
                f"has not seen that of {alone}: the server counts them in the sum, and kept them apart"
            )

    def reveal(self, confirmations: Sequence[bytes]) -> bytes:
        """Return the message of phase 6: one share of each neighbour, if enough have confirmed the same survivors.

        Raises:
            Aborted: too few have confirmed them.
        """
        self._enter(REVEAL)
        same, others = set[int](), set[int]()
        wanted = agreed(sorted(self._survivors), self._adverts)
        for message in confirmations:
            sender, body = verified(self.session, CONFIRM, message, self._digest)
            (same if body == wanted else others).add(sender)
        if len(same & self._listed & self._survivors) < self.session.graph.threshold:
            raise Aborted(
                f"Too few neighbours of client {self.number} have confirmed who has stayed: it needs "
                f"{self.session.graph.threshold}, and {sorted(others)} were told of other survivors than it was"
            )
        body = b""
        for other in sorted(self._listed):
            mask, key = self._held[other]
            stayed = other in self._survivors
            body += SHARE.pack(other, stayed, mask if stayed else key)
        return self._sign(REVEAL, body)

    def _open(self, sender: int, sealed: bytes, commitments: list[bytes]) -> tuple[bytes, bytes] | None:
        """Return a neighbour's shares, or None if they differ from its commitments."""
        try:
            cipher = AESGCM(self._envelope(sender, self.number))
            both = cipher.decrypt(_NONCE, sealed, self._digest + b"".join(commitments))
        except InvalidTag:
            return None
        mask, key = both[: shamir.WIDTH], both[shamir.WIDTH :]
        return (mask, key) if [commitment(mask), commitment(key)] == commitments else None

    def _envelope(self, sender: int, receiver: int) -> bytes:
        shared = self._shared[receiver if sender == self.number else sender][0]
        return derived(shared, self._purpose(f"envelope from {sender} to {receiver}"))

    def _check_enough(self, neighbours: int, which: str) -> None:
        if neighbours < self.session.graph.threshold:
            raise Aborted(f"Client {self.number} has {neighbours} neighbours {which}, too few to recover anything")

    def _secret(self, name: str) -> bytes:
        return self._entropy.key(self._purpose(f"{name} of {self.number}"))

    def _purpose(self, phase: str) -> Purpose:
        return Purpose(self.session.run, self.session.round, self.session.attempt, phase, self._digest)

    def _sign(self, phase: int, body: bytes) -> bytes:
        return sign(self.session, phase, self.number, body, self._signing, self._digest)

    def _enter(self, phase: int) -> None:
        if phase != self._done + 1:
            raise Aborted(f"Expected phase {self._done + 1} of client {self.number}, but got phase {phase}")
        self._done = phase


def _numbers(data: bytes) -> list[int]:
    """Return the clients' numbers in bytes."""
    return [int(client) for (client,) in records(data, NUMBER)]
