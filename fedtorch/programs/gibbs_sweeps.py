"""Sweeps of `fedtorch.models.gibbs.gibbs_sweeps` on the CPU; the formulas are there.

A lane is a problem, one chain of one client, and all sweeps of a tile of lanes are done before the next tile. A tile is
always computed in full, so that a problem's bits do not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
from numpy import uint32
from torch import Tensor

from fedtorch.programs.engine import arrays, program
from fedtorch.programs.lanes import LANES, multiply, subtract_multiples, subtract_products
from fedtorch.programs.philox import (
    DRAW,
    GAMMA,
    folded,
    gamma_number,
    inside,
    inside_of_one,
    joined,
    logarithm,
    lower,
    normals,
    philox,
    upper,
    whole,
)
from fedtorch.programs.threads import ENOUGH, in_threads

_BOTH = 2 * LANES  # numbers of two blocks are drawn at a time


# Arrays are flat, one group of lanes after another. A matrix is stored with the vector b in rows of p + 1 groups, and
# only its upper triangle is used. A lane has four keys, for normal, gamma, and two for exponential numbers.
@program()
def _keys(keys, lane, key):
    """Set the four keys of a lane, for both blocks."""
    mixing = folded(key, 2)
    for stream in range(4):
        made, at = folded(mixing if stream >= 2 else key, stream % 2), 2 * _BOTH * stream + lane
        keys[at] = keys[at + LANES] = lower(made)
        keys[at + _BOTH] = keys[at + _BOTH + LANES] = upper(made)


@program()
def _words(words, keys, stream, block):
    """Write the words of two blocks: four runs of the first block's lanes and the second's."""
    of_stream, purpose = keys[2 * _BOTH * stream :], uint32(GAMMA if stream == 1 else DRAW)
    for i in range(LANES):
        words[i] = uint32(block)
        words[LANES + i] = uint32(block + 1)
    for i in range(2 * _BOTH):
        words[4 * _BOTH + i] = of_stream[i]
    for i in range(_BOTH):
        words[i], words[_BOTH + i], words[2 * _BOTH + i], words[3 * _BOTH + i] = philox(
            words[4 * _BOTH + i], words[5 * _BOTH + i], words[i], uint32(0), uint32(0), purpose
        )


@program()
def _normals(words, numbers):
    for i in range(_BOTH):
        numbers[i], numbers[_BOTH + i] = normals(
            inside(words[i], words[_BOTH + i]), inside(words[2 * _BOTH + i], words[3 * _BOTH + i])
        )


@program()
def _exponentials(words, numbers):
    for part in range(2):
        first, out = words[2 * _BOTH * part :], numbers[_BOTH * part :]
        for i in range(_BOTH):
            out[i] = -logarithm(inside(first[i], first[_BOTH + i]))


@program()
def _draw(words, numbers, keys, stream, first, blocks, out):
    """Write the numbers of blocks from `first` on, two groups each; an odd number of blocks is rounded up."""
    for block in range(0, blocks, 2):
        _words(words, keys, stream, first + block)
        if stream == 0:
            _normals(words, numbers)
        else:
            _exponentials(words, numbers)
        here = out[2 * LANES * block :]
        for i in range(LANES):
            here[i] = numbers[i]
            here[LANES + i] = numbers[_BOTH + i]
            here[_BOTH + i] = numbers[LANES + i]
            here[_BOTH + LANES + i] = numbers[_BOTH + LANES + i]


@program()
def _proposed(words, gammas):
    """Replace shape parameters by the first proposals of gamma numbers, rejected ones by -1."""
    for i in range(_BOTH):
        a = gammas[i]
        d = a - 1.0 / 3.0
        x, _ = normals(inside(words[i], words[_BOTH + i]), whole(words[2 * _BOTH + i]) * 2.0**-32)
        root = x / math.sqrt(9.0 * d) + 1.0
        v = root * root * root
        taken = logarithm(inside_of_one(words[3 * _BOTH + i])) < x * x / 2.0 + d * (1.0 - v + logarithm(v))
        gammas[i] = d * v if taken & (v > 0.0) & (a >= 1.0) & (a <= 1e300) else -1.0


@program()
def _gammas(words, gammas, keys, stream, degrees, sweep):
    """Write gamma numbers of two sweeps: nearly all of them are the first proposals, made in all lanes at once."""
    _words(words, keys, stream, sweep)
    for i in range(_BOTH):
        gammas[i] = degrees[i % LANES]
    _proposed(words, gammas)
    of_stream = keys[2 * _BOTH * stream :]
    for i in range(_BOTH):
        if gammas[i] < 0.0:
            key = joined(of_stream[_BOTH + i], of_stream[i])
            gammas[i] = gamma_number(key, sweep + i // LANES, degrees[i % LANES])


@program()
def _eliminated(p, matrix, prior, z, hand, inverse, delta):
    """Write a draw from N(A⁻¹ b, A⁻¹): U x = c + √u z.

    A pivot is at least the prior's part of it; if rounding makes it smaller, as for dependent columns, it is set to
    that part, and the rest of its row to zero.
    """
    width = p + 1
    for j in range(p):
        row, pivot_row, other = matrix[(j * width + j) * LANES :], matrix[(j * width + p) * LANES :], z[j * LANES :]
        least, over, out = prior[j * LANES :], inverse[j * LANES :], delta[j * LANES :]
        short = 0
        for lane in range(LANES):
            short += row[lane] < least[lane]
        if short > 0:
            for lane in range(LANES):
                if row[lane] < least[lane]:
                    row[lane] = least[lane]
                    for k in range(1, width - j):
                        row[k * LANES + lane] = 0.0
        for lane in range(LANES):
            over[lane] = 1.0 / row[lane]
        for lane in range(LANES):
            out[lane] = pivot_row[lane] + math.sqrt(row[lane]) * other[lane]
        for i in range(j + 1, p):
            multiply(hand, 0, inverse, j, matrix, j * width + i, 1)
            subtract_multiples(matrix, i * width + i, hand, 0, matrix, j * width + i, width - i)
    for j in range(p - 1, -1, -1):
        subtract_products(delta, j, matrix, j * width + j + 1, delta, j + 1, p - 1 - j)
        multiply(delta, j, inverse, j, delta, j, 1)


@program()
def _squares(p, gram, gone, hand, squares):
    """Add d'G d to the squares, with d measured from the estimate."""
    for i in range(p):
        at = i * (p + 1) + i
        for lane in range(LANES):
            hand[lane] = 0.0
        subtract_products(hand, 0, gram, at + 1, gone, i + 1, p - 1 - i)
        pivot, difference = gram[at * LANES :], gone[i * LANES :]
        for lane in range(LANES):
            squares[lane] += difference[lane] * (difference[lane] * pivot[lane] - 2.0 * hand[lane])


