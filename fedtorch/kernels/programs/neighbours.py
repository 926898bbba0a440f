"""Programs of `fedtorch.kernels.neighbours`."""

from __future__ import annotations

import triton
import triton.language as tl

EDGES = tl.constexpr(4)  # whose rows are under way at a time


@triton.jit
def gather(
    out,
    rows,
    columns,
    values,
    starts,
    lengths,
    targets,
    segments,
    width,
    SEGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sum over segments of edges, each into its row of `out`; segments of similar length are side by side."""
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
    tl.store(out + place, total, mask=mask)


@triton.jit
def join(out, split, firsts, pieces, width, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sum of a node's segments, in their order."""
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
    tl.store(out + place, total, mask=mask)
