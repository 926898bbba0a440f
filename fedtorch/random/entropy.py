"""Entropy for noise, masks and secret cohorts: of the operating system, or of a seed, which guarantees nothing.

The package's other draws are functions of a seed, so whoever knows it could subtract them again. What protects somebody
is therefore drawn from a secret of the operating system, 32 bytes that are never written anywhere: a resumed run has
another. Every use has a key of its own, HKDF-SHA256 of the secret and of the run, round, attempt, phase and roster it
is for, and expands it by AES-256 in counter mode; a round that is tried again is another attempt and has fresh numbers.

>>> from fedtorch.trust import privacy
>>> purpose = Purpose(run=b"run", round=3, attempt=0, phase="noise", roster=b"")
>>> one, two = privacy.from_seed(0), privacy.from_seed(0)
>>> bool((one.uniforms(purpose, 4) == two.uniforms(purpose, 4)).all()), one.guarantees
(True, False)
>>> fresh = from_system()
>>> bool((fresh.uniforms(purpose, 4) == one.uniforms(purpose, 4)).any()), fresh.guarantees
(False, True)

Sources: Krawczyk and Eronen (2010), RFC 5869; NIST SP 800-38A, section 6.5.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

_SALT = b"fedtorch privacy 1"
_MASK = 2**53 - 1
_ZEROS = bytes(2**16)


class Purpose(NamedTuple):
    """The purpose of a key; two purposes that differ anywhere have unrelated keys."""

    run: bytes  # unique name of the run
    round: int
    attempt: int  # attempts of the round, counted over the whole run
    phase: str
    roster: bytes  # digest of the participants

    def encoded(self) -> bytes:
        """Return the fields, each prefixed by its length, so that different purposes encode differently."""
        numbers = [number.to_bytes(8, "big", signed=True) for number in (self.round, self.attempt)]
        fields = [self.run, *numbers, self.phase.encode(), self.roster]
        return b"".join(len(field).to_bytes(8, "big") + field for field in fields)


class Entropy:
    """A secret, and the random numbers derived from it.

    Built by `from_system` and `from_seed`; neither shown nor saved.

    Attributes:
        guarantees: whether the numbers are unpredictable.

    Example:
        >>> entropy, purpose = from_seed(0), Purpose(b"run", round=3, attempt=0, phase="noise", roster=b"")
        >>> len(entropy.key(purpose)), entropy.words(purpose, 4).shape
        (32, torch.Size([4]))
        >>> again = purpose._replace(attempt=1)  # the round is tried again, with other numbers
        >>> bool((entropy.uniforms(purpose, 4) == entropy.uniforms(again, 4)).any())
        False
    """

    def __init__(self, secret: bytes, guarantees: bool) -> None:
        self._secret, self._process = secret, os.getpid()
        self.guarantees = guarantees

    def key(self, purpose: Purpose) -> bytes:
        """Return a key of 32 bytes for one purpose, for one use."""
        if self.guarantees and self._process != os.getpid():  # a fork must not repeat its parent's numbers
            self._secret, self._process = secrets.token_bytes(32), os.getpid()
        return derived(self._secret, purpose)

    def words(self, purpose: Purpose, count: int) -> Tensor:
        """Return `(count,)` int64, all 64 bits random."""
        return expanded(self.key(purpose), count)

    def uniforms(self, purpose: Purpose, count: int) -> Tensor:
        """Return `(count,)` uniform numbers of 53 bits, float64, above 0 and below 1."""
        return ((self.words(purpose, count) >> 11) & _MASK).to(torch.float64).add_(0.5).mul_(2.0**-53)

    def __repr__(self) -> str:
        return "Entropy(of the operating system)" if self.guarantees else "Entropy(of a seed: no guarantee)"

    def __getstate__(self) -> None:
        raise TypeError("Expected entropy to stay in its process, but it is being copied or saved; make it anew")


def expanded(key: bytes, count: int) -> Tensor:
    """Return `(count,)` int64 words of the AES-256 counter-mode keystream of a one-use key of 32 bytes."""
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    words = torch.empty(count + 2, dtype=torch.int64)  # room for one more block
    view, size = words.view(torch.uint8).numpy().data, 8 * count
    for start in range(0, size, len(_ZEROS)):  # in pieces that fit the cache
        part = min(len(_ZEROS), size - start)
        stream.update_into(_ZEROS[:part], view[start : start + part + 15])
    return words[:count]


def derived(secret: bytes, purpose: Purpose) -> bytes:
    """Derive 32 bytes for one purpose by HKDF-SHA256.

    >>> purpose = Purpose(b"run", round=0, attempt=0, phase="mask", roster=b"")
    >>> one, same, other = (derived(bytes(32), each) for each in (purpose, purpose, purpose._replace(round=1)))
    >>> one == same, one == other
    (True, False)
    """
    return HKDF(SHA256(), 32, _SALT, purpose.encoded()).derive(secret)


def from_system() -> Entropy:
    """Return entropy of the operating system, with a fresh secret."""
    return Entropy(secrets.token_bytes(32), guarantees=True)


def from_seed(seed: int) -> Entropy:
    """Return reproducible numbers for simulations; whoever knows the seed can subtract them, so nothing is private.

    Args:
        seed: a whole number of 64 bits.
    """
    return Entropy(hashlib.sha256(b"a seed " + seed.to_bytes(8, "big", signed=True)).digest(), guarantees=False)
