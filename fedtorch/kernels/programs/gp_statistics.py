"""Programs of `fedtorch.kernels.gp_statistics`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def white_rows(x, inducing, width, height, whiten, row, there, point, latent, points, dims):
    """Return rows of B of one latent process: cov(f(x), g(w)) of rows x, times its W'; all of one unit."""
    real = point < points
    distance = tl.zeros((row.shape[0], point.shape[0]), tl.float64)
    for c in range(dims):
        here = tl.load(x + row * dims + c, mask=there, other=0.0)
        at = tl.load(inducing + point * dims + c, mask=real, other=0.0)
        gap = here[:, None] - at[None, :]
        distance += gap * gap / tl.load(width + latent * dims + c)
    size = tl.load(height + latent)
    found = tl.where(there[:, None] & real[None, :], size * tl.exp(-0.5 * distance), 0.0)
    place = (latent * points + point[None, :]) * points + point[:, None]
    turned = tl.load(whiten + place, mask=real[:, None] & real[None, :], other=0.0)
    return tl.dot(found, turned, out_dtype=tl.float64)


@triton.jit
def statistics(
    gram,
    cross,
    x,
    y,
    weight,
    inducing,
    width,
    height,
    whiten,
    inputs,
    points,
    dims,
    latents,
    inducing_step,
    whiten_step,
    ROWS: tl.constexpr,
    POINTS: tl.constexpr,
):
    """Compute the block of two latent processes in B'WB of one unit, and its mirror image; and B'Wy."""
    pair = tl.program_id(0) % (latents * latents)
    unit = (tl.program_id(0) // (latents * latents)).to(tl.int64)
    left, right = pair // latents, pair % latents
    if right <= left:
        point = tl.arange(0, POINTS)
        total = tl.zeros((POINTS, POINTS), tl.float64)
        told = tl.zeros((POINTS,), tl.float64)
        own, points_of, turn_of = x + unit * inputs * dims, inducing + unit * inducing_step, whiten + unit * whiten_step
        widths, heights = width + unit * latents * dims, height + unit * latents
        for start in range(0, inputs, ROWS):
            row = start + tl.arange(0, ROWS)
            share = tl.load(weight + unit * inputs + row, mask=row < inputs, other=0.0)
            there = (row < inputs) & (share != 0)
            other = white_rows(own, points_of, widths, heights, turn_of, row, there, point, right, points, dims)
            if right == left:
                one = other * share[:, None]
            else:
                one = white_rows(own, points_of, widths, heights, turn_of, row, there, point, left, points, dims)
                one = one * share[:, None]
            total += tl.dot(tl.trans(one), other, out_dtype=tl.float64)
            response = tl.load(y + unit * inputs + row, mask=there, other=0.0)
            told += tl.sum(one * response[:, None], 0)
        size = latents * points
        known = point < points
        first, second = left * points + point, right * points + point
        inside = known[:, None] & known[None, :]
        base = unit * size
        if right == left:  # the lower half, twice, so that both are summed in one order
            lower = inside & (point[:, None] >= point[None, :])
            tl.store(gram + (base + first[:, None]) * size + second[None, :], total, mask=lower)
            tl.store(gram + (base + second[None, :]) * size + first[:, None], total, mask=lower)
        else:
            tl.store(gram + (base + first[:, None]) * size + second[None, :], total, mask=inside)
            tl.store(gram + (base + second[None, :]) * size + first[:, None], total, mask=inside)
        if right == 0:
            tl.store(cross + base + first, told, mask=known)
