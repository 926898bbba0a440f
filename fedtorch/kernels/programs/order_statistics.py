"""Programs of `fedtorch.kernels.order_statistics`; a program has all messages of some coordinates in registers."""

from __future__ import annotations

import triton
import triton.language as tl

MIDDLE = tl.constexpr(1e-12)  # how near to one half a summed weight counts as one half


@triton.jit
def ordered(value, LARGEST: tl.constexpr):
    """Return integers in the order of the values, NaN last."""
    if value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & LARGEST)
    else:
        bits = value.to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) & LARGEST)
    return tl.where(value == value, key, LARGEST)


@triton.jit
def number(key, LARGEST: tl.constexpr):
    """Return the inverse of `ordered`, in float64."""
    if key.dtype == tl.int32:
        bits = key ^ ((key >> 31) & LARGEST)
        found = bits.to(tl.float32, bitcast=True).to(tl.float64)
    else:
        bits = key ^ ((key >> 63) & LARGEST)
        found = bits.to(tl.float64, bitcast=True)
    return found


@triton.jit
def weight_up_to(keys, share, key):
    """Return the weight of what is not above, per column."""
    return tl.sum(tl.where(keys <= key[None, :], share[:, None], 0.0), 0)


@triton.jit
def least_above(keys, share, target, STRICT: tl.constexpr, LARGEST: tl.constexpr, BITS: tl.constexpr):
    """Return the smallest integer up to which the weight reaches, or exceeds, the target, by bisection per column."""
    high = tl.max(keys, 0) * 0 + LARGEST
    low = -high - 1
    for _ in range(BITS):
        middle = (low & high) + ((low ^ high) >> 1)
        weight = weight_up_to(keys, share, middle)
        reached = weight > target if STRICT else weight >= target
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle + 1)
        low = tl.minimum(low, high)
    return high


@triton.jit
def loaded(value, share, messages, size, LARGEST: tl.constexpr, MESSAGES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (keys, weights, columns, which of them are there)."""
    row = tl.arange(0, MESSAGES)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = row < messages, column < size
    found = tl.load(
        value + row[:, None].to(tl.int64) * size + column[None, :], mask=there[:, None] & inside[None, :], other=0.0
    )
    keys = tl.where(there[:, None], ordered(found, LARGEST), LARGEST)
    return keys, tl.load(share + row, mask=there, other=0.0), column, inside


@triton.jit
def median(
    out,
    value,
    share,
    messages,
    size,
    LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    MESSAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the middle between the two values that halve the weight."""
    keys, weights, column, inside = loaded(value, share, messages, size, LARGEST, MESSAGES, COLUMNS)
    below, above = tl.full((1,), 0.5 - MIDDLE, tl.float64), tl.full((1,), 0.5 + MIDDLE, tl.float64)
    low = least_above(keys, weights, below, False, LARGEST, BITS)
    high = low
    short = weight_up_to(keys, weights, high) < above
    while tl.max(short.to(tl.int32), 0) > 0:
        following = tl.min(tl.where(keys > high[None, :], keys, LARGEST), 0)
        high = tl.where(short, following, high)
        short = short & (high < LARGEST) & (weight_up_to(keys, weights, high) < above)
    tl.store(out + column, 0.5 * (number(low, LARGEST) + number(high, LARGEST)), mask=inside)


@triton.jit
def kept(keys, weights, key, fraction):
    """Return the weight of one value between the trimmed ends."""
    until = weight_up_to(keys, weights, key)
    before = weight_up_to(keys, weights, key - 1)
    return tl.maximum(tl.minimum(until, 1.0 - fraction) - tl.maximum(before, fraction), 0.0)


@triton.jit
def trimmed_mean(
    out,
    value,
    share,
    messages,
    size,
    fraction: tl.float64,
    LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    MESSAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the mean without the lowest and the highest `fraction` of the weight."""
    keys, weights, column, inside = loaded(value, share, messages, size, LARGEST, MESSAGES, COLUMNS)
    fraction = tl.full((1,), fraction, tl.float64)  # beside a tensor, plain numbers are float32 before Triton 3.9
    low = least_above(keys, weights, fraction, True, LARGEST, BITS)
    top = tl.max(tl.where(tl.arange(0, MESSAGES)[:, None] < messages, keys, -LARGEST - 1), 0)
    high = tl.minimum(least_above(keys, weights, 1.0 - fraction, False, LARGEST, BITS), top)
    between = (keys > low[None, :]) & (keys < high[None, :]) & (weights > 0)[:, None]
    total = tl.sum(tl.where(between, weights[:, None] * number(keys, LARGEST), 0.0), 0)
    first, last = kept(keys, weights, low, fraction), kept(keys, weights, high, fraction)
    total += tl.where(first > 0, first * number(low, LARGEST), 0.0)
    total += tl.where((high > low) & (last > 0), last * number(high, LARGEST), 0.0)
    tl.store(out + column, total / (1.0 - 2.0 * fraction), mask=inside)
