"""Triton kernels of `fedtorch.programs.stacked_step`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(clients, size, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile of the stack `(clients, size)`: rows, their mask, flat indices and their mask."""
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < clients
    return row, there, row[:, None] * size + column[None, :], there[:, None] & (column < size)[None, :]


@triton.jit
def pulled(gradient, value, precision, shift, row, there, place, mask, PULL: tl.constexpr):
    """Add the gradient of λ/2 ‖x‖² − ⟨h, x⟩ to gradients."""
    if PULL:
        strength = tl.load(precision + row, mask=there, other=0.0)[:, None]
        gradient = gradient + (strength * value - tl.load(shift + place, mask=mask, other=0.0))
    return gradient


@triton.jit
def cast(number, kind: tl.constexpr):
    """Return a float64 scalar as a tensor; in the interpreter it is a Python number."""
    return tl.full((), number, kind)


@triton.jit
def squares(
    out,
    parameter,
    gradient,
    precision,
    shift,
    clients,
    size,
    across,
    PULL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the sums of squares of a tile's gradients, one per row of the tile, `(clients, across)`."""
    row, there, place, mask = tile_of(clients, size, across, ROWS, COLUMNS)
    value = tl.load(parameter + place, mask=mask, other=0.0)
    squared = tl.load(gradient + place, mask=mask, other=0.0)
    squared = pulled(squared, value, precision, shift, row, there, place, mask, PULL)
    squared = tl.where(mask, squared, 0.0)
    tl.store(out + row * across + tl.program_id(0) % across, tl.sum(squared * squared, 1), mask=there)


@triton.jit
def sgd(
    parameter,
    gradient,
    buffer,
    taken,
    precision,
    shift,
    share,
    clients,
    size,
    across,
    lr: tl.float64,
    held,
    momentum: tl.float64,
    dampening: tl.float64,
    decay: tl.float64,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    PULL: tl.constexpr,
    CLIP: tl.constexpr,
    RATE_HELD: tl.constexpr,
    TAKEN_HELD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Take a step of `torch.optim.SGD`."""
    row, there, place, mask = tile_of(clients, size, across, ROWS, COLUMNS)
    value = tl.load(parameter + place, mask=mask, other=0.0)
    kind = value.dtype
    step = pulled(
        tl.load(gradient + place, mask=mask, other=0.0), value, precision, shift, row, there, place, mask, PULL
    )
    if CLIP:
        step = step * tl.load(share + row, mask=there, other=0.0)[:, None]
    step = step + value * cast(decay, kind)
    if MOMENTUM:
        if TAKEN_HELD:
            begun = tl.load(taken + row, mask=there, other=0)[:, None] > 0
        else:
            begun = (taken + row * 0)[:, None] > 0
        before = tl.load(buffer + place, mask=mask, other=0.0)
        after = tl.where(begun, before * cast(momentum, kind) + step * cast(1.0 - dampening, kind), step)
        tl.store(buffer + place, after, mask=mask)
        step = step + after * cast(momentum, kind) if NESTEROV else after
    rate = tl.load(held).to(kind) if RATE_HELD else cast(lr, kind)
    tl.store(parameter + place, value - step * rate, mask=mask)


@triton.jit
def adam(
    parameter,
    gradient,
    first,
    second,
    taken,
    precision,
    shift,
    share,
    clients,
    size,
    across,
    lr: tl.float64,
    held,
    beta_one: tl.float64,
    beta_two: tl.float64,
    log_one: tl.float64,
    log_two: tl.float64,
    eps: tl.float64,
    decay: tl.float64,
    DECOUPLED: tl.constexpr,
    PULL: tl.constexpr,
    CLIP: tl.constexpr,
    RATE_HELD: tl.constexpr,
    TAKEN_HELD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Take a step of `torch.optim.Adam`, or of `AdamW` where the decay is decoupled."""
    row, there, place, mask = tile_of(clients, size, across, ROWS, COLUMNS)
    value = tl.load(parameter + place, mask=mask, other=0.0)
    kind = value.dtype
    step = pulled(
        tl.load(gradient + place, mask=mask, other=0.0), value, precision, shift, row, there, place, mask, PULL
    )
    if CLIP:
        step = step * tl.load(share + row, mask=there, other=0.0)[:, None]
    rate = tl.load(held).to(tl.float64) if RATE_HELD else cast(lr, tl.float64)
    if DECOUPLED:
        value = value * cast(1.0 - rate * decay, kind)
    else:
        step = step + value * cast(decay, kind)
    if TAKEN_HELD:
        count = (tl.load(taken + row, mask=there, other=0) + 1).to(tl.float64)
    else:
        count = (taken + 1 + row * 0).to(tl.float64)
    length = (rate / (1.0 - tl.exp(count * log_one))).to(kind)[:, None]
    spread = tl.sqrt(1.0 - tl.exp(count * log_two)).to(kind)[:, None]
    mean = tl.load(first + place, mask=mask, other=0.0)
    mean = mean + (step - mean) * cast(1.0 - beta_one, kind)
    square = tl.load(second + place, mask=mask, other=0.0)
    square = square * cast(beta_two, kind) + step * step * cast(1.0 - beta_two, kind)
    tl.store(first + place, mean, mask=mask)
    tl.store(second + place, square, mask=mask)
    if kind == tl.float32:
        move = tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), spread) + cast(eps, kind))
    else:
        move = mean / (tl.sqrt(square) / spread + cast(eps, kind))
    tl.store(parameter + place, value - move * length, mask=mask)
