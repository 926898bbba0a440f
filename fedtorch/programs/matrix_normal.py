"""The server's computations of HM1 over all devices in a round, on the CPU.

Majorised priors are those of `fedtorch.models.low_rank.majorised`, by bisection on the number of eigenvalues above a
bound. Devices' answers are added up as in `fedtorch.federation.algorithms.matrix_normal.noise.renewed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from fedtorch.programs.engine import program

MOST = 64  # most directions of a covariance; torch is faster for more
FEW = 2**10  # most numbers of a factor whose singular values the program finds faster than LAPACK
_SMALLEST, _LARGEST, _EPSILON = 2.2250738585072014e-308, 1.7976931348623157e308, 2.0**-52
_SWEEPS = 60


@program()
def _rotated(columns):
    """Make rows orthogonal by rotations of pairs, and return whether that has converged.

    One-sided Jacobi finds small singular values as exactly as large ones.
    """
    count, units = columns.shape
    rounding = (1.0 + math.sqrt(units)) * _EPSILON
    for _ in range(_SWEEPS):
        moved = False
        for i in range(count):
            for j in range(i + 1, count):
                one, other, both = 0.0, 0.0, 0.0
                for k in range(units):
                    one += columns[i, k] * columns[i, k]
                    other += columns[j, k] * columns[j, k]
                    both += columns[i, k] * columns[j, k]
                if abs(both) <= rounding * math.sqrt(one) * math.sqrt(other):
                    continue
                zeta = (other - one) / (2.0 * both)
                t = (-1.0 if zeta < 0.0 else 1.0) / (abs(zeta) + math.sqrt(1.0 + zeta * zeta))
                c = 1.0 / math.sqrt(1.0 + t * t)
                if t != 0.0:
                    moved = True
                    for k in range(units):
                        before = columns[i, k]
                        columns[i, k] = c * before - c * t * columns[j, k]
                        columns[j, k] = c * t * before + c * columns[j, k]
        if not moved:
            return True
    return False


@program("float64(float64[:, :], float64, float64[:, ::1], float64[::1])")
def write_factored(factor, multiple, vectors, values):
    """Write vectors `(rank, K)` and values of `LowRank.from_factor`, which are zeros, and return the multiple.

    It is NaN if the factor `(K, count)` is not finite or the rotations do not converge.
    """
    units, count, rank = factor.shape[0], factor.shape[1], len(values)
    largest = 0.0
    for k in range(units):
        for j in range(count):
            if not abs(factor[k, j]) <= _LARGEST:
                return math.nan
            largest = max(largest, abs(factor[k, j]))
    if largest == 0.0:
        return multiple
    exponent = max(math.frexp(largest)[1], -1000)  # squares of numbers scaled to this size neither overflow nor vanish
    down, up = math.ldexp(1.0, -exponent), math.ldexp(1.0, exponent)
    columns, size = numpy.empty((count, units)), numpy.zeros(count)
    for k in range(units):
        for j in range(count):
            columns[j, k] = factor[k, j] * down
    if not _rotated(columns):
        return math.nan
    for j in range(count):
        for k in range(units):
            size[j] += columns[j, k] * columns[j, k]
        size[j] = math.sqrt(size[j])
    order = numpy.argsort(-size)
    top, rank_used, beyond = size[order[0]] * up, min(units, count), 0.0
    for r in range(rank_used):
        j = order[r]
        length = size[j] * up
        if not length * length > _EPSILON * top * top:  # rounding, as are those that follow
            break
        if r >= rank:
            beyond += length * length
            continue
        at = 0
        for k in range(units):
            if abs(columns[j, k]) > abs(columns[j, at]):
                at = k
        scale = (-1.0 if columns[j, at] < 0.0 else 1.0) / size[j]
        values[r] = length * length
        for k in range(units):
            vectors[r, k] = columns[j, k] * scale
    if rank_used > rank:
        beyond /= float(max(units - rank, 1))
        for r in range(rank):
            values[r] = max(values[r] - beyond, 0.0)
        return multiple + beyond
    return multiple


@program()
def _positive(matrix, column, image):
    """Return how many eigenvalues of a symmetric matrix are positive; the matrix is overwritten.

    Householder's reflections make it tridiagonal, and the signs of the pivots are then those of the eigenvalues.
    """
    n = len(matrix)
    for k in range(n - 2):
        square = 0.0
        for i in range(n):
            column[i] = matrix[k, i] if i > k else 0.0
            image[i] = 0.0
            square += column[i] * column[i]
        if square - column[k + 1] * column[k + 1] > 0.0:
            end = -math.sqrt(square) if column[k + 1] > 0.0 else math.sqrt(square)
            half = square - column[k + 1] * end  # half the squared length of the reflection's vector
            column[k + 1] -= end
            inner = 0.0
            for j in range(k + 1, n):
                by = column[j] / half
                for i in range(n):
                    image[i] += by * matrix[j, i]
            for i in range(k + 1, n):
                inner += image[i] * column[i]
            for i in range(n):
                image[i] -= inner / (2.0 * half) * column[i]
            for i in range(k + 1, n):
                one, other = column[i], image[i]
                for j in range(n):
                    matrix[i, j] -= one * image[j] + other * column[j]
            matrix[k, k + 1] = matrix[k + 1, k] = end
    count, pivot = 0, 1.0
    for i in range(n):
        beside = matrix[i, i - 1] if i > 0 else 0.0
        pivot = matrix[i, i] - beside * beside / pivot
        if abs(pivot) < _SMALLEST:
            pivot = -_SMALLEST
        count += pivot > 0.0
    return count


@program()
def _above(c, z, weights, inner, column, image):
    """Return whether E − ZZ' has an eigenvalue above c, by the law of inertia."""
    units, size = z.shape
    count = 0
    for i in range(size):
        inner[i, :] = 0.0
        inner[i, i] = 1.0
    for k in range(units):
        gap = weights[k] - c
        if abs(gap) < 1e-14 * c:
            gap = -1e-14 * c
        count += gap > 0.0
        for i in range(size):
            by = weights[k] / gap * z[k, i]
            for j in range(size):
                inner[i, j] -= by * z[k, j]
    return count + _positive(inner, column, image) > size


