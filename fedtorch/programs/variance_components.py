r"""Log densities and scores of many small normal vectors whose covariances are sums of variance components.

At node r of client k

.. math:: M = \sum_t c_{krt}\, B_k' E_t B_k + W_k + \sigma^2_{kr} I, \qquad
    u = z_k - \sum_j (x_{krj} - o_{kj})\, g_{kj},

with the same symmetric E_t for all clients, of ones at (i_t, j_t) and (j_t, i_t). That is the marginal distribution of
the rows of a linear mixed-effects model at given variances, with as many rows as there are coefficients. The program
computes a node in each lane of a processor's vectors, and factorises M = LDL' without writing it to memory; the
reference is a batched Cholesky factor.

Source: Searle, Casella, McCulloch, "Variance components", 1992, chapter 6. Bound: arithmetic, about d² T / 2 + d³ / 6
multiplications and additions a node.

Not differentiable by its program; if a gradient is needed the reference runs. The program supports float64 and up to 16
dimensions.

Nodes of a client are processed side by side, a lane each, through the factors of M = LDL', which are not stored
elsewhere. Unused lanes repeat the client's last node. Matrices are lower triangles, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch
from numpy import float64, int64, uint64
from torch import Tensor

from fedtorch import linalg
from fedtorch.programs.engine import Program, program
from fedtorch.programs.exact_sums import product
from fedtorch.programs.philox import logarithm
from fedtorch.programs.threads import ENOUGH, in_threads

_LANES = 8
_FEW = 2**12  # nodes, for which threads are not worth their start
_SMALLEST, _LARGEST = 2.2250738585072014e-308, 1.7976931348623157e308  # normal numbers
_FRACTION, _ONE = numpy.uint64(0xFFFFFFFFFFFFF), numpy.uint64(0x3FF0000000000000)
_MODEL = (
    "float64[:, :, :], float64[:, :, :], float64[:, :], int64[::1], int64[::1], float64[:, :, ::1], "
    "float64[:, :, ::1], float64[:, ::1], float64[:, ::1], float64[:, :, ::1], int64, int64"
)


@program()
def _components(rows, columns, root, out):
    """Write the lower triangle of B'E B for each component."""
    size = len(root)
    for t in range(len(rows)):
        one, other, at = root[rows[t]], root[columns[t]], 0
        for a in range(size):
            for b in range(a + 1):
                both = 0.0 if rows[t] == columns[t] else other[a] * one[b]
                out[t, at] = one[a] * other[b] + both
                at += 1


