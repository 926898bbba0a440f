"""Programs of `fedtorch.random.philox`, and the generator and its transforms as functions for other programs."""

from __future__ import annotations

import triton
import triton.language as tl

BITS, INTEGERS, COINS, UNIFORM, NORMAL, EXPONENTIAL = (tl.constexpr(form) for form in range(6))
FOLD, GAMMA = tl.constexpr(1), tl.constexpr(2)  # counter words of `fedtorch.random.philox`
BOOST = tl.constexpr(0xFFFFFFFF)


@triton.jit
def philox(k0, k1, c0, c1, c2, c3):
    """Return the four words of Philox-4x32-10, all uint32 that broadcast."""
    for _ in tl.static_range(10):
        high = tl.umulhi(c0, 0xD2511F53)
        low = c0 * 0xD2511F53
        c0 = tl.umulhi(c2, 0xCD9E8D57) ^ c1 ^ k0
        c1 = c2 * 0xCD9E8D57
        c2 = high ^ c3 ^ k1
        c3 = low
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def halves(number):
    """Return the lower and the upper word of int64 numbers."""
    return number.to(tl.uint32), (number >> 32).to(tl.uint32)


@triton.jit
def words_of(key, block, attempt, purpose):
    """Return the four words of the counter (block, attempt, purpose), for int64 keys and blocks of one shape."""
    k0, k1 = halves(key)
    c0, c1 = halves(block)
    return philox(k0, k1, c0, c1, c0 * 0 + attempt, c0 * 0 + purpose)


@triton.jit
def integer(first, second):
    """Return 63 bits of two words."""
    return (first.to(tl.int64) << 31) | (second >> 1).to(tl.int64)


@triton.jit
def inside(first, second):
    """Return uniform float64 strictly between 0 and 1 of 52 bits of two words."""
    return ((integer(first, second) >> 11).to(tl.float64) + 0.5) * 2.0**-52


@triton.jit
def inside_of_one(word):
    """Return uniform float64 strictly between 0 and 1 of one word."""
    return (word.to(tl.float64) + 0.5) * 2.0**-32


@triton.jit
def cosine_and_sine(turns):
    """Return cos and sin of 2π · turns for turns in [0, 1], float64, by Taylor series on an eighth of a turn."""
    quarters = turns * 4.0
    nearest = tl.floor(quarters + 0.5)
    x = (quarters - nearest) * 1.5707963267948966
    y = x * x
    sine = y * -7.647163731819816e-13 + 1.6059043836821613e-10
    sine = sine * y - 2.505210838544172e-08
    sine = sine * y + 2.7557319223985893e-06
    sine = sine * y - 0.0001984126984126984
    sine = sine * y + 0.008333333333333333
    sine = sine * y - 0.16666666666666666
    sine = x + x * y * sine
    cosine = y * 4.779477332387385e-14 - 1.1470745597729725e-11
    cosine = cosine * y + 2.08767569878681e-09
    cosine = cosine * y - 2.755731922398589e-07
    cosine = cosine * y + 2.48015873015873e-05
    cosine = cosine * y - 0.001388888888888889
    cosine = cosine * y + 0.041666666666666664
    cosine = 1.0 - 0.5 * y + y * y * cosine
    turn = nearest.to(tl.int32)
    odd = turn % 2 == 1
    one, other = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    return tl.where((turn == 1) | (turn == 2), -one, one), tl.where((turn == 2) | (turn == 3), -other, other)


@triton.jit
def normals(radius, turns):
    """Return two standard normal numbers of two uniform ones."""
    length = tl.sqrt(-2.0 * tl.log(radius))
    cosine, sine = cosine_and_sine(turns)
    return length * cosine, length * sine


@triton.jit
def proposal(w0, w1, w2, w3, a):
    """Return (gamma numbers, whether they are accepted) of the words of one attempt; a ≥ 1, float64."""
    x, _ = normals(inside(w0, w1), w2.to(tl.float64) * 2.0**-32)
    d = a - 0.3333333333333333
    root = x / tl.sqrt(9.0 * d) + 1.0
    v = root * root * root
    bound = x * x / 2.0 + d * (1.0 - v + tl.log(tl.maximum(v, 2.2250738585072014e-308)))
    return d * v, (v > 0) & (tl.log(inside_of_one(w3)) < bound)


@triton.jit
def gammas(key, element, a, wanted):
    """Return gamma numbers of shape parameters a > 0 for elements of keys, float64; zeros outside the mask."""
    raised = tl.where(a < 1, a + 1.0, a)
    value = raised * 0.0
    missing = wanted
    attempt = 0
    while tl.max(missing.to(tl.int32)) > 0:
        w0, w1, w2, w3 = words_of(key, element, attempt, GAMMA)
        proposed, fine = proposal(w0, w1, w2, w3, raised)
        value = tl.where(missing & fine, proposed, value)
        missing = missing & ~fine
        attempt += 1
    w0, w1, _, _ = words_of(key, element, BOOST, GAMMA)
    return tl.where(wanted & (a < 1), value * tl.exp(tl.log(inside(w0, w1)) / a), value)