@program(
    "void(float64, float64[:, :], float64[::1], float64[:, ::1], float64, float64[::1], float64[:, ::1])",
)
def write_majorised(multiple, vectors, values, theta, accuracy, precision, shift):
    """Write the precisions `(K,)` and shifts `(K, d)` of `low_rank.majorised`."""
    units, width = theta.shape
    size = 0  # number of nonzero columns
    while size < len(values) and values[size] > 0.0:
        size += 1
    z, inside, scaled = numpy.empty((units, size)), numpy.zeros((size, width)), numpy.empty((size, width))
    root, weights, inner = numpy.empty(size), numpy.empty(units), numpy.empty((size, size))
    column, image, high = numpy.empty(size), numpy.empty(size), -math.inf
    for i in range(size):
        root[i] = math.sqrt(values[i] / (multiple + values[i]))
    for k in range(units):
        length, known = 0.0, 0.0
        for i in range(size):
            number = vectors[k, i]
            z[k, i] = number
            length += number * number
            known += number * number / (multiple + values[i])
            for j in range(width):
                inside[i, j] += number * theta[k, j]
        precision[k] = (0.0 if length > 1.0 else 1.0 - length) / multiple + known
        weights[k] = 1.0 / (multiple * precision[k])
        if weights[k] > high or weights[k] != weights[k]:  # NaN stays
            high = weights[k]
    for i in range(size):
        for j in range(width):
            scaled[i, j] = inside[i, j] / (multiple + values[i])
    for k in range(units):  # Ω⁻¹Θ, then rows of Z in place of those of V
        for j in range(width):
            shift[k, j] = theta[k, j]
        for i in range(size):
            for j in range(width):
                shift[k, j] -= z[k, i] * inside[i, j]
        for j in range(width):
            shift[k, j] /= multiple
        for i in range(size):
            for j in range(width):
                shift[k, j] += z[k, i] * scaled[i, j]
            z[k, i] *= root[i]
    low, high = 1.0, float(units) if high > float(units) else high
    ratio = high
    if ratio != ratio:  # of an infinite multiple
        high = 1.0
    while ratio > 1.0 + accuracy:
        middle, ratio = math.sqrt(low * high), math.sqrt(ratio)
        if _above(middle, z, weights, inner, column, image):
            low = middle
        else:
            high = middle
    high = max(high, 1.0)
    for k in range(units):
        precision[k] *= high
        for j in range(width):
            shift[k, j] = precision[k] * theta[k, j] - shift[k, j]


