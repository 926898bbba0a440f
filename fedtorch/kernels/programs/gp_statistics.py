"""Programs of `fedtorch.kernels.gp_statistics`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kernel_rows(x, inducing, width, height, row, there, column, inputs, points, dims, latents, unit):
    """A tile of V: cov(f(x), g_i(w_j)) of rows x and of columns i J + j."""
    real = column < latents * points
    latent, point = column // points, column % points
    distance = tl.zeros((row.shape[0], column.shape[0]), tl.float64)
    for c in range(dims):
        here = tl.load(x + (unit * inputs + row) * dims + c, mask=there, other=0.0)
        at = tl.load(inducing + point * dims + c, mask=real, other=0.0)
        square = tl.load(width + (unit * latents + latent) * dims + c, mask=real, other=1.0)
        gap = here[:, None] - at[None, :]
        distance += gap * gap / square[None, :]
    size = tl.load(height + unit * latents + latent, mask=real, other=0.0)
    return tl.where(there[:, None] & real[None, :], size[None, :] * tl.exp(-0.5 * distance), 0.0)


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
    inputs,
    points,
    dims,
    latents,
    across,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of V'WV, and its mirror image, of one unit; tiles of the first column sum V'Wy too."""
    tile = tl.program_id(0) % (across * across)
    unit = (tl.program_id(0) // (across * across)).to(tl.int64)
    left, right = tile // across, tile % across
    if right <= left:
        first = left * COLUMNS + tl.arange(0, COLUMNS)
        second = right * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS, COLUMNS), tl.float64)
        told = tl.zeros((COLUMNS,), tl.float64)
        for start in range(0, inputs, ROWS):
            row = start + tl.arange(0, ROWS)
            there = row < inputs
            share = tl.load(weight + unit * inputs + row, mask=there, other=0.0)
            there = there & (share != 0)
            one = kernel_rows(x, inducing, width, height, row, there, first, inputs, points, dims, latents, unit)
            other = kernel_rows(x, inducing, width, height, row, there, second, inputs, points, dims, latents, unit)
            one = one * share[:, None]
            total += tl.dot(tl.trans(one), other, out_dtype=tl.float64)
            response = tl.load(y + unit * inputs + row, mask=there, other=0.0)
            told += tl.sum(one * response[:, None], 0)
        size = latents * points
        base = unit * size
        a, b = first < size, second < size
        inside = a[:, None] & b[None, :]
        tl.store(gram + (base + first[:, None]) * size + second[None, :], total, mask=inside)
        if right < left:
            tl.store(gram + (base + second[None, :]) * size + first[:, None], total, mask=inside)
        else:
            # On the diagonal the two halves are summed in one order.
            whole = (base + second[None, :]) * size + first[:, None]
            tl.store(gram + whole, total, mask=inside & (first[:, None] > second[None, :]))
        if right == 0:
            tl.store(cross + base + first, told, mask=a)
