"""Programs of `fedtorch.models.gibbs.gibbs_sweeps`; a program has some problems in registers for all sweeps."""

from __future__ import annotations

import triton
import triton.language as tl

from fedtorch.programs.triton.philox import gammas, new_key, wide_exponential, wide_normal


@triton.jit
def eliminated(matrix, right, prior, z, index, size):
    """Return a draw of N(A⁻¹ b, A⁻¹): U δ = c + √u z, of A `(B, P, P)`, b, z and the prior's part of A `(B, P)`.

    A pivot is at least the prior's part of it; if rounding makes it smaller, as for dependent columns, it is set to
    that part, and the rest of its row to zero.
    """
    for j in range(size):
        at = index == j
        row = tl.sum(tl.where(at[None, :, None], matrix, 0.0), 1)
        pivot = tl.sum(tl.where(at[None, :], row, 0.0), 1)
        pivot_right = tl.sum(tl.where(at[None, :], right, 0.0), 1)
        least = tl.sum(tl.where(at[None, :], prior, 0.0), 1)
        short = pivot < least
        pivot, pivot_right = tl.where(short, least, pivot), tl.where(short, 0.0, pivot_right)
        row = tl.where(at[None, :], pivot[:, None], tl.where(short[:, None], 0.0, row))
        matrix = tl.where(at[None, :, None], row[:, None, :], matrix)
        right = tl.where(at[None, :], pivot_right[:, None], right)
        factor = tl.where((index > j)[None, :], row / pivot[:, None], 0.0)
        matrix -= factor[:, :, None] * row[:, None, :]
        right -= factor * pivot_right[:, None]
    same = index[:, None] == index[None, :]
    value = right + tl.sqrt(tl.sum(tl.where(same[None, :, :], matrix, 0.0), 2)) * z
    for step in range(size):
        j = size - 1 - step
        at = index == j
        column = tl.sum(tl.where(at[None, None, :], matrix, 0.0), 2)
        pivot = tl.sum(tl.where(at[None, :], column, 0.0), 1)
        solution = tl.sum(tl.where(at[None, :], value, 0.0), 1) / pivot
        rest = tl.where((index < j)[None, :], value - column * solution[:, None], value)
        value = tl.where(at[None, :], solution[:, None], rest)
    return value


@triton.jit
def horseshoe(
    delta_out,
    w_out,
    u_out,
    noise_out,
    gram,
    estimate,
    least,
    degrees,
    centre,
    shared,
    scale,
    w_in,
    u_in,
    noise_in,
    keys,
    problems,
    chains,
    size,
    sweeps,
    BATCH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Do all sweeps of some problems; the `chains` problems of one client are adjacent."""
    problem = tl.program_id(0).to(tl.int64) * BATCH + tl.arange(0, BATCH)
    index = tl.arange(0, SIZE)
    there, real = problem < problems, index < size
    client = problem // chains
    inside = there[:, None] & real[None, :]
    mine, theirs = problem[:, None] * size + index[None, :], client[:, None] * size + index[None, :]
    whole = inside[:, :, None] & real[None, None, :]
    products = tl.load(gram + theirs[:, :, None] * size + index[None, None, :], mask=whole, other=0.0)
    gap = tl.load(estimate + theirs, mask=inside, other=0.0) - tl.load(centre + mine, mask=inside, other=0.0)
    right = tl.sum(products * gap[:, None, :], 2)
    rest = tl.load(least + client, mask=there, other=0.0)
    shape = tl.load(degrees + client, mask=there, other=1.0)
    precision = tl.load(shared + mine, mask=inside, other=1.0)
    base = tl.load(scale + problem, mask=there, other=1.0)
    w = tl.load(w_in + mine, mask=inside, other=1.0)
    u = tl.load(u_in + mine, mask=inside, other=1.0)
    noise = tl.load(noise_in + problem, mask=there, other=1.0)
    key = tl.load(keys + problem, mask=there, other=0)
    for_normals, for_noise, for_mixing = new_key(key, 0), new_key(key, 1), new_key(key, 2)
    for_first, for_second = new_key(for_mixing, 0), new_key(for_mixing, 1)
    same = index[:, None] == index[None, :]
    delta = w * 0
    zero = problem[:, None] * 0
    for s in range(sweeps):
        element = zero + (s * size + index)[None, :]
        z = tl.where(inside, wide_normal(for_normals[:, None] + element * 0, element), 0.0)
        prior = w * precision
        matrix = products * noise[:, None, None] + tl.where(same[None, :, :], prior[:, :, None], 0.0)
        delta = tl.where(inside, eliminated(matrix, right * noise[:, None], prior, z, index, size), 0.0)
        error = delta - tl.where(inside, gap, 0.0)
        squares = rest + tl.sum(tl.sum(products * error[:, None, :], 2) * error, 1)
        w = wide_exponential(for_first[:, None] + element * 0, element) / (u + delta * delta * precision / 2)
        u = wide_exponential(for_second[:, None] + element * 0, element) / (w + 1.0)
        noise = gammas(for_noise, problem * 0 + s, shape, there) / (base + squares / 2)
    tl.store(delta_out + mine, delta, mask=inside)
    tl.store(w_out + mine, w, mask=inside)
    tl.store(u_out + mine, u, mask=inside)
    tl.store(noise_out + problem, noise, mask=there)