@program()
def _noise(residual, freedom, pooling, out):
    """Write each device's noise variance, drawn to that of all with the weight of `pooling` degrees of freedom."""
    total, rows = 0.0, 0.0
    for k in range(len(out)):
        total += residual[k]
        rows += freedom[k]
    pooled = total / max(rows, 1.0) if rows > 0.0 else math.inf
    for k in range(len(out)):
        out[k] = (residual[k] + pooling * pooled) / (freedom[k] + pooling)


@program("void(float64[::1], float64[::1], boolean[::1], float64, float64[::1], float64[::1], float64[:, ::1])")
def write_priors(residual, freedom, heard, pooling, variance, precision, shift):
    """Write noise variances `(K,)`; without one, or without an answer by `heard`, 1 and no prior."""
    _noise(residual, freedom, pooling, variance)
    for k in range(len(variance)):
        if not math.isfinite(variance[k]) or (len(heard) > 0 and not heard[k]):
            variance[k], precision[k] = 1.0, 0.0
            for j in range(shift.shape[1]):
                shift[k, j] = 0.0


@program()
def _chosen(numbers, count, wanted):
    """Return the number of rank `wanted` in ascending order; the numbers are permuted (Hoare)."""
    low, high = 0, count - 1
    while low < high:
        pivot, i, j = numbers[(low + high) // 2], low, high
        while i <= j:
            while numbers[i] < pivot:
                i += 1
            while numbers[j] > pivot:
                j -= 1
            if i <= j:
                swapped = numbers[i]
                numbers[i] = numbers[j]
                numbers[j] = swapped
                i += 1
                j -= 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            break
    return numbers[wanted]


@program(
    "boolean(int64[::1], float64[:, ::1], float64[:, ::1], float64[::1], float64, float64[:, ::1], float64[:, ::1], "
    "boolean[::1], float64[:, ::1], float64[::1])",
)
def write_renewed(ids, change, fresh, noise, pooling, theta, summary, heard, known, numbers):
    """Add devices' answers to Θ `(K, d)`, `summary` `(3, K)` and `heard`; return whether all ids are valid.

    It writes Θ of devices that have answered, zeros for others, and four numbers: whether noise variances are finite,
    Σθ² and number of devices that have answered, and the typical variance of a coefficient.
    """
    units, width = theta.shape
    for m in range(len(ids)):
        if ids[m] < 0 or ids[m] >= units:
            return False
    for m in range(len(ids)):
        k = ids[m]
        for j in range(width):
            theta[k, j] += change[m, j]
        for i in range(3):
            summary[i, k] = fresh[i, m]
        heard[k] = True
    variance, typical = numpy.empty(units), numpy.empty(units)
    if len(noise) > 0:
        variance[:] = noise
    else:
        _noise(summary[0], summary[1], pooling, variance)
    reach, count, finite, there = 0.0, 0, True, 0
    for k in range(units):
        for j in range(width):
            number = theta[k, j] if heard[k] else 0.0
            known[k, j] = number
            reach += number * number
        there += heard[k]
        finite = finite and math.isfinite(variance[k])
        spread = summary[2, k]
        sampling = variance[k] * spread
        if not spread <= 0.0 and sampling == sampling:
            typical[count] = sampling
            count += 1
    numbers[0], numbers[1], numbers[2], numbers[3] = 1.0 if finite else 0.0, reach, float(there), 0.0
    if count > 0:
        middle = (count - 1) // 2
        numbers[3] = max(_chosen(typical, count, middle), -_LARGEST)
    return True


def usable(tensors: Sequence[Tensor]) -> bool:
    """Return whether the programs support these tensors."""
    return write_majorised.usable(tensors, torch.float64)


def factored(multiple: Tensor, factor: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return multiple, vectors and values of `LowRank.from_factor`; None where the factor is not finite."""
    vectors, values = factor.new_zeros(rank, len(factor)), factor.new_zeros(rank)
    scale = write_factored(factor.numpy(), float(multiple), vectors.numpy(), values.numpy())
    return None if math.isnan(scale) else (multiple.new_tensor(scale), vectors.mT, values)


def priors(
    summary: Sequence[Tensor], heard: Tensor | None, pooling: float, prior: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return noise variances, precisions `(K,)` and shifts `(K, d)` for the devices.

    Args:
        summary: residuals and degrees of freedom, `(K,)`.
        heard: `(K,)` bool, devices that have answered; None if that does not matter.
        pooling: degrees of freedom of all devices' noise in that of each.
        prior: precisions and shifts for devices with known noise.
    """
    residual, freedom = (tensor.contiguous() for tensor in summary)
    variance = torch.empty_like(residual)
    precision, shift = (tensor.clone(memory_format=torch.contiguous_format) for tensor in prior)
    known = torch.empty(0, dtype=torch.bool) if heard is None else heard.contiguous()
    given = (part.numpy() for part in (residual, freedom, known))
    write_priors(*given, pooling, *(part.numpy() for part in (variance, precision, shift)))
    return variance, precision, shift


def majorised(
    multiple: Tensor, vectors: Tensor, values: Tensor, theta: Tensor, accuracy: float
) -> tuple[Tensor, Tensor]:
    """Return the precisions `(K,)` and shifts `(K, d)` of `low_rank.majorised`."""
    theta = theta.contiguous()
    precision, shift = theta.new_empty(len(theta)), torch.empty_like(theta)
    out = precision.numpy(), shift.numpy()
    write_majorised(float(multiple), vectors.numpy(), values.contiguous().numpy(), theta.numpy(), accuracy, *out)
    return precision, shift


def renewed(
    server: Sequence[Tensor],
    heard: Tensor,
    ids: Tensor,
    update: Sequence[Tensor],
    noise: Tensor | None,
    pooling: float,
) -> tuple[Tensor, ...]:
    """Return the server's update from the answers of some devices.

    Args:
        server: Θ `(K, d)`, and the residuals, degrees of freedom and spreads `(K,)` of all devices.
        heard: devices that have answered before, `(K,)` bool.
        ids: devices that answered, `(M,)`.
        update: their change of Θ `(M, d)`, residuals, degrees of freedom and spreads `(M,)`.
        noise: variances `(K,)` if they are given.
        pooling: degrees of freedom of all devices' noise in that of each.

    Returns:
        Θ anew, the other three anew `(3, K)`, `heard` anew, Θ with zeros in rows that have not been heard, and the four
        numbers of `write_renewed`.

    Raises:
        IndexError: an id is not a device's.
    """
    theta, heard = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (server[0], heard))
    summary, fresh = torch.stack(tuple(server[1:])), torch.stack(tuple(update[1:]))
    known, numbers = torch.empty_like(theta), theta.new_empty(4)
    given = theta.new_empty(0) if noise is None else noise.contiguous()
    read = (part.numpy() for part in (ids.contiguous(), update[0].contiguous(), fresh, given))
    out = (theta, summary, heard, known, numbers)
    if not write_renewed(*read, pooling, *(part.numpy() for part in out)):
        raise IndexError(f"Expected numbers of {len(theta)} devices, but got {int(ids.min())} to {int(ids.max())}")
    return out
