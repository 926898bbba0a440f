"""Philox against its known answers, a plain-integer oracle, and the distributions drawn from it."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedtorch import random
from fedtorch.random import philox as kernel
from fedtorch.random.draws import bits

MASK = 0xFFFFFFFF
SAMPLES = 40_000


def oracle(key: int, counter: list[int]) -> list[int]:
    """Philox-4x32-10 of one 64-bit key in plain integers (Salmon et al. 2011, section 3.3)."""
    k0, k1 = key & MASK, (key >> 32) & MASK
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def philox(key: int, counter: list[int]) -> list[int]:
    even, odd = kernel.philox(torch.tensor(signed(key)), counter)
    return [int(word) & MASK for word in (even[0], odd[0], even[1], odd[1])]


@pytest.fixture(autouse=True)
def _untouched_generator():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def keys() -> Tensor:
    return random.fold_in(random.key(7), torch.arange(6)).reshape(2, 3)


# Known answers of Random123 (kat_vectors, philox4x32 10).
KNOWN = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([MASK] * 4, [MASK] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "words", "answer"), KNOWN)
def test_known_answers(counter, words, answer):
    key = words[0] | words[1] << 32
    expected = [int(word, 16) for word in answer.split()]
    assert oracle(key, counter) == expected
    assert philox(key, counter) == expected


def test_draws_of_many_keys_are_those_of_each():
    several = random.fold_in(random.key(7), torch.arange(200))
    for drawn in (lambda keys: bits(keys, 9), lambda keys: random.permutation(keys, 5)):
        assert torch.equal(drawn(several), torch.stack([drawn(key) for key in several]))
    children = random.fold_in(several[:, None], torch.arange(3))
    assert torch.equal(children[17], random.fold_in(several[17], torch.arange(3)))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
def test_bits_and_new_keys_equal_the_oracle(seed):
    key = random.key(seed)
    expected = [word for block in range(3) for word in oracle(seed, [block, 0, 0, 0])]
    assert bits(key, 11).tolist() == expected[:11]
    for data in (0, 5, -1, 2**40 + 3):
        words = oracle(seed, [data & MASK, (data >> 32) & MASK, 0, 1])
        assert int(random.fold_in(key, data)) == signed(words[0] | words[1] << 32)
        assert int(random.fold_in(key, torch.tensor(data))) == signed(words[0] | words[1] << 32)


def test_fold_in_broadcasts(keys):
    data = torch.arange(4)
    folded = random.fold_in(keys[..., None], data)
    assert folded.shape == (2, 3, 4)
    assert int(folded[1, 2, 3]) == int(random.fold_in(keys[1, 2], 3))
    assert random.fold_in(random.key(0), torch.arange(5, dtype=torch.int32)).shape == (5,)
    assert folded.unique().numel() == folded.numel()


def test_split_is_fold_in(keys):
    for i, found in enumerate(random.split(keys, 3)):
        assert torch.equal(found, random.fold_in(keys, i))
    assert random.split(keys[:0], 2)[1].shape == (0, 3)


def test_new_keys_are_not_drawn():
    # A key's draws and the keys folded from it have different counters, so none of the words coincide
    # (two of 6 · 10⁴ 32-bit words by chance: whole 64-bit keys are compared instead).
    key = random.key(1)
    words = bits(key, 20_000)
    drawn = (words[0::2] | words[1::2] << 32).tolist() + (words[1:-1:2] | words[2::2] << 32).tolist()
    new = random.fold_in(key, torch.arange(10_000)).tolist()
    assert not set(drawn) & set(new)


DRAWS = {
    "bits": lambda key, n: bits(key, n),
    "uniform32": lambda key, n: random.uniform(key, (n,)),
    "uniform64": lambda key, n: random.uniform(key, (n,), torch.float64),
    "uniform16": lambda key, n: random.uniform(key, (n,), torch.bfloat16),
    "normal32": lambda key, n: random.normal(key, (n,)),
    "normal64": lambda key, n: random.normal(key, (n,), torch.float64),
    "exponential32": lambda key, n: random.exponential(key, (n,)),
    "exponential64": lambda key, n: random.exponential(key, (n,), torch.float64),
    "bernoulli": lambda key, n: random.bernoulli(key, 0.3, (n,)),
    "bernoulli_tensor": lambda key, n: random.bernoulli(key, torch.tensor(0.3), (n,)),
    "randint": lambda key, n: random.randint(key, 1000, (n,)),
    "gamma": lambda key, n: random.gamma(key, 2.5, (n,)),
    "gamma64": lambda key, n: random.gamma(key, 0.4, (n,), torch.float64),
    "inverse_gamma": lambda key, n: random.inverse_gamma(key, 1.5, (n,)),
    "beta": lambda key, n: random.beta(key, 0.7, 2.0, (n,), torch.float64),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


@each_draw
def test_stacked_equals_looped(draw, keys):
    stacked = draw(keys, 37)
    assert stacked.shape == (2, 3, 37)
    looped = torch.stack([draw(key, 37) for key in keys.flatten()])
    assert torch.equal(stacked.flatten(0, 1), looped)


@each_draw
def test_more_leaves_the_first_as_they_are(draw, keys, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 2**10)
    longer = draw(keys, 1003)
    for count in (0, 1, 2, 3, 4, 5, 8, 63, 1002):
        assert torch.equal(draw(keys, count), longer[..., :count])
    monkeypatch.setattr(kernel, "BLOCK", 2**20)
    assert torch.equal(draw(keys, 1003), longer)


@each_draw
def test_no_keys_and_no_elements(draw, keys):
    assert draw(keys.flatten()[:0], 5).shape == (0, 5)
    assert draw(keys, 0).shape == (2, 3, 0)


@each_draw
def test_does_not_depend_on_the_default_dtype(draw, keys):
    expected = draw(keys, 9)
    torch.set_default_dtype(torch.float64)
    try:
        got = draw(keys, 9)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_shapes_are_flat_positions(keys):
    for draw in (random.uniform, random.normal, random.exponential):
        assert draw(keys).shape == keys.shape
        assert torch.equal(draw(keys, (3, 5)).flatten(-2), draw(keys, (15,)))
    assert random.randint(keys, 9, (3, 5)).shape == (2, 3, 3, 5)
    assert random.bernoulli(keys, torch.rand(3, 5, generator=torch.Generator()), (3, 5)).shape == (2, 3, 3, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_is_uniform(dtype):
    sample = random.uniform(random.key(2), (SAMPLES,), dtype).double()
    assert float(sample.min()) >= 0
    assert float(sample.max()) < 1
    spacing = torch.finfo(dtype).eps / 2
    assert float((sample / spacing).frac().abs().max()) == 0
    # A grid of this spacing moves the empirical distribution by at most the spacing.
    assert stats.kstest(sample.numpy(), "uniform").statistic < 1.95 / math.sqrt(SAMPLES) + spacing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_and_exponential(dtype):
    key = random.key(3)
    for draw, law in ((random.normal, stats.norm), (random.exponential, stats.expon)):
        sample = draw(key, (SAMPLES,), dtype)
        assert sample.dtype == dtype
        assert bool(sample.isfinite().all())
        assert stats.kstest(sample.double().numpy(), law.cdf).pvalue > 1e-4
        for power in (1, 2, 3, 4):
            error = math.sqrt((law.moment(2 * power) - law.moment(power) ** 2) / SAMPLES)
            assert abs(float((sample.double() ** power).mean()) - law.moment(power)) < 4 * error
    pairs = random.normal(key, (SAMPLES // 2, 2), dtype).double()
    assert abs(float(pairs.prod(-1).mean())) < 4 / math.sqrt(SAMPLES // 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("word", [0, MASK])
def test_extreme_words_stay_finite(monkeypatch, dtype, word):
    monkeypatch.setenv("FEDTORCH_PROGRAMS", "off")  # the program's formulas: tests/programs/test_philox.py
    monkeypatch.setattr(kernel, "_words", lambda key, start, count: torch.full((*key.shape, count), word))
    key = random.key(0)
    assert bool(random.normal(key, (4,), dtype).isfinite().all())
    exponential = random.exponential(key, (4,), dtype)
    assert bool((exponential.isfinite() & (exponential > 0)).all())
    uniform = random.uniform(key, (4,), dtype)
    assert bool(((uniform >= 0) & (uniform < 1)).all())
    assert bool(random.bernoulli(key, 1.0))
    assert not bool(random.bernoulli(key, 0.0))
    assert 0 <= int(random.randint(key, 10)) < 10


def test_bernoulli_counts_and_tensor_probabilities():
    key = random.key(4)
    for p in (0.0, 0.01, 0.5, 0.9, 1.0):
        mean = float(random.bernoulli(key, p, (SAMPLES,)).double().mean())
        assert abs(mean - p) <= 4 * math.sqrt(p * (1 - p) / SAMPLES)
        tensor = random.bernoulli(key, torch.tensor(p, dtype=torch.float64), (SAMPLES,))
        assert torch.equal(tensor, random.bernoulli(key, p, (SAMPLES,)))
    each = random.bernoulli(key, torch.tensor([0.0, 1.0, 0.0]), (50, 3))
    assert torch.equal(each.sum(0), torch.tensor([0, 50, 0]))


def test_randint():
    key = random.key(5)
    counts = random.randint(key, 7, (SAMPLES,)).bincount(minlength=7)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    large = random.randint(key, 2**62, (1000,))
    assert int(large.min()) >= 0
    assert abs(float((large.double() / 2**62).mean()) - 0.5) < 4 / math.sqrt(12 * 1000)
    keys = random.fold_in(key, torch.arange(3))
    several = random.randint(keys, torch.tensor([0, 1, 50]), (100,))
    assert several[:2].eq(0).all()
    assert torch.equal(several[2], random.randint(keys[2], 50, (100,)))


def test_permutation_is_uniform():
    keys = random.fold_in(random.key(6), torch.arange(12_000))
    permutations = random.permutation(keys, 4)
    assert torch.equal(permutations.sort(-1).values, torch.arange(4).expand(12_000, 4))
    code = (permutations * torch.tensor([64, 16, 4, 1])).sum(-1)
    _, counts = code.unique(return_counts=True)
    assert counts.numel() == 24
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_permutation_does_not_see_padding(keys):
    count = torch.tensor([[0, 1, 2], [5, 8, 9]])
    short, long = random.permutation(keys, 9, count), random.permutation(keys, 30, count)
    assert torch.equal(short, long[..., :9])
    for row, key, n in zip(long.flatten(0, 1), keys.flatten(), count.flatten().tolist()):
        assert torch.equal(row[:n], random.permutation(key, n))
        assert torch.equal(row[n:], torch.arange(n, 30))
    full = random.permutation(keys, 9)
    assert torch.equal(full, random.permutation(keys, 9, torch.full((2, 3), 9)))
    assert random.permutation(keys, 0).shape == (2, 3, 0)
    none = keys.flatten()[:0]
    assert random.permutation(none, 5, torch.zeros(0, dtype=torch.int64)).shape == (0, 5)


def test_choice_is_uniform():
    keys = random.fold_in(random.key(8), torch.arange(10_000))
    chosen = random.choice(keys, 5, 2)
    assert bool((chosen[:, 0] < chosen[:, 1]).all())
    counts = (chosen[:, 0] * 5 + chosen[:, 1]).bincount(minlength=25)
    counts = counts[counts > 0]
    assert counts.numel() == 10
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    assert torch.equal(random.choice(keys[0], 5, 5), torch.arange(5))
    assert torch.equal(random.choice(keys[3], 50, 7), random.choice(keys[:5], 50, 7)[3])
    assert random.choice(keys[:0], 5, 2).shape == (0, 2)
    assert random.choice(keys[:2], 5, 0).shape == (2, 0)


def test_a_few_of_very_many_are_a_uniform_choice():
    keys, many = random.fold_in(random.key(9), torch.arange(4000)), 2**14
    chosen = random.choice(keys, many, 5)
    assert chosen.shape == (4000, 5)
    assert bool((chosen[:, 1:] > chosen[:, :-1]).all())
    assert int(chosen.min()) >= 0
    assert int(chosen.max()) < many
    assert stats.chisquare((chosen // (many // 64)).flatten().bincount(minlength=64).numpy()).pvalue > 1e-4
    assert torch.equal(random.choice(keys[7], many, 5), chosen[7])
    assert random.choice(keys[:0], many, 5).shape == (0, 5)
    assert random.choice(keys[0], many, 512).unique().shape == (512,)  # with repetitions among those drawn


def test_draws_of_neighbouring_keys_are_uncorrelated():
    keys = random.fold_in(random.key(9), torch.arange(200))
    sample = random.normal(keys, (500,), torch.float64)
    products = (sample[1:] * sample[:-1]).mean()
    assert abs(float(products)) < 4 / math.sqrt(199 * 500)
    raw = random.normal(torch.arange(200), (500,), torch.float64)
    assert abs(float((raw[1:] * raw[:-1]).mean())) < 4 / math.sqrt(199 * 500)


@pytest.mark.parametrize("a", [0.05, 0.5, 1.0, 1.01, 2.5, 60.0, 1e6])
def test_gamma_and_inverse_gamma(a):
    key = random.fold_in(random.key(11), round(a * 100))
    sample = random.gamma(key, a, (SAMPLES,), torch.float64)
    assert bool((sample.isfinite() & (sample > 0)).all())
    assert stats.kstest(sample.numpy(), stats.gamma(a).cdf).pvalue > 1e-4
    for power in (1, 2):
        law = stats.gamma(a)
        error = math.sqrt((law.moment(2 * power) - law.moment(power) ** 2) / SAMPLES)
        assert abs(float((sample**power).mean()) - law.moment(power)) < 4 * error
    inverse = random.inverse_gamma(key, a, (SAMPLES,), torch.float64)
    assert torch.equal(inverse, 1 / sample)
    assert bool(random.inverse_gamma(key, a, (SAMPLES,)).isfinite().all())


def test_gamma_of_tensor_valued_shapes_is_that_of_each():
    keys = random.fold_in(random.key(12), torch.arange(3))
    a = torch.tensor([0.3, 1.0, 4.0, 0.9, 77.0], dtype=torch.float64)
    found = random.gamma(keys, a, (5,), torch.float64)
    for i, each in enumerate(a.tolist()):
        assert torch.equal(found[:, i], random.gamma(keys, each, (5,), torch.float64)[:, i])
    of_keys = random.gamma(keys, a[:3, None], (4,))
    assert torch.equal(of_keys[1], random.gamma(keys[1], 1.0, (4,)))
    assert random.gamma(keys, 2.0).shape == (3,)


def test_elements_of_gamma_are_independent_of_each_other():
    sample = random.gamma(random.fold_in(random.key(13), torch.arange(200)), 0.8, (500,), torch.float64) - 0.8
    for first, second in ((sample[1:], sample[:-1]), (sample[:, 1:], sample[:, :-1])):
        assert abs(float((first * second).mean())) < 4 * 0.8 / math.sqrt(first.numel())  # their variance is 0.8


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (1.0, 1.0), (3.0, 0.7), (40.0, 9.0)])
def test_beta(a, b):
    sample = random.beta(random.key(14), a, b, (SAMPLES,), torch.float64)
    assert stats.kstest(sample.numpy(), stats.beta(a, b).cdf).pvalue > 1e-4
    assert abs(float(sample.mean()) - a / (a + b)) < 4 * stats.beta(a, b).std() / math.sqrt(SAMPLES)


@pytest.mark.parametrize("word", [0, MASK])
def test_gamma_of_extreme_words_stays_finite(monkeypatch, word):
    monkeypatch.setenv("FEDTORCH_PROGRAMS", "off")
    real = kernel.block_words

    def extreme(keys, element, attempt, purpose):
        words = real(keys, element, attempt, purpose)
        return torch.full_like(words, word) if attempt in (0, kernel._BOOST) else words

    monkeypatch.setattr(kernel, "block_words", extreme)
    for a in (0.01, 1.0, 30.0):
        for dtype in (torch.float32, torch.float64):
            sample = random.gamma(random.key(0), a, (4,), dtype)
            assert bool((sample.isfinite() & (sample > 0)).all())
            assert bool(random.inverse_gamma(random.key(0), a, (4,), dtype).isfinite().all())


def test_errors():
    key = random.key(0)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="Expected finite concentrations above 0"):
            random.gamma(key, bad, (2,))
    some = random.gamma(key, torch.tensor([1.0, 0.0, math.nan, -1.0, math.inf]), (5,))
    assert some.isnan().tolist() == [False, True, True, True, True]
    assert float(some[0]) == float(random.gamma(key, 1.0, (5,))[0])
    with pytest.raises(ValueError, match=r"broadcasts to \(2,\), but got \(3,\)"):
        random.gamma(key, torch.ones(3), (2,))
    for seed in (2**63, [], [0, -(2**63) - 1]):
        with pytest.raises(ValueError, match="Expected a seed"):
            random.key(seed)
    assert random.key(range(3)).tolist() == [0, 1, 2] == [int(random.key(seed)) for seed in range(3)]
    with pytest.raises(TypeError, match=r"Expected a key.*float32"):
        random.uniform(torch.zeros(3))
    with pytest.raises(TypeError, match=r"Expected a key.*int"):
        bits(0, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Expected an integer to fold in"):
        random.fold_in(key, torch.tensor(0.5))
    with pytest.raises(TypeError, match="Expected a floating-point dtype"):
        random.normal(key, (3,), torch.int64)
    with pytest.raises(ValueError, match=r"Expected a probability.*1.5"):
        random.bernoulli(key, 1.5)
    with pytest.raises(ValueError, match="Expected a positive bound"):
        random.randint(key, 0)
    with pytest.raises(ValueError, match=r"Expected a count between 0 and the population of 3, but got 4"):
        random.choice(key, 3, 4)


def test_words_are_the_same_where_operations_are_intercepted():
    class Passed(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    for keys in (random.key(3), random.fold_in(random.key(-1), torch.arange(5)).expand(2, 5)):
        with Passed():  # by torch's operations, otherwise by NumPy's
            words, folded = bits(keys, 7), random.fold_in(keys, 2**40 + 1)
        assert torch.equal(words, bits(keys, 7))
        assert torch.equal(folded, random.fold_in(keys, 2**40 + 1))


@pytest.mark.parametrize("seed", [0, 7, -1, 2**62 + 3, -(2**63)])
def test_few_new_keys_are_those_of_many(seed: int) -> None:
    key, numbers = random.key(seed), torch.tensor([0, 1, -1, 2**40 + 5, 2**63 - 1, -(2**63)])
    many = random.fold_in(key, numbers.repeat(50)).reshape(50, -1)[0]  # so many are made as arrays
    assert random.fold_in(key, numbers).equal(many)
    assert torch.stack([random.fold_in(key, int(number)) for number in numbers]).equal(many)
    assert random.fold_in(key.expand(2, 1), numbers[:3]).equal(many[:3].expand(2, 3))
    assert random.fold_in(key, numbers[:0]).shape == (0,)
    assert random.fold_in(key, 5).dtype == torch.int64
