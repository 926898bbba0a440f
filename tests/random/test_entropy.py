"""Keys bind what they are for, streams are those of the standards, and the numbers have their distributions."""

from __future__ import annotations

import copy
import hashlib
import hmac
import os
import pickle
import struct
from functools import partial

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from fedtorch.random.entropy import Entropy, Purpose, from_system
from fedtorch.trust import privacy
from fedtorch.trust.privacy.noise import Mechanism, gaussian

PURPOSE = Purpose(b"run", 3, 7, "noise", b"roster")


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for one block of output."""
    extracted = hmac.new(salt, secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def test_keys_are_those_of_rfc_5869_and_words_those_of_counter_mode() -> None:
    entropy = Entropy(b"s" * 32, guarantees=False)
    fields = [b"run", (3).to_bytes(8, "big"), (7).to_bytes(8, "big"), b"noise", b"roster"]
    info = b"".join(len(field).to_bytes(8, "big") + field for field in fields)
    key = hkdf(b"s" * 32, b"fedtorch privacy 1", info)
    assert entropy.key(PURPOSE) == key
    block = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    stream = b"".join(block.update(counter.to_bytes(16, "big")) for counter in range(3))
    assert entropy.words(PURPOSE, 5).tolist() == list(struct.unpack("<5q", stream[:40]))


@pytest.mark.parametrize(
    "other",
    [
        PURPOSE._replace(run=b"another"),
        PURPOSE._replace(round=4),
        PURPOSE._replace(attempt=8),
        PURPOSE._replace(phase="masks"),
        PURPOSE._replace(roster=b"others"),
        PURPOSE._replace(run=b"runn", phase="oise"),
        PURPOSE._replace(phase="noiser", roster=b"oster"),
    ],
)
def test_every_part_of_the_purpose_counts(other: Purpose) -> None:
    entropy = privacy.from_seed(0)
    assert entropy.key(PURPOSE) == entropy.key(Purpose(*PURPOSE))
    assert entropy.key(other) != entropy.key(PURPOSE)
    assert not bool((entropy.words(other, 100) == entropy.words(PURPOSE, 100)).any())


def test_seeds_repeat_and_the_system_does_not() -> None:
    assert privacy.from_seed(1).key(PURPOSE) == privacy.from_seed(1).key(PURPOSE) != privacy.from_seed(2).key(PURPOSE)
    one, two = from_system(), from_system()
    assert one.key(PURPOSE) == one.key(PURPOSE) != two.key(PURPOSE)
    assert (one.guarantees, privacy.from_seed(1).guarantees) == (True, False)


def test_a_forked_process_has_a_secret_of_its_own() -> None:
    entropy = from_system()
    mine = entropy.key(PURPOSE)
    entropy._process = os.getpid() + 1  # as if this were the child
    assert entropy.key(PURPOSE) != mine
    seeded = privacy.from_seed(0)
    seeded._process = os.getpid() + 1
    assert seeded.key(PURPOSE) == privacy.from_seed(0).key(PURPOSE)


def test_the_secret_is_neither_shown_nor_saved() -> None:
    entropy = Entropy(b"a secret", guarantees=True)
    assert "a secret" not in repr(entropy)
    for save in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="stay in its process"):
            save(entropy)


def test_uniforms_are_uniform() -> None:
    """Kolmogorov–Smirnov at a fixed seed; p would be below 1e-3 once in a thousand seeds."""
    draws = privacy.from_seed(5).uniforms(PURPOSE, 100_000)
    assert 0 < float(draws.min()) < 1e-4
    assert 1 - 1e-4 < float(draws.max()) < 1
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3
    assert privacy.from_seed(5).words(PURPOSE, 0).shape == (0,)


@pytest.mark.parametrize(("mechanism", "law"), [(gaussian, "norm"), (privacy.laplace, "laplace")])
def test_noise_has_its_distribution(mechanism: Mechanism, law: str) -> None:
    draws = mechanism.draw(partial(privacy.from_seed(6).uniforms, PURPOSE), 100_001)
    assert (draws.dtype, len(draws)) == (torch.float64, 100_001)
    assert bool(draws.isfinite().all())
    assert stats.kstest(draws.numpy(), law).pvalue > 1e-3
    assert stats.kstest(draws[:50_000].numpy(), draws[50_000:].numpy()).pvalue > 1e-3
