"""Programs of `fedtorch.programs.glm_steps`; a program trains one client."""

from __future__ import annotations

import triton
import triton.language as tl

GAUSSIAN, BERNOULLI, POISSON = (tl.constexpr(family) for family in range(3))


@triton.jit
def misfit(predictor, response, FAMILY: tl.constexpr):
    """Return (a row's loss, its derivative in the linear predictor)."""
    if FAMILY == GAUSSIAN:
        gap = predictor - response
        loss, slope = gap * gap, 2.0 * gap
    elif FAMILY == BERNOULLI:
        small = tl.exp(-tl.abs(predictor))
        loss = tl.maximum(predictor, 0.0) - predictor * response + tl.log(1.0 + small)
        slope = tl.where(predictor >= 0, 1.0 / (1.0 + small), small / (1.0 + small)) - response
    else:
        rate = tl.exp(predictor)
        loss, slope = rate - response * predictor, rate - response
    return loss, slope


@triton.jit
def rows_of(index, at, many, INDEXED: tl.constexpr):
    """Return (rows of a part of a batch, their mask)."""
    if INDEXED:
        row = tl.load(index + at, mask=at < many, other=-1)
    else:
        row = tl.where(at < many, at, -1).to(tl.int64)
    return row, row >= 0


@triton.jit
def design_of(features, row, here, column, width, known):
    """Return rows of features, with the constant 1 in the column after them if `known`; zeros elsewhere."""
    inside = here[:, None] & known[None, :]
    wanted = inside & (column < width)[None, :]
    loaded = tl.load(features + row[:, None] * width + column[None, :], mask=wanted, other=0.0)
    return tl.where(inside & (column == width)[None, :], 1.0, loaded)


@triton.jit
def linear(
    out,
    losses_out,
    x,
    y,
    count,
    total,
    start,
    index,
    precision,
    shift,
    longest,
    width,
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
    """Return a client's steps of one linear predictor."""
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
    taken = tl.load(total + client)
    rows = x + client * longest * width
    lost = tl.sum(theta * 0, 0)
    if RESIDENT:
        row = tl.arange(0, ROWS)
        here = row < many
        design = design_of(rows, row, here, column, width, known)
        response = tl.load(y + client * longest + row, mask=here, other=0.0)
        share = 1.0 / tl.maximum(many, 1).to(kind)
        for _ in range(taken):
            loss, gap = misfit(tl.sum(design * theta[None, :], 1), response, FAMILY)
            gap = tl.where(here, gap, 0.0)
            lost += tl.sum(tl.where(here, loss, 0.0), 0) * share
            theta -= rate * (tl.sum(design * gap[:, None], 0) * share + (strength * theta - pull))
    else:
        for t in range(taken):
            gradient = theta * 0
            seen, losses = tl.sum(theta * 0, 0), tl.sum(theta * 0, 0)
            for first in range(0, many, ROWS):
                part = index + (client * steps + t) * batch
                row, here = rows_of(part, first + tl.arange(0, ROWS), many, INDEXED)
                design = design_of(rows, row, here, column, width, known)
                response = tl.load(y + client * longest + row, mask=here, other=0.0)
                loss, gap = misfit(tl.sum(design * theta[None, :], 1), response, FAMILY)
                gap = tl.where(here, gap, 0.0)
                losses += tl.sum(tl.where(here, loss, 0.0), 0)
                gradient += tl.sum(design * gap[:, None], 0)
                seen += tl.sum(here.to(kind), 0)
            seen = tl.maximum(seen, 1.0)
            lost += losses / seen
            theta -= rate * (gradient / seen + (strength * theta - pull))
    tl.store(out + client * features + column, theta, mask=known)
    tl.store(losses_out + client, lost / tl.maximum(taken, 1).to(kind))


@triton.jit
def categorical(
    out,
    losses_out,
    x,
    y,
    count,
    total,
    start,
    index,
    precision,
    shift,
    longest,
    width,
    features,
    classes,
    steps,
    batch,
    lr: tl.float64,
    IGNORED: tl.constexpr,
    INDEXED: tl.constexpr,
    PULL: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """Return a client's steps of a linear predictor per class, `(features, classes)`, float32."""
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
    taken = tl.load(total + client)
    x_start = x + client * longest * width
    nothing = tl.sum(tl.sum(theta * 0, 1), 0)
    lost = nothing
    for t in range(taken):
        gradient = theta * 0
        rows, seen, losses = nothing, nothing, nothing
        for first in range(0, many, ROWS):
            part = index + (client * steps + t) * batch
            row, here = rows_of(part, first + tl.arange(0, ROWS), many, INDEXED)
            design = design_of(x_start, row, here, column, width, known)
            label = tl.load(y + client * longest + row, mask=here, other=0)
            rows += tl.sum(here.to(tl.float32), 0)
            here = here & (label != IGNORED)
            predictor = tl.dot(design, theta, input_precision="tf32x3")
            predictor = tl.where(real[None, :], predictor, -float("inf"))
            highest = tl.max(predictor, 1)
            weight = tl.exp(predictor - highest[:, None])
            mine = (label[:, None] == level[None, :]).to(tl.float32)
            gap = weight / tl.sum(weight, 1)[:, None] - mine
            gap = tl.where(here[:, None] & real[None, :], gap, 0.0)
            answer = tl.sum(tl.where(mine > 0, predictor, 0.0), 1)
            losses += tl.sum(tl.where(here, highest + tl.log(tl.sum(weight, 1)) - answer, 0.0), 0)
            gradient += tl.dot(tl.trans(design), gap, input_precision="tf32x3")
            seen += tl.sum(here.to(tl.float32), 0)
        nobody = (rows > 0) & (seen == 0)  # the mean over rows that are all left out is NaN, as in torch
        seen = tl.maximum(seen, 1.0)
        lost += tl.where(nobody, float("nan"), losses / seen)
        theta -= rate * (gradient / seen + (strength * theta - pull))
    tl.store(out + place, theta, mask=inside)
    tl.store(losses_out + client, lost / tl.maximum(taken, 1).to(tl.float32))
