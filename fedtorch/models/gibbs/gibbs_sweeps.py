r"""L Gibbs sweeps of Bayesian regressions whose coefficients deviate from a centre under a horseshoe, in one call.

For client k and chain c, with Gram matrix G, estimate θ̂ of residual sum of squares R, centre θ and precisions 1/τ²:

.. math::
    \delta \sim N(A^{-1} s\, G (\hat\theta - \theta),\ A^{-1}), \qquad A = s G + \mathrm{diag}(w / \tau^2), \\
    w_j = e_j / (u_j + \delta_j^2 / (2 \tau_j^2)), \quad u_j = e'_j / (1 + w_j), \quad
    s = g / (b + \tfrac12 \mathrm{RSS}),

with exponential numbers e, e' and gamma numbers g of shape parameter a_σ + n/2. Programs, in Triton for a CUDA device
and by numba for the CPU, draw them from the keys, as `fedtorch.random` does, and keep the matrices of a problem in
registers or in a core's cache, so that a sweep does not access memory.

Source: Kidd, Wang, Xu and Ni, "Federated learning for sparse Bayesian models", 2023, section 2.2; Makalic and Schmidt,
"A simple sampler for the horseshoe estimator", IEEE Signal Processing Letters 23, 2016. Bound: arithmetic, about p³
operations and 3 p logarithms a sweep in float64; the baseline is a batched `cholesky_ex`.

Not differentiable. Programs support float64; Triton's up to 16 coefficients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg
from fedtorch.programs import choice, gibbs_sweeps as compiled
from fedtorch.programs.launch import launch, power_of_two
from fedtorch.random import philox

MOST = 16  # most coefficients of Triton's program
_TRITON = "fedtorch.programs.triton.gibbs_sweeps"
_SIZE = 256  # numbers of a program's matrices


class Rows(NamedTuple):
    """The statistics of the rows, float64."""

    gram: Tensor  # (K, p, p)
    estimate: Tensor  # (K, p) of least squares
    rss: Tensor  # (K,) its residual sum of squares
    degrees: Tensor  # (K,) a_σ + n/2


class SweepPrior(NamedTuple):
    """The global variables in the chains' inbox, float64."""

    centre: Tensor  # (K, C, p) θ
    precision: Tensor  # (K, C, p) 1/τ²
    scale: Tensor  # (K, C) b


class Chains(NamedTuple):
    """The variables of the chains, float64."""

    deviation: Tensor  # (K, C, p) δ
    precision: Tensor  # (K, C, p) w
    auxiliary: Tensor  # (K, C, p) u
    noise: Tensor  # (K, C) s


def knows(keys: Tensor, coefficients: int) -> bool:
    """Return whether a program runs for these keys."""
    fits = 0 < coefficients <= MOST
    return (
        compiled.sweep_tiles.usable((keys,))
        or choice.triton_programs(_TRITON, (keys,), (torch.int64,), fits=fits) is not None
    )


def gibbs_sweeps(rows: Rows, prior: SweepPrior, chains: Chains, keys: Tensor, sweeps: int) -> Chains:
    """Return the chains after `sweeps` sweeps.

    Args:
        rows: of K clients.
        prior: by C chains each.
        chains: their present state; deviations are drawn first, so their old values are not used.
        keys: `(K, C)`.
        sweeps: L, at least 1.
    """
    (clients, count, size), tensors = prior.centre.shape, (*rows, *prior, *chains[1:])
    double = all(tensor.dtype == torch.float64 for tensor in tensors)
    if double and compiled.sweep_tiles.usable((keys, *tensors)):
        out = _like(chains)
        compiled.sweep((*tensors, keys), out, sweeps)
        return out
    programs = choice.triton_programs(_TRITON, (keys, *tensors), (torch.int64,), fits=0 < size <= MOST and double)
    if not programs:
        return _reference(rows, prior, chains, keys, sweeps)
    out = _like(chains)
    side = power_of_two(size)
    batch = max(_SIZE // side**2, 1)
    given = [tensor.contiguous() for tensor in (*tensors, keys)]
    sizes = (clients * count, max(count, 1), size, sweeps)
    launch(programs.horseshoe, -(-clients * count // batch), *out, *given, *sizes, BATCH=batch, SIZE=side, warps=8)
    return out


def _like(chains: Chains) -> Chains:
    return Chains(*(torch.empty_like(part, memory_format=torch.contiguous_format) for part in chains))


def _reference(rows: Rows, prior: SweepPrior, chains: Chains, keys: Tensor, sweeps: int) -> Chains:
    size = prior.centre.shape[-1]
    for_normals, for_noise, for_mixing = (philox.folded(keys, purpose) for purpose in range(3))
    each = (sweeps, size)
    normals = philox.normal(for_normals, each, torch.float64)
    first, second = (philox.exponential(philox.folded(for_mixing, part), each, torch.float64) for part in range(2))
    degrees = rows.degrees[:, None].expand(keys.shape).reshape(-1, 1).expand(-1, sweeps)
    gammas = philox.gamma(for_noise.reshape(-1), degrees, torch.float64).reshape(*keys.shape, sweeps)
    gram, gap = rows.gram[:, None], rows.estimate[:, None] - prior.centre
    right = (gram @ gap[..., None])[..., 0]
    delta, w, u, noise = chains
    for s in range(sweeps):
        factor = torch.linalg.cholesky(gram * noise[..., None, None] + (w * prior.precision).diag_embed())
        delta = linalg.normal_draw(factor, right * noise[..., None], normals[..., s, :])
        error = delta - gap
        rss = rows.rss[:, None] + (error[..., None, :] @ gram @ error[..., None])[..., 0, 0]
        w = first[..., s, :] / (u + delta * delta * prior.precision / 2)
        u = second[..., s, :] / (w + 1)
        noise = gammas[..., s] / (prior.scale + rss / 2)
    return Chains(delta, w, u, noise)
