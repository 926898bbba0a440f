"""Draws of the global variables of a Gibbs sampler on the CPU, one chain after another; see `fedtorch.models.gibbs`.

Their references, in torch, are with the formulas: `_interweaving.linear` and `move`, `_levels.move`, `_scales.draw` and
`global_priors.spike_and_slab`, all in float64. There are few chains and few coefficients: the gain is to save the calls
of some hundred torch operations for a few numbers each. Random numbers are those of `fedtorch.random` with the same
keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
import torch
from numpy import uint32
from torch import Tensor

from fedtorch.programs.engine import arrays, program
from fedtorch.programs.philox import (
    DRAW,
    exponential,
    folded,
    gamma_number,
    inside,
    logarithm,
    normals,
    whole,
    words_of,
)

POINTS = 32  # of a lattice
_BIG = 2.0**1023


@program()
def _words(key, element):
    """Return the two words of an element."""
    w0, w1, w2, w3 = words_of(key, element // 2, 0, DRAW)
    return (w2, w3) if element % 2 else (w0, w1)


@program()
def _uniform(key, element):
    first, second = _words(key, element)
    return (whole(first) * 2097152.0 + whole(second >> uint32(11))) * 2.0**-53


@program()
def _exponential(key, element):
    first, second = _words(key, element)
    return -logarithm(inside(first, second))


@program()
def _normal(key, element):
    w0, w1, w2, w3 = words_of(key, element // 2, 0, DRAW)
    one, other = normals(inside(w0, w1), inside(w2, w3))
    return other if element % 2 else one


@program()
def _log(x):
    """Return log x of any number."""
    if x >= 2.2250738585072014e-308 and x <= 1.7976931348623157e308:
        return logarithm(x)
    if x > 0.0 and x < 1.0:
        return logarithm(x * 2.0**54) - 37.42994775023705
    return x if x > 0.0 else -math.inf if x == 0.0 else math.nan


@program()
def _exp(x):
    return exponential(x)


@program()
def _logit(u):
    return _log(u / (1.0 - u))


@program()
def _log_density(x, variance):
    return -0.5 * (_log(variance) + x * x / variance)


@program(
    "void(float64[:, :, ::1], float64[:, ::1], float64[:, :, ::1], float64[:, ::1], float64[:, :, ::1], "
    "float64[:, :, ::1])"
)
def write_likelihoods(gram, estimate, place, noise, score, packed):
    """Write G (b - x) / σ² and the lower triangle of G / σ², of places x `(K, C, p)`; G is symmetric."""
    clients, chains, p = place.shape
    for k in range(clients):
        for c in range(chains):
            total, at, scale = score[k, c], 0, noise[k, c]
            for i in range(p):
                total[i] = 0.0
            for j in range(p):
                row, gap = gram[k, j], estimate[k, j] - place[k, c, j]
                for i in range(p):
                    total[i] += row[i] * gap
                lower = packed[k, c, at : at + j + 1]
                for i in range(j + 1):
                    lower[i] = row[i] * scale
                at += j + 1
            for i in range(p):
                total[i] *= scale


@program()
def _factorised(factor, prior):
    """Replace the lower triangle of Q + diag(prior) by its factor L; return whether it is positive definite."""
    for i in range(len(prior)):
        for j in range(i + 1):
            rest = factor[i, j]
            if i == j:
                rest += prior[i]
            for k in range(j):
                rest -= factor[i, k] * factor[j, k]
            if i == j and not rest > 0.0:
                return False
            factor[i, j] = math.sqrt(rest) if i == j else rest / factor[j, j]
    return True


@program(f"void({', '.join(['float64[:, ::1]'] * 7)})")
def write_moves(score, packed, theta, centre, prior, z, out):
    """Write N(A⁻¹ b, A⁻¹), A = Q + diag(prior), b = score + Q centre; θ if A is not positive definite to rounding."""
    chains, p = out.shape
    factor = numpy.empty((p, p))
    for c in range(chains):
        at = 0
        for i in range(p):
            for j in range(i + 1):
                factor[i, j] = packed[c, at]
                factor[j, i] = packed[c, at]
                at += 1
        for i in range(p):
            out[c, i] = score[c, i]
            for j in range(p):
                out[c, i] += factor[i, j] * centre[c, j]
        if not _factorised(factor, prior[c]):
            for i in range(p):
                out[c, i] = theta[c, i]
            continue
        for i in range(p):
            for k in range(i):
                out[c, i] -= factor[i, k] * out[c, k]
            out[c, i] /= factor[i, i]
        for i in range(p):
            out[c, i] += z[c, i]
        for i in range(p - 1, -1, -1):
            for k in range(i + 1, p):
                out[c, i] -= factor[k, i] * out[c, k]
            out[c, i] /= factor[i, i]


@program(
    "void(float64, float64, float64, float64, float64, boolean, float64[:, ::1], float64[::1], float64[:, ::1], "
    "float64[:, ::1], int64[::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[::1])"
)
def write_spikes_and_slabs(
    spike,
    shape,
    rate,
    a,
    b,
    shared,
    variance_in,
    inclusion_in,
    estimate_of,
    precision_of,
    keys,
    theta_out,
    included_out,
    variance,
    inclusion,
):
    """Write θ, γ, η and ρ after a step, with one η of all coefficients if it is shared."""
    chains, p = estimate_of.shape
    for c in range(chains):
        key = keys[c]
        for_flips, for_theta, for_variance = folded(key, 0), folded(key, 1), folded(key, 2)
        estimate, precision, odds = estimate_of[c], precision_of[c], _logit(inclusion_in[c])
        theta, included, slabs, energy = theta_out[c], included_out[c], 0.0, 0.0
        for j in range(p):
            eta, known = variance_in[c, 0 if shared else j], 1.0 / precision[j]
            evidence = _log_density(estimate[j], eta + known) - _log_density(estimate[j], spike * eta + known)
            included[j] = 1.0 if _logit(_uniform(for_flips, j)) < evidence + odds else 0.0
            posterior = precision[j] + 1.0 / ((included[j] + spike * (1.0 - included[j])) * eta)
            theta[j] = precision[j] * estimate[j] / posterior + _normal(for_theta, j) / math.sqrt(posterior)
            slabs += included[j]
        if not shared:  # given the others, with the variance and ρ integrated out
            for_more = folded(key, 4)
            for j in range(p):
                half, others = theta[j] * theta[j] / 2.0, slabs - included[j]
                evidence = 0.5 * _log(spike) + (shape + 0.5) * _log((rate + half / spike) / (rate + half))
                evidence += _log((a + others) / (b + (p - 1.0) - others))
                included[j] = 1.0 if _logit(_uniform(for_more, j)) < evidence else 0.0
                slabs = others + included[j]
        for j in range(p):
            half = theta[j] * theta[j] / (included[j] + spike * (1.0 - included[j])) / 2.0
            energy += half
            if not shared:
                variance[c, j] = (rate + half) / gamma_number(for_variance, j, shape + 0.5)
        if shared:
            variance[c, 0] = (rate + energy) / gamma_number(for_variance, 0, shape + p / 2.0)
        for_inclusion = folded(key, 3)
        one = gamma_number(folded(for_inclusion, 0), 0, a + slabs)
        other = gamma_number(folded(for_inclusion, 1), 0, b + p - slabs)
        inclusion[c] = one / (one + other)


@program(
    "void(int64, float64, float64, float64[::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], "
    "float64[:, :, ::1], int64[::1], float64[:, ::1], float64[:, :, ::1])"
)
def write_levels(
    turns, loosest, bound, clients, energy, rate, auxiliary, precision_in, factors_in, keys, precision, factors
):
    """Write 1/τ² and the factors after rounds of three draws each."""
    chains, p = precision.shape
    limit, least = _exp(bound), 1.0 / loosest
    for c in range(chains):
        for_rates, for_draws, shape = folded(keys[c], 0), folded(keys[c], 1), (clients[c] + 1.0) / 2.0
        for j in range(p):
            t, w, u = precision_in[c, j], factors_in[c, 0, j], factors_in[c, 1, j]
            for draw in range(3 * turns):
                x, g = _exponential(for_rates, draw * p + j), gamma_number(for_draws, draw * p + j, shape)
                w_new, u_new = w, u
                if draw % 3 == 0:
                    t_new = g / (x / (1.0 + t) + energy[c, j] * w)
                elif draw % 3 == 1:
                    inverse = g / (x / (1.0 + 1.0 / t) + rate[c, j] * w * u * t)
                    t_new, w_new = 1.0 / inverse, w * (inverse * t)
                else:
                    t_new = g / (x / (1.0 + t) + auxiliary[c, j] * u / t)
                    w_new, u_new = w * (t / t_new), u * (t_new / t)
                inside_of = t_new <= limit and t_new * limit >= 1.0 and w_new <= loosest and w_new >= least
                if inside_of and u_new <= loosest and u_new >= least:
                    t, w, u = t_new, w_new, u_new
            precision[c, j], factors[c, 0, j], factors[c, 1, j] = t, w, u


# Points of a lattice are runs of one array: x, cosh y, the variance, log densities and sums of components, and heights.
@program()
def _lattice(room, centre, spacing, place, middle, width, bound):
    """Write points, cosh and variances, and initialise the components."""
    for i in range(POINTS):
        up = exponential(centre + spacing * (i - place))
        down = 1.0 / up
        x = middle + width * ((up - down) / 2.0)
        room[i] = x
        room[POINTS + i] = (up + down) / 2.0
        inside_of = bound if x > bound else -bound if x < -bound else x
        room[2 * POINTS + i] = exponential(inside_of)
        room[3 * POINTS + i] = -_BIG
        room[4 * POINTS + i] = 0.0


@program()
def _component(room, prior, over, log_weight, square):
    """Add the density of an estimate under a component: the largest log so far, and a sum relative to it."""
    for i in range(POINTS):
        ratio = 1.0 + prior * room[2 * POINTS + i] * over
        log_of = log_weight - 0.5 * square * prior / ratio
        before = room[3 * POINTS + i]
        larger = log_of if log_of > before else before
        sum_before = room[4 * POINTS + i] * exponential(before - larger)
        room[4 * POINTS + i] = sum_before + exponential(log_of - larger) / math.sqrt(ratio)
        room[3 * POINTS + i] = larger


@program()
def _heights(room, degrees, scatter, bound):
    """Write heights relative to the highest."""
    for i in range(POINTS):
        x, cosh, variance = room[i], room[POINTS + i], room[2 * POINTS + i]
        log_of = 0.5 * ((1.0 - degrees) * x - scatter / variance) + room[3 * POINTS + i]
        height = log_of + logarithm(cosh * room[4 * POINTS + i] / (1.0 + variance))
        room[5 * POINTS + i] = height if abs(x) <= bound else -math.inf
    highest = -math.inf
    for i in range(POINTS):
        highest = max(highest, room[5 * POINTS + i])
    for i in range(POINTS):
        room[5 * POINTS + i] = exponential(room[5 * POINTS + i] - highest)


@program(
    "void(float64, float64, float64[:, ::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], "
    "float64[:, ::1], float64[:, :, ::1], float64[:, :, ::1], int64[::1], float64[:, ::1])"
)
def write_scales(finest, bound, clients, weight, estimate, scatter_of, precision_in, shares, priors, keys, precision):
    """Write 1/τ² drawn from a lattice through the one before."""
    chains, p = precision.shape
    room = numpy.empty(6 * POINTS)
    for c in range(chains):
        degrees, width, key = clients[c, 0] - 1.0, math.sqrt(2.0 / clients[c, 0]), keys[c]
        for j in range(p):
            scatter, square = scatter_of[c, j], estimate[c, j] * estimate[c, j]
            guess = _log(max(scatter / max(degrees, 1.0), 1e-300))
            middle = min(max(guess, -bound), bound)
            spacing = finest * (1.0 + _uniform(key, j))
            place = math.floor(POINTS * _uniform(key, p + j))
            at = (-_log(precision_in[c, j]) - middle) / width
            position = math.copysign(_log(abs(at) + math.sqrt(at * at + 1.0)), at)
            _lattice(room, position, spacing, place, middle, width, bound)
            for k in range(len(priors)):
                prior, share = priors[k, c, j], shares[k, c, j]
                log_weight = 0.0 if len(priors) == 1 else _log(share) + _log(prior) / 2.0
                _component(room, prior, 1.0 / weight[c, j], log_weight, square)
            _heights(room, degrees, scatter, bound)
            total = 0.0
            for i in range(POINTS):
                total += room[5 * POINTS + i]
                room[5 * POINTS + i] = total
            coin, chosen = total * _uniform(key, 2 * p + j), 0
            for i in range(POINTS):
                chosen += room[5 * POINTS + i] <= coin
            precision[c, j] = _exp(-room[min(chosen, POINTS - 1)])


def likelihoods(gram: Tensor, estimate: Tensor, place: Tensor, noise: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return score and packed information of `_interweaving.linear`, None for unsupported tensors.

    Args:
        gram: X'X, `(K, p, p)`.
        estimate: least squares, `(K, p)`.
        place: `(K, C, p)`.
        noise: 1/σ², `(K, C)`.
    """
    given = gram, estimate, place, noise
    if not _usable(given):
        return None
    p = place.shape[-1]
    out = place.new_empty(place.shape), place.new_empty(*noise.shape, p * (p + 1) // 2)
    write_likelihoods(*arrays(*given, *out))
    return out


def move(numbers: Sequence[Tensor]) -> Tensor | None:
    """Return θ `(C, p)` of `_interweaving.move`, None for unsupported tensors.

    Args:
        numbers: score, packed information, θ, centre, prior precisions and standard normal numbers, a row a chain.
    """
    if not _usable(numbers):
        return None
    out = torch.empty_like(numbers[0], memory_format=torch.contiguous_format)
    write_moves(*arrays(*numbers, out))
    return out


def spike_and_slab(
    prior: tuple[float, float, float, float, float], shared: bool, keys: Tensor, numbers: Sequence[Tensor]
) -> tuple[Tensor, ...] | None:
    """Return θ, γ, η and ρ after one step of `global_priors.spike_and_slab`, None as above.

    Args:
        prior: c₀, the shape and rate of η, and both parameters of ρ.
        shared: whether one η is of all coefficients.
        keys: `(C,)`.
        numbers: η `(C, p)` or `(C, 1)`, ρ `(C,)`, the estimate and its precision `(C, p)`.
    """
    if not _usable(numbers, keys):
        return None
    variance, inclusion, estimate, _ = numbers
    like = (estimate, estimate, variance, inclusion)
    out = tuple(torch.empty_like(part, memory_format=torch.contiguous_format) for part in like)
    write_spikes_and_slabs(*map(float, prior), shared, *arrays(*numbers, keys, *out))
    return out


def levels(
    numbers: Sequence[Tensor], keys: Tensor, turns: int, limits: tuple[float, float]
) -> tuple[Tensor, Tensor] | None:
    """Return 1/τ² `(C, p)` and factors `(C, 2, p)` of `_levels.move`, None as above.

    Args:
        numbers: clients `(C,)`, energy, rate, auxiliary and 1/τ² `(C, p)`, factors `(C, 2, p)`.
        keys: `(C,)`.
        turns: rounds of draws.
        limits: the largest factor, and of |log τ²|.
    """
    if not _usable(numbers, keys):
        return None
    precision, factors = (torch.empty_like(part, memory_format=torch.contiguous_format) for part in numbers[4:])
    write_levels(turns, *limits, *arrays(*numbers, keys, precision, factors))
    return precision, factors


def scales(numbers: Sequence[Tensor], keys: Tensor, limits: tuple[float, float]) -> Tensor | None:
    """Return 1/τ² `(C, p)` of `_scales.draw`, None as above.

    Args:
        numbers: clients `(C, 1)`, weight, estimate, scatter and 1/τ² `(C, p)`, shares and precisions of the components,
            which broadcast to `(k, C, p)`.
        keys: `(C,)`.
        limits: the finest spacing, and of |log τ²|.
    """
    if not _usable(numbers, keys):
        return None
    *statistics, share, prior = numbers
    out = torch.empty_like(statistics[4], memory_format=torch.contiguous_format)
    wide = [tensor.expand(len(prior), *out.shape) for tensor in (share, prior)]
    write_scales(*limits, *arrays(*statistics, *wide, keys, out))
    return out


def _usable(numbers: Sequence[Tensor], *keys: Tensor) -> bool:
    """Return whether the programs support these tensors."""
    return write_moves.usable(numbers, torch.float64) and write_moves.usable(keys)