@program()
def _swept(p, sweeps, gram, vectors, few, drawn, words, keys, matrix):
    """Do all sweeps of a tile."""
    run = p * LANES
    delta, w, u, gap, shared = vectors[:run], vectors[run:], vectors[2 * run :], vectors[3 * run :], vectors[4 * run :]
    prior, inverse, gone = vectors[5 * run :], vectors[6 * run :], vectors[7 * run :]
    noise, least, degrees, scale = few[:LANES], few[LANES:], few[2 * LANES :], few[3 * LANES :]
    squares, hand, gammas = few[4 * LANES :], few[5 * LANES : 6 * LANES], few[6 * LANES : 8 * LANES]
    numbers, each = few[8 * LANES :], 2 * run + _BOTH
    for s in range(sweeps):
        if s % 2 == 0:  # two sweeps have whole blocks
            for stream in range(0, 4):
                if stream == 1:
                    _gammas(words, gammas, keys, stream, degrees, s)
                else:
                    blocks = p if s + 1 < sweeps else (p + 1) // 2
                    _draw(words, numbers, keys, stream, s // 2 * p, blocks, drawn[each * stream :])
        now = drawn[s % 2 * run :]
        for i in range(run):
            prior[i] = w[i] * shared[i]
        for i in range(p):
            at = i * (p + 1) + i
            multiply(matrix, at, noise, 0, gram, at, p + 1 - i)
            pivot, part = matrix[at * LANES :], prior[i * LANES :]
            for lane in range(LANES):
                pivot[lane] += part[lane]
        _eliminated(p, matrix, prior, now, hand, inverse, delta)
        for i in range(run):
            gone[i] = delta[i] - gap[i]
        for lane in range(LANES):
            squares[lane] = least[lane]
        _squares(p, gram, gone, hand, squares)
        first, second, number = now[2 * each :], now[3 * each :], gammas[s % 2 * LANES :]
        for i in range(run):
            w[i] = first[i] / (u[i] + delta[i] * delta[i] * shared[i] / 2.0)
        for i in range(run):
            u[i] = second[i] / (w[i] + 1.0)
        for lane in range(LANES):
            noise[lane] = number[lane] / (scale[lane] + squares[lane] / 2.0)


@program()
def _side_by_side(rows, out, lane):
    """Write numbers of a problem into its lane."""
    for i in range(len(rows)):
        out[i * LANES + lane] = rows[i]


@program(
    "void(float64[:, :, ::1], float64[:, ::1], float64[::1], float64[::1], float64[:, :, ::1], float64[:, :, ::1], "
    "float64[:, ::1], float64[:, :, ::1], float64[:, :, ::1], float64[:, ::1], int64[:, ::1], "
    "float64[:, :, ::1], float64[:, :, ::1], float64[:, :, ::1], float64[:, ::1], int64, int64, int64)"
)
def sweep_tiles(
    gram_of,
    estimate,
    least,
    degrees,
    centre,
    shared,
    scale,
    w,
    u,
    noise,
    keys_of,
    delta_out,
    w_out,
    u_out,
    noise_out,
    sweeps,
    begin,
    end,
):
    """Do all sweeps of problems `begin` to `end`."""
    _, chains, p = centre.shape
    run = p * LANES
    gram, matrix = numpy.empty((p + 1) * run), numpy.empty((p + 1) * run)
    vectors, few, drawn = numpy.empty(8 * run), numpy.empty(12 * LANES), numpy.empty(4 * (2 * run + _BOTH))
    words, keys = numpy.empty(6 * _BOTH, uint32), numpy.empty(8 * _BOTH, uint32)
    for first in range(begin, end, LANES):
        for lane in range(LANES):  # unused lanes repeat the last problem
            at = min(first + lane, end - 1)
            k, c = at // chains, at % chains
            few[lane] = noise[k, c]
            few[LANES + lane] = least[k]
            few[2 * LANES + lane] = degrees[k]
            few[3 * LANES + lane] = scale[k, c]
            for i in range(p):
                _side_by_side(gram_of[k, i], gram[i * (p + 1) * LANES :], lane)
            _side_by_side(w[k, c], vectors[run:], lane)
            _side_by_side(u[k, c], vectors[2 * run :], lane)
            _side_by_side(estimate[k], vectors[3 * run :], lane)
            _side_by_side(shared[k, c], vectors[4 * run :], lane)
            for i in range(p):
                vectors[3 * run + i * LANES + lane] -= centre[k, c, i]
            _keys(keys, lane, keys_of[k, c])
        for i in range(p):
            right, hand = i * (p + 1) + p, few[5 * LANES :]
            for lane in range(LANES):
                hand[lane] = 0.0
            subtract_products(hand, 0, gram, i * (p + 1), vectors, 3 * p, p)
            for lane in range(LANES):
                gram[right * LANES + lane] = -hand[lane]
        _swept(p, sweeps, gram, vectors, few, drawn, words, keys, matrix)
        for lane in range(min(LANES, end - first)):
            k, c = (first + lane) // chains, (first + lane) % chains
            noise_out[k, c] = few[lane]
            for i in range(p):
                delta_out[k, c, i] = vectors[i * LANES + lane]
                w_out[k, c, i] = vectors[run + i * LANES + lane]
                u_out[k, c, i] = vectors[2 * run + i * LANES + lane]


def sweep(read: Sequence[Tensor], written: Sequence[Tensor], sweeps: int) -> None:
    """Do all sweeps of all chains, in as many threads as torch has.

    Args:
        read: the rows' statistics, the chains' inbox, w, u and s before, and keys, all float64 except these.
        written: δ, w, u and s after, contiguous.
        sweeps: of each.
    """
    given, whole = arrays(*read, *written), read[-1].numel()
    call = lambda begin, end: sweep_tiles(*given, sweeps, LANES * begin, min(LANES * end, whole))
    in_threads(call, -(-whole // LANES), ENOUGH)
