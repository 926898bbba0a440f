r"""The sum over the neighbours of all nodes, :math:`\sum_j A_{ij} w_j`.

A row's edges are cut into segments of at most 64, so that a hub's do not wait for one program; segments of similar
length are summed side by side, and those of one node are added in their order, so that the bits are the same each time.
The `SegmentPlan` of it depends on the network alone, and a matrix keeps it.

Source: the neighbour sum of GTV minimisation, Jung, "Clustered federated learning via generalized total variation
minimization", IEEE TSP 71, 2023; segments as in Merrill and Garland, "Merge-based parallel sparse matrix–vector
multiplication", SC 2016. Bound: bandwidth, a column index, a weight and a row of w an edge, less what the cache has
of w; the baseline is cuSPARSE with a cached plan. Not measured yet.

Differentiable in w, as A is symmetric: the derivative is the same sum. Programs know float32 and float64 and rows of
up to 64 numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.dispatch.choice import FLOATS, program
from fedtorch.dispatch.launch import launch, power_of_two

MOST = 64  # numbers of a row
_SEGMENT = 64  # edges
_TILE = 256  # numbers of the sums of a program


class SegmentPlan(NamedTuple):
    """The segments of a network's edges."""

    starts: Tensor  # (S,) first edges, int64
    lengths: Tensor  # (S,) int32, falling
    targets: Tensor  # (S,) int64, the row of a node with one segment, n, n + 1, … for the others
    split: Tensor  # (R,) nodes with several segments, int64
    firsts: Tensor  # (R,) the first of their targets
    pieces: Tensor  # (R,) int32, how many they have


def plan(matrix: Tensor) -> SegmentPlan:
    """Return the plan of a sparse CSR matrix, made once for as long as it is there."""
    kept: dict[str, SegmentPlan] = matrix.__dict__
    if "segments" not in kept:
        kept["segments"] = _planned(matrix)
    return kept["segments"]


def _planned(matrix: Tensor) -> SegmentPlan:
    first = matrix.crow_indices().to(torch.int64)
    counts, nodes = first[1:] - first[:-1], len(first) - 1
    pieces = (-(-counts // _SEGMENT)).clamp(min=1)
    row = torch.arange(nodes, device=first.device).repeat_interleave(pieces)
    within = torch.arange(len(row), device=first.device) - (pieces.cumsum(0) - pieces)[row]
    several = pieces > 1
    slot = nodes + several[row].cumsum(0) - 1
    targets = torch.where(several[row], slot, row)
    lengths = (counts[row] - within * _SEGMENT).clamp(max=_SEGMENT)
    order = lengths.argsort(descending=True, stable=True)
    split = several.nonzero()[:, 0]
    starts = first[:-1][row] + within * _SEGMENT
    begin = targets[(pieces.cumsum(0) - pieces)[split]] if len(split) else split
    return SegmentPlan(starts[order], lengths[order].int(), targets[order], split, begin, pieces[split].int())


def neighbours(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return Σ_j A_ij w_j, `(n, d)` in the dtype of A.

    Args:
        matrix: A, symmetric, sparse CSR `(n, n)`.
        rows: w, `(n, d)`.
    """
    if _programs(matrix, rows) is None:
        return matrix @ rows.to(matrix.dtype)
    return _Sum.apply(matrix, rows)


def _programs(matrix: Tensor, rows: Tensor) -> Any:
    fits = 0 < rows.shape[1] <= MOST and rows.dtype in FLOATS
    return program(
        "fedtorch.kernels.programs.neighbours", (matrix.values(), rows), FLOATS, fits=fits, differentiable=True
    )


class _Sum(torch.autograd.Function):
    """The sum and its derivative, which is the same sum."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rows: Tensor) -> Tensor:
        ctx.matrix, ctx.dtype = matrix, rows.dtype
        return _launched(matrix, rows.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = neighbours(ctx.matrix, gradients[0].contiguous())
        return None, found.to(ctx.dtype)


def _launched(matrix: Tensor, rows: Tensor) -> Tensor:
    programs, (nodes, width), segments = _programs(matrix, rows), rows.shape, plan(matrix)
    values, rows = matrix.values(), rows.contiguous()
    partial = int(segments.targets.numel()) - nodes + int(segments.split.numel())
    out = torch.empty(nodes + partial, width, dtype=values.dtype, device=values.device)
    across = power_of_two(width)
    side = max(_TILE // across, 1)
    count = len(segments.starts)
    tensors = (out, rows, matrix.col_indices(), values, *segments[:3])
    launch(programs.gather, -(-count // side), *tensors, count, width, SEGMENTS=side, WIDTH=across)
    launch(programs.join, len(segments.split), out, *segments[3:], width, PIECES=side, WIDTH=across)
    return out[:nodes]
