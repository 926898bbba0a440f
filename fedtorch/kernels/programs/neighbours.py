"""Programs of `fedtorch.kernels.neighbours`."""

from __future__ import annotations

import triton
import triton.language as tl

EDGES = tl.constexpr(4)  # whose rows are under way at a time


@triton.jit
def moved(total, own, gradient, degrees, row, there, place, mask, lr: tl.float64, strength: tl.float64):
    """w − η (g + s (d w − Σ_j A_ij w_j))."""
    kind = total.dtype
    value = tl.load(own + place, mask=mask, other=0.0).to(kind)
    slope = tl.load(gradient + place, mask=mask, other=0.0).to(kind)
    degree = tl.load(degrees + row, mask=there, other=0.0).to(kind)[:, None]
    slope += tl.full((), strength, kind) * (degree * value - total)
    return value - tl.full((), lr, kind) * slope


@triton.jit
def gather(
    out,
    rows,
    columns,
    values,
    starts,
    lengths,
    targets,
    gradient,
    degrees,
    segments,
    nodes,
    width,
    lr: tl.float64,
    strength: tl.float64,
    STEP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sums over segments of edges, each into its row of `out`; segments of similar length are side by side."""
    segment = tl.program_id(0).to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)
    there = segment < segments
    start = tl.load(starts + segment, mask=there, other=0)
    length = tl.load(lengths + segment, mask=there, other=0)
    target = tl.load(targets + segment, mask=there, other=0)
    column = tl.arange(0, WIDTH)
    total = tl.zeros((SEGMENTS, WIDTH), values.dtype.element_ty)
    for first in range(0, tl.max(length, 0), EDGES):
        edge = first + tl.arange(0, EDGES)[None, :]
        on = edge < length[:, None]
        place = start[:, None] + edge
        source = tl.load(columns + place, mask=on, other=0).to(tl.int64)
        weight = tl.load(values + place, mask=on, other=0.0)
        at = source[:, :, None] * width + column[None, None, :]
        told = tl.load(rows + at, mask=on[:, :, None] & (column < width)[None, None, :], other=0.0)
        total += tl.sum(weight[:, :, None] * told.to(total.dtype), 1)
    place = target[:, None] * width + column[None, :]
    mask = there[:, None] & (column < width)[None, :]
    if STEP:
        whole = there & (target < nodes)
        inside = mask & whole[:, None]
        total = tl.where(
            inside, moved(total, rows, gradient, degrees, target, whole, place, inside, lr, strength), total
        )
    tl.store(out + place, total, mask=mask)


@triton.jit
def join(
    out,
    rows,
    split,
    firsts,
    pieces,
    gradient,
    degrees,
    width,
    lr: tl.float64,
    strength: tl.float64,
    STEP: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The sum of a node's segments, in their order."""
    which = tl.program_id(0) + tl.arange(0, 1)
    row, first = tl.load(split + which), tl.load(firsts + which)
    many = tl.max(tl.load(pieces + which), 0)
    column = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((1, WIDTH), out.dtype.element_ty)
    for start in range(0, many, PIECES):
        piece = start + tl.arange(0, PIECES)[:, None]
        part = tl.load(out + (first + piece) * width + column, mask=(piece < many) & (column < width), other=0.0)
        total += tl.sum(part, 0)[None, :]
    place, mask = row[:, None] * width + column, column < width
    if STEP:
        total = moved(total, rows, gradient, degrees, row, row >= 0, place, mask, lr, strength)
    tl.store(out + place, total, mask=mask)