@program()
def _factorised(nodes_of, about, node, matrices, matrix, inverse, misfit, room, logs):
    """Write L below the diagonal of `matrix`, 1 / D, L⁻¹u and log |M|, NaN where M is not positive definite."""
    values, inputs, noise = nodes_of
    shared, origin, centre, slope = about
    size, last = len(centre), len(noise) - 1
    pivot, exponents, mantissas = room[0], room[1], room[2]
    scaled = room[3:]
    for lane in range(_LANES):
        at = min(node + lane, last)
        for a in range(size):
            misfit[a, lane] = centre[a]
        for j in range(len(origin)):
            x = inputs[at, j] - origin[j]
            for a in range(size):  # products that nearly cancel the centre are not rounded
                rounded, error = product(x, slope[j, a])
                misfit[a, lane] = (misfit[a, lane] - rounded) - error
    at = 0
    for a in range(size):
        for b in range(a + 1):
            for lane in range(_LANES):
                matrix[at, lane] = shared[a, b]
            at += 1
        for lane in range(_LANES):
            matrix[at - 1, lane] += noise[min(node + lane, last)]
    for t in range(len(matrices)):
        for lane in range(_LANES):
            pivot[lane] = values[min(node + lane, last), t]
        for at in range(size * (size + 1) // 2):
            component = matrices[t, at]
            for lane in range(_LANES):
                matrix[at, lane] += pivot[lane] * component
    for lane in range(_LANES):
        exponents[lane] = 0.0
        mantissas[lane] = 1.0
    for a in range(size):
        row = matrix[a * (a + 1) // 2 :]
        for lane in range(_LANES):
            pivot[lane] = row[a, lane]
        for b in range(a):
            above = matrix[b * (b + 1) // 2 :]
            for i in range(b):
                for lane in range(_LANES):
                    row[b, lane] -= scaled[i, lane] * above[i, lane]
            for lane in range(_LANES):
                total = row[b, lane]
                factor = total * inverse[b, lane]
                scaled[b, lane] = total
                row[b, lane] = factor
                pivot[lane] -= total * factor
                misfit[a, lane] -= factor * misfit[b, lane]
        for lane in range(_LANES):
            bits = float64(pivot[lane]).view(uint64)
            usual = (pivot[lane] >= _SMALLEST) & (pivot[lane] <= _LARGEST)
            inverse[a, lane] = 1.0 / pivot[lane]
            exponents[lane] += float64(int64(bits >> uint64(52)) - 1023)
            mantissas[lane] *= uint64((bits & _FRACTION) | _ONE).view(float64) if usual else math.nan
    for lane in range(_LANES):
        nan = mantissas[lane] - mantissas[lane]  # or zero: of NaN the logarithm's formula gives a number
        logs[lane] = exponents[lane] * 0.6931471805599453 + logarithm(mantissas[lane]) + nan


@program(f"void({_MODEL}, float64[:, ::1])")
def write_log_densities(values, inputs, noise, rows, columns, root, shared, origin, centre, slope, begin, end, out):
    """Write log |M| + u'M⁻¹u of the clients from `begin` to `end`, `(K, R)`."""
    size, nodes = centre.shape[1], values.shape[1]
    triangle = size * (size + 1) // 2
    matrices, matrix = numpy.empty((len(rows), triangle)), numpy.empty((triangle, _LANES))
    inverse, misfit = numpy.empty((size, _LANES)), numpy.empty((size, _LANES))
    room, logs = numpy.empty((size + 3, _LANES)), numpy.empty(_LANES)
    for client in range(begin, end):
        _components(rows, columns, root[client], matrices)
        for node in range(0, nodes, _LANES):
            nodes_of = values[client], inputs[client], noise[client]
            about = shared[client], origin[client], centre[client], slope[client]
            _factorised(nodes_of, about, node, matrices, matrix, inverse, misfit, room, logs)
            for a in range(size):
                for lane in range(_LANES):
                    logs[lane] += misfit[a, lane] * misfit[a, lane] * inverse[a, lane]
            for lane in range(min(_LANES, nodes - node)):
                out[client, node + lane] = logs[lane]


@program()
def _inverted(size, matrix, room):
    """Replace L below the diagonal by its inverse, whose diagonal is one."""
    for a in range(size):
        row = matrix[a * (a + 1) // 2 :]
        for b in range(a):
            for lane in range(_LANES):
                room[b, lane] = row[b, lane]
                row[b, lane] = -row[b, lane]
        for b in range(a):
            for i in range(b + 1, a):
                below = matrix[i * (i + 1) // 2 :]
                for lane in range(_LANES):
                    row[b, lane] -= room[i, lane] * below[b, lane]
        for lane in range(_LANES):
            row[a, lane] = 1.0


@program(f"void({_MODEL}, float64[:, ::1], float64[:, :, ::1], float64[:, :, ::1])")
def write_scores(
    values, inputs, noise, rows, columns, root, shared, origin, centre, slope, begin, end, weights, score, information
):
    """Write M⁻¹u `(K, d, R)` and the sums over nodes of weights times M⁻¹, `(K, d, d)`."""
    size, nodes = centre.shape[1], values.shape[1]
    triangle = size * (size + 1) // 2
    matrices, matrix = numpy.empty((len(rows), triangle)), numpy.empty((triangle, _LANES))
    total = numpy.empty((triangle, _LANES))
    inverse, misfit = numpy.empty((size, _LANES)), numpy.empty((size, _LANES))
    room, logs = numpy.empty((size + 3, _LANES)), numpy.empty(_LANES)
    weight, scaled = numpy.empty(_LANES), numpy.empty((size, _LANES))
    for client in range(begin, end):
        _components(rows, columns, root[client], matrices)
        total[:] = 0.0
        for node in range(0, nodes, _LANES):
            here = min(_LANES, nodes - node)
            nodes_of = values[client], inputs[client], noise[client]
            about = shared[client], origin[client], centre[client], slope[client]
            _factorised(nodes_of, about, node, matrices, matrix, inverse, misfit, room, logs)
            _inverted(size, matrix, scaled)
            for lane in range(_LANES):
                weight[lane] = weights[client, node + lane] if lane < here else 0.0
                weight[lane] *= 1.0 + 0.0 * logs[lane]  # NaN where M is not positive definite
            for a in range(size):
                for lane in range(_LANES):
                    misfit[a, lane] *= inverse[a, lane]
                    inverse[a, lane] *= weight[lane]
            for a in range(size):
                row = matrix[a * (a + 1) // 2 :]
                for i in range(a + 1):
                    for lane in range(_LANES):
                        scaled[i, lane] = row[i, lane] * inverse[a, lane]
                    for j in range(i + 1):
                        for lane in range(_LANES):
                            total[i * (i + 1) // 2 + j, lane] += scaled[i, lane] * row[j, lane]
            for b in range(size):
                for a in range(b + 1, size):
                    for lane in range(_LANES):
                        misfit[b, lane] += matrix[a * (a + 1) // 2 + b, lane] * misfit[a, lane]
                for lane in range(here):
                    score[client, b, node + lane] = misfit[b, lane]
        for a in range(size):
            for b in range(a + 1):
                sum_of_weights = total[a * (a + 1) // 2 + b].sum()
                information[client, a, b] = sum_of_weights
                information[client, b, a] = sum_of_weights


def _run(function: Program, model: VarianceComponents, *tensors: Tensor) -> None:
    """Call a program for all clients, in as many threads as torch has."""
    given = [*model[:3], *(tensor.contiguous() for tensor in model[3:])]
    arrays, more = ([tensor.detach().numpy() for tensor in part] for part in (given, tensors))
    call = lambda begin, end: function(*arrays, begin, end, *more)
    in_threads(call, len(model.root), model.noise.shape[1] * ENOUGH // _FEW)


MOST = 16  # dimensions


class VarianceComponents(NamedTuple):
    """The normal vectors of `K` clients at `R` nodes."""

    values: Tensor  # (K, R, T) c
    inputs: Tensor  # (K, R, q) x
    noise: Tensor  # (K, R) σ²
    rows: Tensor  # (T,) i
    columns: Tensor  # (T,) j
    root: Tensor  # (K, d, d) B
    shared: Tensor  # (K, d, d) W
    origin: Tensor  # (K, q) o
    centre: Tensor  # (K, d) z
    slope: Tensor  # (K, q, d) g


def usable(size: int, tensors: Sequence[Tensor]) -> bool:
    """Return whether a program supports vectors of this size in such tensors."""
    return 0 < size <= MOST and write_log_densities.usable(tensors, torch.float64)


def log_densities(model: VarianceComponents) -> Tensor:
    """Return log |M| + u'M⁻¹u, minus twice the log density without its constant, `(K, R)`; NaN if M is indefinite."""
    if _known(model):
        log = model.root.new_empty(len(model.root), model.noise.shape[1])
        _run(write_log_densities, model, log)
        return log
    factor, white = _with_factors(model)
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + white.square().sum(-1)


def scores(model: VarianceComponents, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return M⁻¹u `(K, R, d)`, and the sums over nodes of weights `(K, R)` times M⁻¹, `(K, d, d)`."""
    if _known(model):
        clients, size = model.centre.shape
        score = model.root.new_empty(clients, size, model.noise.shape[1])
        information = model.root.new_empty(clients, size, size)
        _run(write_scores, model, weights.contiguous(), score, information)
        return score.mT, information
    factor, white = _with_factors(model)
    inverse = linalg.inverse_factor(factor)
    return (inverse.mT @ white[..., None])[..., 0], (weights[..., None, None] * (inverse.mT @ inverse)).sum(1)


def _known(model: VarianceComponents) -> bool:
    """Return whether a program supports these vectors."""
    return usable(model.centre.shape[1], (*model[:3], *model[5:]))


def _with_factors(model: VarianceComponents) -> tuple[Tensor, Tensor]:
    """Return L and L⁻¹u, of NaN where M is indefinite."""
    one, other = model.root[:, model.rows], model.root[:, model.columns]
    products = one[..., :, None] * other[..., None, :]
    twice = (model.rows != model.columns)[:, None, None]
    matrices = torch.where(twice, products + products.mT, products)
    total = torch.einsum("krt,ktab->krab", model.values, matrices) + model.shared[:, None]
    total.diagonal(dim1=-2, dim2=-1).add_(model.noise[..., None])
    factor, info = torch.linalg.cholesky_ex(total)
    factor = torch.where((info == 0)[..., None, None], factor, torch.nan)
    misfit = model.centre[:, None] - (model.inputs - model.origin[:, None]) @ model.slope
    return factor, torch.linalg.solve_triangular(factor, misfit[..., None], upper=False)[..., 0]
