"""Programs of `fedtorch.kernels.glm_steps`; a program trains one client."""

from __future__ import annotations

import triton
import triton.language as tl

GAUSSIAN, BERNOULLI, POISSON = (tl.constexpr(family) for family in range(3))


@triton.jit
def misfit(predictor, response, FAMILY: tl.constexpr):
    """The derivative of a row's loss in its linear predictor."""
    if FAMILY == GAUSSIAN:
        found = 2.0 * (predictor - response)
    elif FAMILY == BERNOULLI:
        small = tl.exp(-tl.abs(predictor))
        found = tl.where(predictor >= 0, 1.0 / (1.0 + small), small / (1.0 + small)) - response
    else:
        found = tl.exp(predictor) - response
    return found


@triton.jit
def rows_of(index, at, many, INDEXED: tl.constexpr):
    """(rows of a part of a batch, which of them are there)."""
    if INDEXED:
        row = tl.load(index + at, mask=at < many, other=-1)
    else:
        row = tl.where(at < many, at, -1).to(tl.int64)
    return row, row >= 0


@triton.jit
def linear(
    out,
    x,
    y,
    count,
    start,
    index,
    precision,
    shift,
    longest,
    features,
    steps,
    batch,
    lr: tl.float64,
    FAMILY: tl.constexpr,
    INDEXED: tl.constexpr,
    PULL: tl.constexpr,
    RESIDENT: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """`steps` steps of one linear predictor."""
    client = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, FEATURES)
    known = column < features
    theta = tl.load(start + client * features + column, mask=known, other=0.0)
    kind = theta.dtype
    rate = tl.full((), lr, kind)
    strength, pull = theta * 0, theta * 0
    if PULL:
        strength += tl.load(precision + client)
        pull += tl.load(shift + client * features + column, mask=known, other=0.0)
    many = batch if INDEXED else tl.load(count + client)
    own = x + client * longest * features
    if RESIDENT:
        row = tl.arange(0, ROWS)
        here = row < many
        design = tl.load(
            own + row[:, None] * features + column[None, :], mask=here[:, None] & known[None, :], other=0.0
        )
        response = tl.load(y + client * longest + row, mask=here, other=0.0)
        share = 1.0 / tl.maximum(many, 1).to(kind)
        for _ in range(steps):
            gap = misfit(tl.sum(design * theta[None, :], 1), response, FAMILY)
            gap = tl.where(here, gap, 0.0)
            theta -= rate * (tl.sum(design * gap[:, None], 0) * share + (strength * theta - pull))
    else:
        for t in range(steps):
            gradient = theta * 0
            seen = tl.sum(theta * 0, 0)
            for first in range(0, many, ROWS):
                part = index + (client * steps + t) * batch
                row, here = rows_of(part, first + tl.arange(0, ROWS), many, INDEXED)
                place = row[:, None] * features + column[None, :]
                design = tl.load(own + place, mask=here[:, None] & known[None, :], other=0.0)
                response = tl.load(y + client * longest + row, mask=here, other=0.0)
                gap = misfit(tl.sum(design * theta[None, :], 1), response, FAMILY)
                gap = tl.where(here, gap, 0.0)
                gradient += tl.sum(design * gap[:, None], 0)
                seen += tl.sum(here.to(kind), 0)
            theta -= rate * (gradient / tl.maximum(seen, 1.0) + (strength * theta - pull))
    tl.store(out + client * features + column, theta, mask=known)


@triton.jit
def categorical(
    out,
    x,
    y,
    count,
    start,
    index,
    precision,
    shift,
    longest,
    features,
    classes,
    steps,
    batch,
    lr: tl.float64,
    INDEXED: tl.constexpr,
    PULL: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """`steps` steps of a linear predictor per class, `(features, classes)`, float32."""
    client = tl.program_id(0).to(tl.int64)
    column, level = tl.arange(0, FEATURES), tl.arange(0, CLASSES)
    known, real = column < features, level < classes
    place = client * features * classes + column[:, None] * classes + level[None, :]
    inside = known[:, None] & real[None, :]
    theta = tl.load(start + place, mask=inside, other=0.0)
    rate = tl.full((), lr, tl.float32)
    strength, pull = theta * 0, theta * 0
    if PULL:
        strength += tl.load(precision + client)
        pull += tl.load(shift + place, mask=inside, other=0.0)
    many = batch if INDEXED else tl.load(count + client)
    own = x + client * longest * features
    for t in range(steps):
        gradient = theta * 0
        seen = tl.sum(tl.sum(theta * 0, 1), 0)
        for first in range(0, many, ROWS):
            part = index + (client * steps + t) * batch
            row, here = rows_of(part, first + tl.arange(0, ROWS), many, INDEXED)
            design = tl.load(
                own + row[:, None] * features + column[None, :], mask=here[:, None] & known[None, :], other=0.0
            )
            label = tl.load(y + client * longest + row, mask=here, other=0)
            predictor = tl.dot(design, theta, input_precision="tf32x3")
            predictor = tl.where(real[None, :], predictor, -float("inf"))
            weight = tl.exp(predictor - tl.max(predictor, 1)[:, None])
            gap = weight / tl.sum(weight, 1)[:, None] - (label[:, None] == level[None, :]).to(tl.float32)
            gap = tl.where(here[:, None] & real[None, :], gap, 0.0)
            gradient += tl.dot(tl.trans(design), gap, input_precision="tf32x3")
            seen += tl.sum(here.to(tl.float32), 0)
        theta -= rate * (gradient / tl.maximum(seen, 1.0) + (strength * theta - pull))
    tl.store(out + place, theta, mask=inside)
