"""Exact sums in limbs on the CPU: the numbers of `fedtorch.exact`, to the bit.

Sums are whole multiples of 2⁻¹⁶⁰ in digits of 32 bits, so that a product of two digits plus a carry fits into a word of
64. Sums below 2³⁸⁴ in magnitude have products of three below 2¹¹⁵².
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
import torch
from numpy import float64, int64, uint64
from torch import Tensor

from fedtorch.programs.engine import program

_LIMBS, _SCALE = 10, 160
_DIGITS = 40
_MASK, _BITS = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
_LARGEST = 2.0**148
_SPLIT = 2.0**27 + 1


@program("void(float64[::1], boolean, float64[:, ::1])")
def write_limbs(values, add, out):
    """Write the limbs of values `(n,)` to `out`, `(n, LIMBS)`, or add them to it."""
    if not add:
        out[:] = 0.0
    for i in range(len(values)):
        value = values[i]
        if not abs(value) < _LARGEST:
            out[i] = math.nan
        elif value != 0.0:
            bits = float64(value).view(uint64)
            exponent = int64((bits >> uint64(52)) & uint64(0x7FF))
            significand = bits & uint64(0xFFFFFFFFFFFFF)
            if exponent > 0:
                significand |= uint64(1) << uint64(52)
            position = max(exponent, 1) - 1075 + _SCALE  # of its last bit
            if position < 0:
                significand = significand >> uint64(-position) if position >= -54 else uint64(0)
                position = 0
            place, shift = position // 32, uint64(position % 32)
            low, high = (significand & _MASK) << shift, (significand >> _BITS) << shift
            out[i, place] += math.copysign(float64(low & _MASK), value)
            out[i, place + 1] += math.copysign(float64((low >> _BITS) + (high & _MASK)), value)
            if place + 2 < _LIMBS:
                out[i, place + 2] += math.copysign(float64(high >> _BITS), value)


@program(inline=True)
def split(value):
    """Return a number as the sum of two with 26 bits each."""
    scaled = value * _SPLIT
    high = scaled - (scaled - value)
    return high, value - high


@program(inline=True)
def product(first, second):
    """Return the rounded product and its rounding error (Dekker 1971, Mul12 after Veltkamp's splitting)."""
    rounded = first * second
    a, b = split(first)
    c, d = split(second)
    return rounded, ((a * c - rounded) + a * d + b * c) + b * d


@program("void(float64[::1], float64[::1], float64[:, ::1], float64[:, ::1])")
def write_products(w, x, first, second):
    """Write w·x as two numbers of each, and w·x² as four, without rounding."""
    for i in range(len(w)):
        first[0, i], first[1, i] = product(w[i], x[i])
        second[0, i], second[1, i] = product(first[0, i], x[i])
        second[2, i], second[3, i] = product(first[1, i], x[i])


@program()
def read(limbs, out):
    """Read a sum as digits in two's complement, lowest first; return whether its limbs are finite."""
    carry = int64(0)
    for i in range(_LIMBS):
        if not abs(limbs[i]) < math.inf:
            return False
        carry += int64(limbs[i])
        out[i] = uint64(carry & 0xFFFFFFFF)
        carry >>= 32
    for i in range(_LIMBS, len(out)):
        out[i] = uint64(carry & 0xFFFFFFFF)
        carry >>= 32
    return True


@program(inline=True)
def negative(number):
    """Return whether a number in two's complement is."""
    return number[len(number) - 1] >> uint64(31) != uint64(0)


@program()
def magnitude(number, out):
    """Write |number| and return how many digits it has."""
    turned, carry = (_MASK, uint64(1)) if negative(number) else (uint64(0), uint64(0))
    count = 0
    for i in range(len(number)):
        digit = (number[i] ^ turned) + carry
        out[i] = digit & _MASK
        carry = digit >> _BITS
        if out[i] != 0:
            count = i + 1
    return count


@program()
def subtract(a, b, out):
    """Write a − b, of as many digits each; it may be written over either."""
    borrow = uint64(0)
    for i in range(len(out)):
        digit = a[i] - b[i] - borrow
        out[i] = digit & _MASK
        borrow = (digit >> _BITS) & uint64(1)


@program()
def multiply(a, b, out, one, other):
    """Write a · b; `one` and `other` are scratch memory."""
    count, beyond = magnitude(a, one), magnitude(b, other)
    out[:] = 0
    for i in range(count):
        carry = uint64(0)
        for j in range(beyond):
            digit = one[i] * other[j] + out[i + j] + carry
            out[i + j] = digit & _MASK
            carry = digit >> _BITS
        out[i + beyond] = carry
    if negative(a) != negative(b):
        carry = uint64(1)
        for i in range(len(out)):
            digit = (out[i] ^ _MASK) + carry
            out[i] = digit & _MASK
            carry = digit >> _BITS


@program()
def shift(a, bits, out):
    """Write a · 2^bits, which may have more digits."""
    places, rest, beyond = bits // 32, uint64(bits % 32), _MASK if negative(a) else uint64(0)
    below = uint64(0)
    for i in range(len(out)):
        at = i - places
        digit = uint64(0) if at < 0 else a[at] if at < len(a) else beyond
        out[i] = ((digit << rest) | (below >> (_BITS - rest))) & _MASK
        below = digit


@program()
def nearest(number, scale, room):
    """Return the float64 number nearest to a whole number over 2^scale."""
    count = magnitude(number, room)
    if count == 0:
        return 0.0
    top = uint64(0)  # the 64 bits from the highest digit on
    for i in range(2):
        top = top << _BITS
        if count - 1 - i >= 0:
            top |= room[count - 1 - i]
    below = room[count - 3] if count > 2 else uint64(0)
    more = False
    for i in range(count - 3):
        more |= room[i] != 0
    empty = 0
    while top >> uint64(63) == 0:
        top = top << uint64(1) | below >> uint64(31)
        below = (below << uint64(1)) & _MASK
        empty += 1
    if more or below != 0:  # the last of the 64 bits is set if there are more
        top |= uint64(1)
    absolute = math.ldexp(float64(top), 32 * (count - 2) - empty - scale)
    return -absolute if negative(number) else absolute


@program("boolean(float64[:, ::1], float64[::1])")
def write_values(sums, out):
    """Write the values of sums `(n, LIMBS)`; return whether all are finite."""
    number, room = numpy.empty(_LIMBS + 2, uint64), numpy.empty(_LIMBS + 2, uint64)
    for i in range(len(sums)):
        if not read(sums[i], number):
            return False
        out[i] = nearest(number, _SCALE, room)
    return True


@program("boolean(float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1])")
def write_about(zeroth, first, second, centre, out):
    """Write Σ w, Σ w (x − c) and Σ w (x − c)², `(3, n)`, given Σ w, Σ w x and Σ w x²; return whether all are finite."""
    few, many = numpy.empty((4, _LIMBS + 2), uint64), numpy.empty((5, _DIGITS), uint64)
    w, wx, wxx, c = few[0], few[1], few[2], few[3]
    cw, gap, rest, one, other = many[0], many[1], many[2], many[3], many[4]
    for i in range(len(zeroth)):
        fine = read(zeroth[i], w) and read(first[i], wx) and read(second[i], wxx) and read(centre[i], c)
        if not fine:
            return False
        multiply(c, w, cw, one, other)
        shift(wx, _SCALE, gap)
        subtract(gap, cw, gap)  # in units of 2⁻³²⁰
        out[0, i], out[1, i] = nearest(w, _SCALE, one), nearest(gap, 2 * _SCALE, one)
        shift(wx, _SCALE + 1, rest)
        subtract(rest, cw, rest)
        multiply(c, rest, gap, one, other)
        shift(wxx, 2 * _SCALE, rest)
        subtract(rest, gap, rest)  # in units of 2⁻⁴⁸⁰
        out[2, i] = nearest(rest, 3 * _SCALE, one)
    return True


def usable(tensors: Sequence[Tensor]) -> bool:
    """Return whether the programs support these tensors."""
    return write_limbs.usable(tensors, torch.float64)


def limbs(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of terms of one shape in limbs, `(..., LIMBS)`."""
    out = torch.empty((*terms[0].shape, _LIMBS), dtype=torch.float64, device="cpu")
    for number, term in enumerate(terms):
        write_limbs(_flat(term), number > 0, _flat(out, _LIMBS))
    return out


def products(weight: Tensor, value: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return w·x and w·x² as terms, of tensors of one shape."""
    first = torch.empty((2, *weight.shape), dtype=torch.float64, device="cpu")
    second = torch.empty((4, *weight.shape), dtype=torch.float64, device="cpu")
    write_products(
        _flat(weight), _flat(value), *(out.view(len(out), weight.numel()).numpy() for out in (first, second))
    )
    return first.unbind(), second.unbind()


def values(total: Tensor) -> Tensor | None:
    """Return the values of sums, None where one is not finite."""
    out = torch.empty(total.shape[:-1], dtype=torch.float64, device="cpu")
    return out if write_values(_flat(total, _LIMBS), _flat(out)) else None


def about(totals: Sequence[Tensor]) -> Tensor | None:
    """Return the three moments `(3, ...)`, None where a sum is not finite."""
    out = torch.empty((3, *totals[0].shape[:-1]), dtype=torch.float64, device="cpu")
    sums = [_flat(total, _LIMBS) for total in totals]
    return out if write_about(*sums, out.view(3, len(sums[0])).numpy()) else None


def _flat(tensor: Tensor, *columns: int) -> numpy.ndarray:
    return tensor.detach().reshape(-1, *columns).contiguous().numpy()
