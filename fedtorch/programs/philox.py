"""Draws and new keys of Philox-4x32-10 on the CPU: a block of four in each lane.

Bound: integer arithmetic, about a hundred operations a block; for normal and exponential numbers a logarithm, and a
sine and cosine. Loops over the formulas below become vector instructions, because they contain no branches and no
calls. A number's bits depend on its key and its position alone.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the logarithm by the method and with the
coefficients of FreeBSD's e_log.c, Sun Microsystems; Marsaglia and Tsang, "A simple method for generating gamma
variables", ACM TOMS 26, 2000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from numpy import float32, float64, int64, uint32, uint64
from torch import Tensor

from fedtorch.programs.engine import Program, program

DRAW, FOLD, GAMMA = 0, 1, 2  # the last counter word, which separates draws, new keys and proposals
_LANES = 64
_BOOST = 0xFFFFFFFF  # the attempt number whose words make a gamma variate of shape below 1 from one of shape + 1
_WHOLE = numpy.uint64(0x4330000000000000)  # the bits of 2⁵²
_ONE, _ROOT = numpy.uint64(0x3FF0000000000000), numpy.uint64(0x3FE6A09E667F3BCD)  # the bits of 1 and of √½
_FRACTION = numpy.uint64(0xFFFFFFFFFFFFF)
_NEAREST = 6755399441055744.0  # 1.5 · 2⁵²: added, it rounds to a whole number
_BIAS = numpy.uint64(1023)


@program(inline=True)
def philox(k0, k1, c0, c1, c2, c3):
    """Return the four Philox words of four counter words, all uint32."""
    for _ in range(10):
        first = uint64(c0) * uint64(0xD2511F53)
        second = uint64(c2) * uint64(0xCD9E8D57)
        c0 = uint32(second >> uint64(32)) ^ uint32(c1) ^ k0
        c1 = uint32(second)
        c2 = uint32(first >> uint64(32)) ^ uint32(c3) ^ k1
        c3 = uint32(first)
        k0 = uint32(k0 + uint32(0x9E3779B9))
        k1 = uint32(k1 + uint32(0xBB67AE85))
    return c0, c1, c2, c3


@program(inline=True)
def lower(number):
    """Return the lower word of 64 bits."""
    return uint32(uint64(number))


@program(inline=True)
def upper(number):
    """Return the upper word of 64 bits."""
    return uint32(uint64(number) >> uint64(32))


@program(inline=True)
def joined(high, low):
    """Return the int64 of two words."""
    return int64((uint64(high) << uint64(32)) | uint64(low))


@program(inline=True)
def whole(number):
    """Return a whole number below 2⁵² as float64: the significand of one between 2⁵² and 2⁵³."""
    return uint64(uint64(number) | _WHOLE).view(float64) - 4503599627370496.0


@program(inline=True)
def inside(first, second):
    """Return uniform float64 strictly between 0 and 1 of 52 bits of two words."""
    return (whole((uint64(first) << uint64(20)) | (uint64(second) >> uint64(12))) + 0.5) * 2.0**-52


@program(inline=True)
def inside_of_one(word):
    """Return uniform float64 strictly between 0 and 1 of one word."""
    return (whole(word) + 0.5) * 2.0**-32


@program(inline=True)
def logarithm(x):
    """Return log x of a normal number, to less than one unit in the last place.

    x = 2ᵏ m with m from √½ to √2, and log m by its series in s = f / (2 + f), f = m − 1.
    """
    bits = float64(x).view(uint64) + (_ONE - _ROOT)
    k = whole(bits >> uint64(52)) - 1023.0
    f = uint64((bits & _FRACTION) + _ROOT).view(float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    half = 0.5 * f * f
    even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
    odd = z * (
        6.666666666666735130e-01
        + w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01))
    )
    return k * 6.93147180369123816490e-01 - ((half - (s * (half + even + odd) + k * 1.90821492927058770002e-10)) - f)


@program(inline=True)
def power(k):
    """Return 2ᵏ of a whole number from −1022 to 1023."""
    return uint64((float64(k + _NEAREST).view(uint64) + _BIAS) << uint64(52)).view(float64)


@program(inline=True)
def exponential(x):
    """Return eˣ to less than one unit in the last place: 2ᵏ eʳ, and eʳ by a rational function of r² (fdlibm)."""
    x = -746.0 if x < -746.0 else x  # NaN stays
    x = 710.0 if x > 710.0 else x
    k = (x * 1.4426950408889634 + _NEAREST) - _NEAREST
    high, low = x - k * 6.93147180369123816490e-01, k * 1.90821492927058770002e-10
    r = high - low
    t = r * r
    c = 6.61375632143793436117e-05 + t * (-1.65339022054652515390e-06 + t * 4.13813679705723846039e-08)
    c = r - t * (1.66666666666666019037e-01 + t * (-2.77777777770155933842e-03 + t * c))
    half = (k * 0.5 + _NEAREST) - _NEAREST
    return (1.0 - ((low - (r * c) / (2.0 - c)) - high)) * power(half) * power(k - half)


@program(inline=True)
def cosine_and_sine(turns):
    """Return cos and sin of 2π · turns for turns in [0, 1], by Taylor series on an eighth of a turn."""
    quarters = turns * 4.0
    nearest = (quarters + _NEAREST) - _NEAREST
    x = (quarters - nearest) * 1.5707963267948966
    y = x * x
    s = y * -7.647163731819816e-13 + 1.6059043836821613e-10
    s = s * y - 2.505210838544172e-08
    s = s * y + 2.7557319223985893e-06
    s = s * y - 0.0001984126984126984
    s = s * y + 0.008333333333333333
    s = s * y - 0.16666666666666666
    s = x + x * y * s
    c = y * 4.779477332387385e-14 - 1.1470745597729725e-11
    c = c * y + 2.08767569878681e-09
    c = c * y - 2.755731922398589e-07
    c = c * y + 2.48015873015873e-05
    c = c * y - 0.001388888888888889
    c = c * y + 0.041666666666666664
    c = 1.0 - 0.5 * y + y * y * c
    turned = (nearest == 1.0) | (nearest == 3.0)
    one = s if turned else c
    other = c if turned else s
    cosine = -one if (nearest == 1.0) | (nearest == 2.0) else one
    sine = -other if (nearest == 2.0) | (nearest == 3.0) else other
    return cosine, sine


@program(inline=True)
def normals(radius, turns):
    """Return two standard normal numbers of two uniform ones."""
    length = math.sqrt(-2.0 * logarithm(radius))
    cosine, sine = cosine_and_sine(turns)
    return length * cosine, length * sine


@program(inline=True)
def words_of(key, block, attempt, purpose):
    """Return the four words of the counter (block, attempt, purpose)."""
    return philox(lower(key), upper(key), lower(block), upper(block), uint32(attempt), uint32(purpose))


@program(inline=True)
def new_key(key, number):
    """Return the key `random.fold_in(key, number)`."""
    w0, w1, _, _ = words_of(key, number, 0, FOLD)
    return joined(w1, w0)


@program()
def folded(key, number):
    """Return `new_key`, for few keys at many places, where its text would take long to compile."""
    return new_key(key, number)


@program()
def gamma_number(key, element, a):
    """Return a gamma number of rate one; NaN unless its shape parameter is finite and positive."""
    if not (a > 0.0 and a <= 1.7976931348623157e308):
        return math.nan
    raised = a + 1.0 if a < 1.0 else a
    d = raised - 1.0 / 3.0
    c = math.sqrt(9.0 * d)
    attempt = 0
    while True:
        w0, w1, w2, w3 = words_of(key, element, attempt, GAMMA)
        x, _ = normals(inside(w0, w1), whole(w2) * 2.0**-32)
        root = x / c + 1.0
        v = root * root * root
        if v > 0.0 and logarithm(inside_of_one(w3)) < x * x / 2.0 + d * (1.0 - v + logarithm(v)):
            break
        attempt += 1
    if a >= 1.0:
        return d * v
    w0, w1, _, _ = words_of(key, element, _BOOST, GAMMA)
    return d * v * exponential(logarithm(inside(w0, w1)) / a)


# Lanes are six runs of words in one array, so that the compiler sees that they do not overlap: the four of the
# counters, which become the numbers' words, and the two of the keys.
@program()
def _set(lanes, lane, count, key, block, purpose):
    """Set the key and the counters of `count` lanes from `lane` on, of one key and of blocks from `block` on."""
    for i in range(lane, lane + count):
        lanes[i] = lower(block + i - lane)
        lanes[_LANES + i] = upper(block + i - lane)
        lanes[2 * _LANES + i] = uint32(0)
        lanes[3 * _LANES + i] = uint32(purpose)
        lanes[4 * _LANES + i] = lower(key)
        lanes[5 * _LANES + i] = upper(key)


@program()
def _words(lanes):
    """Replace the counters of all lanes by their words."""
    for i in range(_LANES):
        lanes[i], lanes[_LANES + i], lanes[2 * _LANES + i], lanes[3 * _LANES + i] = philox(
            lanes[4 * _LANES + i],
            lanes[5 * _LANES + i],
            lanes[i],
            lanes[_LANES + i],
            lanes[2 * _LANES + i],
            lanes[3 * _LANES + i],
        )


def _drawing(dtype: str, each: int) -> Callable[[Callable[..., Any]], Program]:
    """Return a factory that makes a drawing program from a formula for the numbers of a block.

    Args:
        dtype: of the numbers, in numba's notation.
        each: numbers per block, 2 or 4.
    """

    def made(formula: Callable[..., Any]) -> Program:
        numbers_of = program(inline=True)(formula)

        @program()
        def of_lanes(lanes, argument, numbers):
            for i in range(_LANES):
                draws = numbers_of(lanes[i], lanes[_LANES + i], lanes[2 * _LANES + i], lanes[3 * _LANES + i], argument)
                for part in range(each):
                    numbers[part * _LANES + i] = draws[part]

        def draw(keys, argument, out):
            queries, count = out.shape
            blocks = (count + each - 1) // each
            lanes, numbers = numpy.zeros(6 * _LANES, uint32), numpy.empty(each * _LANES, out.dtype)
            query, block, left = 0, 0, queries * blocks
            while left > 0:
                here = min(left, _LANES)
                q, b, lane = query, block, 0
                while lane < here:
                    run = min(here - lane, blocks - b)
                    _set(lanes, lane, run, keys[q], b, DRAW)
                    lane += run
                    b += run
                    if b == blocks:
                        q, b = q + 1, 0
                _words(lanes)
                of_lanes(lanes, argument, numbers)
                lane = 0
                while lane < here:
                    run = min(here - lane, blocks - block)
                    full = min(run, (count - block * each) // each)
                    for i in range(full):
                        for part in range(each):
                            out[query, (block + i) * each + part] = numbers[part * _LANES + lane + i]
                    for i in range(full, run):
                        for part in range(count - (block + i) * each):
                            out[query, (block + i) * each + part] = numbers[part * _LANES + lane + i]
                    lane += run
                    block += run
                    if block == blocks:
                        query, block = query + 1, 0
                left -= here

        draw.__name__ = draw.__qualname__ = formula.__name__
        return program(f"void(int64[::1], int64, {dtype}[:, ::1])")(draw)

    return made


@_drawing("int64", 4)
def draw_bits(w0, w1, w2, w3, argument):
    return int64(w0), int64(w1), int64(w2), int64(w3)


@_drawing("int64", 2)
def draw_integers(w0, w1, w2, w3, argument):
    return (
        int64((uint64(w0) << uint64(31)) | uint64(w1 >> uint32(1))),
        int64((uint64(w2) << uint64(31)) | uint64(w3 >> uint32(1))),
    )


@_drawing("boolean", 4)
def draw_coins(w0, w1, w2, w3, threshold):
    return int64(w0) < threshold, int64(w1) < threshold, int64(w2) < threshold, int64(w3) < threshold


@_drawing("float32", 4)
def draw_uniform(w0, w1, w2, w3, digits):
    less, unit = uint32(32 - digits), float32(uint64((1023 - digits) << 52).view(float64))
    a, b = float32(int64(w0 >> less)) * unit, float32(int64(w1 >> less)) * unit
    return a, b, float32(int64(w2 >> less)) * unit, float32(int64(w3 >> less)) * unit


@_drawing("float64", 2)
def draw_uniform_wide(w0, w1, w2, w3, argument):
    a = (whole(w0) * 2097152.0 + whole(w1 >> uint32(11))) * 2.0**-53
    return a, (whole(w2) * 2097152.0 + whole(w3 >> uint32(11))) * 2.0**-53


@_drawing("float32", 4)
def draw_normal(w0, w1, w2, w3, argument):
    a, b = normals(inside_of_one(w0), inside_of_one(w1))
    c, d = normals(inside_of_one(w2), inside_of_one(w3))
    return float32(a), float32(b), float32(c), float32(d)


@_drawing("float64", 2)
def draw_normal_wide(w0, w1, w2, w3, argument):
    return normals(inside(w0, w1), inside(w2, w3))


@_drawing("float32", 4)
def draw_exponential(w0, w1, w2, w3, argument):
    a, b = float32(-logarithm(inside_of_one(w0))), float32(-logarithm(inside_of_one(w1)))
    return a, b, float32(-logarithm(inside_of_one(w2))), float32(-logarithm(inside_of_one(w3)))


@_drawing("float64", 2)
def draw_exponential_wide(w0, w1, w2, w3, argument):
    return -logarithm(inside(w0, w1)), -logarithm(inside(w2, w3))


@program("void(int64[:, :], int64[:, :], int64[:, ::1])")
def fold_keys(keys, numbers, out):
    """Write the new key of each pair of a key and a number, `(rows, columns)`."""
    lanes = numpy.zeros(6 * _LANES, uint32)
    rows, columns = out.shape
    row, column, left = 0, 0, rows * columns
    while left > 0:
        here = min(left, _LANES)
        r, c = row, column
        for i in range(here):
            _set(lanes, i, 1, keys[r, c], numbers[r, c], FOLD)
            c += 1
            if c == columns:
                r, c = r + 1, 0
        _words(lanes)
        for i in range(here):
            out[row, column] = joined(lanes[_LANES + i], lanes[i])
            column += 1
            if column == columns:
                row, column = row + 1, 0
        left -= here


@program("void(int64[::1], float64[:, :], float64, float64[:, ::1])")
def draw_gammas(keys, a, smallest, out):
    """Write gamma numbers of shape parameters `(queries, count)`, those below the smallest as the smallest."""
    queries, count = a.shape
    for query in range(queries):
        for i in range(count):
            number = gamma_number(keys[query], i, a[query, i])
            out[query, i] = smallest if number < smallest else number  # NaN stays


_WRITTEN = {"BITS": torch.int64, "INTEGERS": torch.int64, "COINS": torch.bool}  # others: float32, or float64 as WIDE
_DRAWS = {
    ("BITS", torch.int64): draw_bits,
    ("INTEGERS", torch.int64): draw_integers,
    ("COINS", torch.bool): draw_coins,
    ("UNIFORM", torch.float32): draw_uniform,
    ("UNIFORM", torch.float64): draw_uniform_wide,
    ("NORMAL", torch.float32): draw_normal,
    ("NORMAL", torch.float64): draw_normal_wide,
    ("EXPONENTIAL", torch.float32): draw_exponential,
    ("EXPONENTIAL", torch.float64): draw_exponential_wide,
}


def usable(*tensors: Tensor) -> bool:
    """Return whether the programs support these tensors."""
    return fold_keys.usable(tensors)


def draw(form: str, key: Tensor, shape: Sequence[int], dtype: torch.dtype, argument: int) -> Tensor:
    """Return numbers of a form, `(*key.shape, *shape)`.

    Args:
        form: `BITS`, `INTEGERS`, `COINS`, `UNIFORM`, `NORMAL` or `EXPONENTIAL`.
        key: `(...)`.
        shape: of one key's numbers.
        dtype: of the result; floating-point numbers of another width than float64 are drawn as float32.
        argument: the threshold of coins, the digits of uniform numbers.
    """
    written = _WRITTEN.get(form) or (torch.float64 if dtype == torch.float64 else torch.float32)
    out = torch.empty((*key.shape, *shape), dtype=written, device="cpu")
    keys = key.reshape(-1).contiguous()
    _DRAWS[form, written](keys.numpy(), argument, out.view(len(keys), math.prod(shape)).numpy())
    return out if written == dtype else out.to(dtype)


def fold(key: Tensor, data: Tensor | int) -> Tensor:
    """Return new keys of keys and int64 numbers that broadcast."""
    if isinstance(data, int):
        data = torch.tensor((data + 2**63) % 2**64 - 2**63, device="cpu")  # its lower 64 bits
    keys, numbers = torch.broadcast_tensors(key, data)
    out = torch.empty(keys.shape, dtype=torch.int64, device="cpu")
    columns = keys.shape[-1] if keys.ndim else 1
    lines = math.prod(keys.shape[:-1]), columns
    fold_keys(*(part.reshape(lines).numpy() for part in (keys, numbers, out)))
    return out


def gamma(keys: Tensor, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gamma numbers of keys `(Q,)` and shape parameters `(Q, n)` in float64, as `random.philox.gamma` does."""
    out = torch.empty(a.shape, dtype=torch.float64, device="cpu")
    draw_gammas(keys.contiguous().numpy(), a.numpy(), torch.finfo(dtype).tiny, out.numpy())
    return out if dtype == torch.float64 else out.to(dtype)