@triton.jit
def new_key(key, number):
    """Return keys of int64 keys and a number that is not negative."""
    w0, w1, _, _ = words_of(key, key * 0 + number, 0, FOLD)
    return (w1.to(tl.int64) << 32) | w0.to(tl.int64)


@triton.jit
def wide_pair(key, element):
    """Return the two words of float64 elements of keys; int64 of one shape."""
    w0, w1, w2, w3 = words_of(key, element // 2, 0, 0)
    even = element % 2 == 0
    return tl.where(even, w0, w2), tl.where(even, w1, w3)


@triton.jit
def wide_normal(key, element):
    """Return the float64 elements of a draw of normal numbers."""
    w0, w1, w2, w3 = words_of(key, element // 2, 0, 0)
    one, other = normals(inside(w0, w1), inside(w2, w3))
    return tl.where(element % 2 == 0, one, other)


@triton.jit
def wide_exponential(key, element):
    """Return the float64 elements of a draw of exponential numbers."""
    first, second = wide_pair(key, element)
    return -tl.log(inside(first, second))


@triton.jit
def four(a, b, c, d):
    """Return `(R, C)` each side by side, `(R, 4C)`."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def draw(
    out,
    keys,
    rows,
    count,
    threshold,
    across,
    FORM: tl.constexpr,
    WIDE: tl.constexpr,
    DIGITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return `count` numbers of each of `rows` keys in one of the six forms; a lane makes one block of four words."""
    each: tl.constexpr = 2 if WIDE else 4
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (program % across).to(tl.int64) * COLUMNS
    there = row < rows
    key = tl.load(keys + row, mask=there, other=0)[:, None]
    block = (first + tl.arange(0, COLUMNS))[None, :]
    w0, w1, w2, w3 = words_of(key + block * 0, block + key * 0, 0, 0)
    if WIDE:
        if FORM == INTEGERS:
            numbers = tl.interleave(integer(w0, w1), integer(w2, w3))
        elif FORM == UNIFORM:
            one = (integer(w0, w1) >> 10).to(tl.float64) * 2.0**-53
            other = (integer(w2, w3) >> 10).to(tl.float64) * 2.0**-53
            numbers = tl.interleave(one, other)
        elif FORM == NORMAL:
            one, other = normals(inside(w0, w1), inside(w2, w3))
            numbers = tl.interleave(one, other)
        else:
            numbers = tl.interleave(-tl.log(inside(w0, w1)), -tl.log(inside(w2, w3)))
    elif FORM == NORMAL:
        one, two = normals(inside_of_one(w0), inside_of_one(w1))
        three, last = normals(inside_of_one(w2), inside_of_one(w3))
        numbers = four(one, two, three, last)
    else:
        word = four(w0, w1, w2, w3)
        if FORM == BITS:
            numbers = word.to(tl.int64)
        elif FORM == COINS:
            numbers = word.to(tl.int64) < threshold
        elif FORM == UNIFORM:
            numbers = (word >> 32 - DIGITS).to(tl.float32) * 2.0**-DIGITS
        else:
            numbers = -tl.log(inside_of_one(word))
    if not WIDE and (FORM == NORMAL or FORM == EXPONENTIAL):  # noqa: SIM109 (Triton knows no `in`)
        numbers = numbers.to(tl.float32)  # as torch rounds float64 to smaller dtypes
    place = first * each + tl.arange(0, COLUMNS * each)
    target = row[:, None] * count + place[None, :]
    tl.store(out + target, numbers.to(out.dtype.element_ty), mask=there[:, None] & (place < count)[None, :])


@triton.jit
def gamma(
    out, keys, concentration, rows, count, smallest: tl.float64, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return `count` gamma numbers of each of `rows` keys, of shape parameters `(rows, count)`."""
    program = tl.program_id(0)
    row = ((program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    element = ((program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = (row < rows) & (element < count)
    key = tl.load(keys + row, mask=row < rows, other=0)
    a = tl.load(concentration + row * count + element, mask=there, other=1.0)
    value = gammas(key + element * 0, element + key * 0, a, there)
    value = tl.maximum(value, smallest)
    if out.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    value = value.to(out.dtype.element_ty)
    tl.store(out + row * count + element, value, mask=there)


@triton.jit
def fold(out, keys, data, count, purpose, BLOCK: tl.constexpr):
    """Return a new key of each pair of a key and a number."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    k0, k1 = halves(tl.load(keys + place, mask=there, other=0))
    c0, c1 = halves(tl.load(data + place, mask=there, other=0))
    w0, w1, _, _ = philox(k0, k1, c0, c1, c0 * 0, c0 * 0 + purpose)
    tl.store(out + place, (w1.to(tl.int64) << 32) | w0.to(tl.int64), mask=there)
