"""Recovery of secrets from revealed shares, with the clients that have revealed or dealt wrong ones."""

from __future__ import annotations

from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedtorch.sites.secure import shamir
from fedtorch.sites.secure._both_sides import commitment
from fedtorch.sites.secure.messages import SHARE, body_of, records


class Recovery:
    """Clients' secrets from messages of the last phase.

    Args:
        threshold: number of shares that give a secret.
        dealt: commitments to shares of the own mask and of the mask key, by dealer and receiver.
        messages: messages of the last phase, by sender.

    Attributes:
        forgers: clients that have revealed another share than they were given, which is ignored.
        dealers: clients whose shares match their commitments, but do not give the committed secret.
    """

    def __init__(
        self,
        threshold: int,
        dealt: Mapping[int, Mapping[int, tuple[bytes, ...]]],
        messages: Mapping[int, bytes],
    ) -> None:
        self._threshold, self.forgers, self.dealers = threshold, set[int](), set[int]()
        self._shares: dict[tuple[int, bool], dict[int, int]] = {}
        for holder, message in messages.items():
            for owner, of_mask, share in records(body_of(message), SHARE):
                if commitment(bytes(share)) != dealt[int(owner)][holder][0 if of_mask else 1]:
                    self.forgers.add(holder)
                    continue
                self._shares.setdefault((int(owner), bool(of_mask)), {})[holder] = int.from_bytes(bytes(share), "big")

    def own_mask(self, client: int, committed: bytes) -> bytes | None:
        """Return a client's own mask; None if shares are too few or wrong."""
        secret = self._secret(client, own=True)
        return self._right(client, secret, secret is not None and commitment(secret) == committed)

    def mask_key(self, client: int, public: bytes) -> bytes | None:
        """Return a client's mask key; None if shares are too few or wrong."""
        secret = self._secret(client, own=False)
        made = secret and X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
        return self._right(client, secret, made == public)

    def why(self, client: int, own: bool) -> str:
        """Return the reason why a secret is None."""
        count = len(self._shares.get((client, own), ()))
        if count >= self._threshold:
            return f"The shares of client {client}'s secret do not give the secret to which it has committed"
        return f"Expected {self._threshold} shares of client {client}'s secret, but got {count}"

    def _secret(self, client: int, own: bool) -> bytes | None:
        shares = self._shares.get((client, own), {})
        if len(shares) < self._threshold:
            return None
        try:
            return shamir.combine(dict(sorted(shares.items())[: self._threshold]))
        except ValueError:
            self.dealers.add(client)
            return None

    def _right(self, client: int, secret: bytes | None, right: bool) -> bytes | None:
        if secret is not None and not right:
            self.dealers.add(client)
        return secret if right else None
