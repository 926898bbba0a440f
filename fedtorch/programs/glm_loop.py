r"""Gradient steps of K generalised linear models on a CPU, one after another, by SGD, momentum, Adam or AdamW.

With the mean gradient g of a batch, and with λ and h as in `glm_steps`, the slope of client k's objective is

.. math:: s = g(\theta_k) + \lambda_k \theta_k - h_k,

and a step moves θ by −η s, or as `torch.optim.SGD` with momentum, `Adam` and `AdamW` with s as the gradient; plain SGD
first takes the step of λ and h, which gives the same result.

The program takes all steps of a client while its rows are in the cache. The reference is a loop over steps with a few
products each. Bound: one read of the data, or 4 N d T operations a client.

Rows are processed 64 at a time, a tile, transposed into columns, a run of 64 numbers for each feature, so that linear
predictors are sums over features with a row in each lane. If a client uses all of its rows in every step, and they are
not very many, that is done once. Gradients of few features are sums over the same columns, of 16 lanes, which are added
at the end of a step in one order; those of many features are sums of rows as stored. Losses and their derivatives are
computed in float64.

Arrays are flat, one run after another, and are passed whole with the number of a tile: views of them, and branches
between them, would make numba count references in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
from numpy import float64
from torch import Tensor

from fedtorch import tree
from fedtorch.programs.engine import Program, program
from fedtorch.programs.glm_steps import CATEGORICAL, IGNORED, Family
from fedtorch.programs.optimiser_rules import Adam, Momentum, Rule, moments_of, rates_of
from fedtorch.programs.philox import exponential, logarithm
from fedtorch.programs.threads import in_threads

_GAUSSIAN, _BERNOULLI, _CATEGORICAL = 0, 1, 3
_HELD = 2**20  # most numbers of a client's rows stored as columns
_NARROW, _SUMS = 32, 2**10  # most features, and numbers of a gradient, that are summed in lanes
_PRODUCTS = 2**15  # rows, 64 of which have a factor between 1 and 2 each: their product is finite
_LANES, _ROWS = 16, 64
_LOST, _LOGS, _WHOLE, _MOST = 0, 64, 128, 192  # runs of float64
_PLACES = 2**62 - 1  # more than any place


@program(inline=True)
def place(number):
    """Return a nonnegative number as unsigned, so that the compiler does not wrap indices from the end."""
    return number & _PLACES


@program()
def _begun(parameters, first, classes, features, each, weights, width, gradient, sums):
    """Write a client's parameters as weights, and zeros to the accumulators."""
    for c in range(classes):
        theta, offset = place(first + c * each), place(c * (width + 1))
        for j in range(features):
            weights[offset + j] = parameters[theta + j]
        if each > features:
            weights[offset + width] = parameters[theta + features]
    for i in range(len(gradient)):
        gradient[i] = 0.0
    for i in range(len(sums)):
        sums[i] = 0.0


@program()
def _taken(x, y, labels, first, chosen, step, k, begin, end, columns, answers, wholes, tile, width, features):
    """Fill a tile with rows of a client, from row `first` of all; return how many are not left out."""
    to, of_rows, of_labels = place(tile * width * _ROWS), place(2 * tile * _ROWS), place((2 * tile + 1) * _ROWS)
    places = place(len(wholes) - features)  # read from memory, because the compiler would scatter otherwise
    count = 0
    for i in range(begin, end):
        row = first + (chosen[step, k, i] if chosen.shape[2] > 0 else i)
        if len(labels) > 0:
            if labels[row] == IGNORED:
                continue
            wholes[of_labels + count] = labels[row]
        else:
            answers[place(tile * _ROWS) + count] = y[row]
        wholes[of_rows + count] = row
        count += 1
    full = _LANES if count <= _LANES else _ROWS
    for i in range(0, count, 4):
        last = count - 1 - i
        a, b = place(wholes[of_rows + i] * features), place(wholes[of_rows + i + min(1, last)] * features)
        f = place(wholes[of_rows + i + min(2, last)] * features)
        g = place(wholes[of_rows + i + min(3, last)] * features)
        for j in range(features):
            slot = place(to + wholes[places + j] + i)
            columns[slot] = x[a + j]
            columns[slot + 1] = x[b + j]
            columns[slot + 2] = x[f + j]
            columns[slot + 3] = x[g + j]
    for j in range(features):
        for i in range(place(count), full):
            columns[place(to + j * _ROWS) + i] = 0.0
    return count


@program()
def _predict(weights, width, classes, columns, tile, lanes, eta):
    """Write linear predictors of a tile, a run for each class; the constant comes after the `width` weights."""
    for c in range(classes):
        offset, out = place(c * (width + 1)), place(c * _ROWS)
        constant = weights[offset + width]
        for i in range(lanes):
            eta[out + i] = constant
        for j in range(0, width, 4):
            a, b, f, g = weights[offset + j], weights[offset + j + 1], weights[offset + j + 2], weights[offset + j + 3]
            x = place((tile * width + j) * _ROWS)
            for i in range(lanes):
                eta[out + i] += (a * columns[x + i] + b * columns[x + _ROWS + i]) + (
                    f * columns[x + 2 * _ROWS + i] + g * columns[x + 3 * _ROWS + i]
                )


@program()
def _misfits(family, count, eta, answers, tile, sums):
    """Replace linear predictors by derivatives of losses, which are added to sums; some as factors."""
    y = place(tile * _ROWS)
    if family == _GAUSSIAN:
        for i in range(count):
            gap = eta[i] - answers[y + i]
            sums[_LOST + i] += float64(gap * gap)
            eta[i] = gap + gap
    elif family == _BERNOULLI:
        for i in range(count):
            x, answer = float64(eta[i]), float64(answers[y + i])
            e = exponential(-abs(x))
            sums[_LOST + i] += (x if x > 0.0 else 0.0) - x * answer
            sums[_LOGS + i] *= 1.0 + e
            eta[i] = (e if x < 0.0 else 1.0) / (1.0 + e) - answer
    else:
        for i in range(count):
            x, answer = float64(eta[i]), float64(answers[y + i])
            mean = exponential(x)
            sums[_LOST + i] += mean - x * answer
            eta[i] = mean - answer


@program()
def _misfits_of_classes(classes, lanes, count, eta, wholes, tile, sums):
    """Do the same for classes."""
    labels = place((2 * tile + 1) * _ROWS)
    for i in range(lanes):
        sums[_MOST + i] = eta[i]
        sums[_WHOLE + i] = 0.0
    for c in range(1, classes):
        offset = place(c * _ROWS)
        for i in range(lanes):
            x = float64(eta[offset + i])
            sums[_MOST + i] = x if x > sums[_MOST + i] else sums[_MOST + i]
    for i in range(count):
        sums[_LOST + i] += sums[_MOST + i] - float64(eta[place(wholes[labels + i] * _ROWS) + i])
    for c in range(classes):
        offset = place(c * _ROWS)
        for i in range(lanes):
            e = exponential(float64(eta[offset + i]) - sums[_MOST + i])
            sums[_WHOLE + i] += e
            eta[offset + i] = e
    for i in range(count):
        whole = sums[_WHOLE + i]
        sums[_LOST + i] += logarithm(whole) + (whole - whole)  # for NaN the logarithm's formula gives a number
        sums[_WHOLE + i] = 1.0 / whole
    for c in range(classes):
        offset = place(c * _ROWS)
        for i in range(lanes):
            eta[offset + i] *= sums[_WHOLE + i]
    for i in range(count):
        eta[place(wholes[labels + i] * _ROWS) + i] -= 1.0


@program()
def _add_columns(eta, width, classes, columns, tile, count, sums):
    """Add a tile's columns times derivatives to sums of lanes."""
    for c in range(classes):
        gap, out = place(c * _ROWS), c * (width + 1)
        for i in range(place(count), _ROWS):
            eta[gap + i] = 0.0
        if count <= _LANES:
            for j in range(0, width, 4):
                x, to = place((tile * width + j) * _ROWS), place((out + j) * _LANES)
                for i in range(_LANES):
                    a = eta[gap + i]
                    sums[to + i] += a * columns[x + i]
                    sums[to + _LANES + i] += a * columns[x + _ROWS + i]
                    sums[to + 2 * _LANES + i] += a * columns[x + 2 * _ROWS + i]
                    sums[to + 3 * _LANES + i] += a * columns[x + 3 * _ROWS + i]
        else:
            for j in range(0, width, 2):
                x, to = place((tile * width + j) * _ROWS), place((out + j) * _LANES)
                for i in range(_LANES):
                    a, b = eta[gap + i], eta[gap + _LANES + i]
                    f, g = eta[gap + 2 * _LANES + i], eta[gap + 3 * _LANES + i]
                    sums[to + i] += (a * columns[x + i] + b * columns[x + _LANES + i]) + (
                        f * columns[x + 2 * _LANES + i] + g * columns[x + 3 * _LANES + i]
                    )
                    y = x + _ROWS
                    sums[to + _LANES + i] += (a * columns[y + i] + b * columns[y + _LANES + i]) + (
                        f * columns[y + 2 * _LANES + i] + g * columns[y + 3 * _LANES + i]
                    )
        to = place((out + width) * _LANES)
        for block in range(0, count, _LANES):
            for i in range(_LANES):
                sums[to + i] += eta[gap + block + i]


@program()
def _add_rows(eta, x, features, classes, parameters, wholes, tile, count, gradient):
    """Add rows times derivatives to the gradient, four at a time."""
    rows = place(2 * tile * _ROWS)
    for c in range(classes):
        for i in range(place(count), _ROWS):
            eta[place(c * _ROWS) + i] = 0.0
    for i in range(0, count, 4):
        u, v = place(wholes[rows + i] * features), place(wholes[rows + min(i + 1, count - 1)] * features)
        s = place(wholes[rows + min(i + 2, count - 1)] * features)
        t = place(wholes[rows + min(i + 3, count - 1)] * features)
        for c in range(classes):
            gap, out = place(c * _ROWS + i), place(c * parameters)
            a, b, f, g = eta[gap], eta[gap + 1], eta[gap + 2], eta[gap + 3]
            for j in range(features):
                gradient[out + j] += (a * x[u + j] + b * x[v + j]) + (f * x[s + j] + g * x[t + j])
            if parameters > features:
                gradient[out + features] += (a + b) + (f + g)


@program()
def _gathered(sums, width, classes, features, parameters, gradient):
    """Write the gradient, of sums of lanes."""
    for c in range(classes):
        for j in range(parameters):
            offset = place((c * (width + 1) + (j if j < features else width)) * _LANES)
            for i in range(8):
                sums[offset + i] += sums[offset + 8 + i]
            for i in range(4):
                sums[offset + i] += sums[offset + 4 + i]
            gradient[place(c * parameters + j)] = (sums[offset] + sums[offset + 2]) + (
                sums[offset + 1] + sums[offset + 3]
            )


@program()
def _multiplied(sums, used):
    """Add the logarithms of the accumulated products."""
    for i in range(used):
        sums[_LOST + i] += logarithm(sums[_LOGS + i])
        sums[_LOGS + i] = 1.0


@program()
def _told(family, sums, losses, used, seen):
    """Add the mean loss of a step to the losses, and reset the accumulator."""
    if family == _BERNOULLI:
        _multiplied(sums, used)
    share = 1.0 / float64(seen)  # 0 / 0 where all rows are left out, as in torch
    for i in range(used):
        losses[i] += sums[_LOST + i] * share
        sums[_LOST + i] = 0.0


# Steps are separate functions, because a branch among arrays makes numba count references in every step.
@program()
def _scale(slope, seen):
    """Divide a sum by the number of rows."""
    each = slope.dtype.type(1.0 / float64(max(seen, 1)))
    for j in range(len(slope)):
        slope[j] *= each


@program()
def _pull(theta, slope, k, precision, shift):
    """Add the quadratic's slope."""
    at, strength = place(k * len(slope)), precision[place(k)]
    for j in range(len(slope)):
        slope[j] += strength * theta[at + j] - shift[at + j]


@program()
def _pull_first(theta, k, length, lr, precision, shift):
    """Take a step along the quadratic."""
    at, size = place(k * length), theta.dtype.type(lr)
    keep = theta.dtype.type(1.0 - lr * float64(precision[place(k)]))
    for j in range(length):
        theta[at + j] = theta[at + j] * keep + size * shift[at + j]


@program()
def _descend(theta, slope, k, lr):
    """Take a step of plain descent."""
    at, size = place(k * len(slope)), theta.dtype.type(lr)
    for j in range(len(slope)):
        theta[at + j] -= size * slope[j]


@program()
def _descend_with_momentum(theta, slope, k, lr, numbers, moments, t):
    """Take step number t of `optimiser_rules.Momentum`."""
    at, real = place(k * len(slope)), theta.dtype.type
    size, beta, fresh = real(lr), real(numbers[0]), real(1.0 - numbers[1] if t > 0 else 1.0)
    now, momentum = real(numbers[3]), real(numbers[0] if numbers[3] > 0.0 else 1.0)
    for j in range(len(slope)):
        mean = beta * moments[at + j] + fresh * slope[j]
        theta[at + j] -= size * (now * slope[j] + momentum * mean)
        moments[at + j] = mean


@program()
def _descend_as_adam(theta, slope, k, lr, root, keep, numbers, moments):
    """Take a step of `optimiser_rules.Adam`."""
    at, real = place(k * len(slope)), theta.dtype.type
    second = place(at + len(theta))
    size, correction, less, eps = real(lr), real(root), real(keep), real(numbers[2])
    fresh, beta, fresh2 = real(1.0 - numbers[0]), real(numbers[1]), real(1.0 - numbers[1])
    for j in range(len(slope)):
        mean = moments[at + j] + fresh * (slope[j] - moments[at + j])
        square = beta * moments[second + j] + fresh2 * slope[j] * slope[j]
        theta[at + j] = theta[at + j] * less - size * mean / (numpy.sqrt(square) / correction + eps)
        moments[at + j] = mean
        moments[second + j] = square


def _steps_of(real: str) -> Program:
    """Return the program for numbers of a type, in numba's words."""
    signature = (
        f"void(int64[::1], {real}[::1], {real}[::1], int64[::1], int64[::1], int64[:, :, :], int64[:, :], "
        f"{real}[::1], {real}[::1], {real}[::1], float64[::1], float64[::1], float64[:, ::1], {real}[::1], "
        f"int64, int64, int64)"
    )

    def take_steps(
        sizes,
        x,
        y,
        labels,
        total,
        chosen,
        size,
        precision,
        shift,
        theta,
        losses_out,
        numbers,
        rates,
        moments,
        first,
        begin,
        end,
    ):
        family, longest, features, parameters, classes, rule, most = sizes[:7]
        width, length = max(4, (features + 3) // 4 * 4), classes * parameters
        narrow = width <= _NARROW and classes * (width + 1) <= _SUMS and not 0 < chosen.shape[2] <= _LANES
        tiles = (longest + _ROWS - 1) // _ROWS
        hold = chosen.shape[2] == 0 and tiles * width * _ROWS <= most
        tiles = tiles if hold else 1
        eta, weights = numpy.zeros(classes * _ROWS, x.dtype), numpy.zeros(classes * (width + 1), x.dtype)
        gradient = numpy.zeros(length, x.dtype)
        lanes = numpy.zeros(classes * (width + 1) * _LANES if narrow else 0, x.dtype)
        columns, answers = numpy.zeros(tiles * width * _ROWS, x.dtype), numpy.zeros(tiles * _ROWS, x.dtype)
        wholes, counts = numpy.zeros(2 * tiles * _ROWS + features, numpy.int64), numpy.zeros(tiles, numpy.int64)
        wholes[2 * tiles * _ROWS :] = numpy.arange(features) * _ROWS
        sums, losses = numpy.zeros(4 * _ROWS), numpy.zeros(_ROWS)
        sums[_LOGS:_WHOLE] = 1.0
        for k in range(begin, end):
            held = 0  # rows that the tiles hold
            for step in range(min(len(size), total[k] - first)):
                here, seen = size[step, k], 0
                _begun(theta, k * length, classes, features, parameters, weights, width, gradient, lanes)
                for begins in range(0, here, _ROWS):
                    tile = begins // _ROWS if hold else 0
                    if held != here or not hold:
                        rows, ends = k * longest, min(begins + _ROWS, here)
                        counts[tile] = _taken(
                            x,
                            y,
                            labels,
                            rows,
                            chosen,
                            step,
                            k,
                            begins,
                            ends,
                            columns,
                            answers,
                            wholes,
                            tile,
                            width,
                            features,
                        )
                    count = counts[tile]
                    if count > 0:
                        seen += count
                        if family == _BERNOULLI and begins > 0 and begins % _PRODUCTS == 0:
                            _multiplied(sums, _ROWS)
                        full = (count + _LANES - 1) // _LANES * _LANES
                        _predict(weights, width, classes, columns, tile, full, eta)
                        if family == _CATEGORICAL:
                            _misfits_of_classes(classes, full, count, eta, wholes, tile, sums)
                        else:
                            _misfits(family, count, eta, answers, tile, sums)
                        if narrow:
                            _add_columns(eta, width, classes, columns, tile, count, lanes)
                        else:
                            _add_rows(eta, x, features, classes, parameters, wholes, tile, count, gradient)
                if narrow:
                    _gathered(lanes, width, classes, features, parameters, gradient)
                held = here
                _told(family, sums, losses, max(1, min(here, _ROWS)), seen)
                t = first + step
                row = t if len(rates) > 1 else 0
                lr = rates[row, 0]
                _scale(gradient, seen)
                if len(precision) > 0 and rule == 0:
                    _pull_first(theta, k, length, lr, precision, shift)
                elif len(precision) > 0:
                    _pull(theta, gradient, k, precision, shift)
                if rule == 0:
                    _descend(theta, gradient, k, lr)
                elif rule == 1:
                    _descend_with_momentum(theta, gradient, k, lr, numbers, moments, t)
                else:
                    _descend_as_adam(theta, gradient, k, lr, rates[row, 1], rates[row, 2], numbers, moments)
            for i in range(_ROWS):
                losses_out[k] += losses[i]
                losses[i] = 0.0

    return program(signature)(take_steps)


_STEPS = {torch.float32: _steps_of("float32"), torch.float64: _steps_of("float64")}
take_steps, take_steps_wide = _STEPS.values()


def run(
    family: int,
    x: Tensor,
    y: Tensor,
    theta: Tensor,
    runs: Iterable[tuple[Tensor | None, Tensor]],
    lr: float,
    total: Tensor,
    pull: tuple[Tensor, Tensor] | None,
    rule: Momentum | Adam | None,
) -> tuple[Tensor, Tensor]:
    """Return the parameters `(K, p, C)` after all steps, and the sum `(K,)` of the mean losses, in float64.

    Args:
        family: its code.
        x, y, runs, lr, total, rule: as of `glm_loop`.
        theta: `(K, p, C)`.
        pull: (λ, h), `(K,)` and `(K, p, C)`, or None.
    """
    clients, parameters, classes = theta.shape
    weights, losses = theta.mT.clone(memory_format=torch.contiguous_format), torch.zeros(clients, dtype=torch.float64)
    nothing = x.new_empty(0)
    pulls = (nothing, nothing) if pull is None else (pull[0].to(x.dtype), pull[1].mT.to(x.dtype))
    moments = weights.new_zeros(moments_of(rule) * weights.numel())
    answers = (nothing, y) if family == _CATEGORICAL else (y, y.new_empty(0, dtype=torch.int64))
    code, numbers = _encoded(rule)
    sizes = numpy.array([family, *x.shape[1:], parameters, classes, code, _HELD])
    before = sizes, *(_flat(part) for part in (x, *answers, total.long()))
    after = (
        *(_flat(part) for part in (*pulls, weights, losses)),
        numbers,
        rates_of(rule, lr, total).contiguous().numpy(),
        _flat(moments),
    )
    first, take = 0, _STEPS[x.dtype]
    for place, size in runs:
        places = torch.empty(1, 1, 0, dtype=torch.int64) if place is None else place.long()
        now = places.numpy(), size.long().numpy()
        call = lambda begin, end, now=now, at=first: take(*before, *now, *after, at, begin, end)
        in_threads(call, clients, len(size) * x.nbytes // max(clients, 1))
        first += len(size)
    return weights.mT, losses


def _encoded(rule: Momentum | Adam | None) -> tuple[int, numpy.ndarray]:
    """Return rule and numbers of the program."""
    if isinstance(rule, Momentum):
        return 1, numpy.array([rule.momentum, rule.dampening, 0.0, rule.nesterov])
    return (0, numpy.zeros(4)) if rule is None else (2, numpy.array([*rule.betas, rule.eps, 0.0]))


def _flat(tensor: Tensor) -> numpy.ndarray:
    return tensor.detach().contiguous().view(-1).numpy()


_RUN = 2**10  # steps in a run of the loop, which stay in the cache


def glm_loop(
    family: Family,
    x: Tensor,
    y: Tensor,
    start: Tensor,
    runs: Callable[[int | None], Iterable[tuple[Tensor | None, Tensor]]],
    *,
    lr: float,
    total: Tensor,
    precision: Tensor | None = None,
    shift: Tensor | None = None,
    rule: Rule | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the parameters after all steps, in the shape of `start`, and the mean loss `(K,)` without λ and h.

    Args:
        family, x, y, start, lr, precision, shift: as of `glm_steps`.
        runs: the most rows of a run, None for any number -> runs: of S consecutive steps the rows `(S, K, B)`, of which
            those beyond a client's size repeat others, or None for the first ones; and the sizes `(S, K)`. No client
            takes its last step within one.
        total: `(K,)` steps of each client.
        rule: how slopes become steps; None for plain SGD.

    Not differentiable: if a gradient is needed, the loop runs, whose in-place operations make torch raise an error.
    """
    theta = start.reshape(*start.shape[:2], -1)
    pulled = None if precision is None or shift is None else (precision, shift.reshape(theta.shape))
    tensors = (x, y, start, total, *(pulled or ()))
    if _known(family, tensors, theta.shape[2]):
        theta, losses = run(family.code, x, y, theta, runs(None), lr, total, pulled, rule)
        return theta.reshape(start.shape), (losses / total).to(start.dtype)
    return _looped(family, x, y, start, runs(_RUN), lr, total, precision, shift, rule)


def _known(family: Family, tensors: Sequence[Tensor], classes: int) -> bool:
    """Return whether the program supports these tensors, in particular x, y and the start."""
    x, y, start = tensors[:3]
    taking = _STEPS.get(x.dtype)
    if start.dtype != x.dtype or taking is None or not taking.usable(tensors):
        return False
    if family.code != CATEGORICAL.code:
        return y.dtype == x.dtype
    known = (y == IGNORED) | ((y >= 0) & (y < classes))  # others end with torch's error
    return y.dtype == torch.int64 and bool(known.all())


def _looped(
    family: Family,
    x: Tensor,
    y: Tensor,
    start: Tensor,
    runs: Iterable[tuple[Tensor | None, Tensor]],
    lr: float,
    total: Tensor,
    precision: Tensor | None,
    shift: Tensor | None,
    rule: Rule | None,
) -> tuple[Tensor, Tensor]:
    """Compute `glm_loop` by a loop over steps, in which finished clients take no part."""
    rows = x if start.shape[1] == x.shape[2] else torch.cat([x, torch.ones_like(x[..., :1])], -1)
    width, (flat, responses) = x.shape[1], (rows.flatten(0, 1), y.flatten())
    theta = start.reshape(*start.shape[:2], -1).clone(memory_format=torch.contiguous_format)
    losses = start.new_zeros(len(start), dtype=torch.float64)
    pull = None if precision is None or shift is None else (precision[:, None, None], shift.reshape(theta.shape))
    moments = tuple(torch.zeros_like(theta) for _ in range(moments_of(rule)))
    done, ends = (torch.empty_like(theta), torch.empty_like(losses)), set(total.tolist())
    whole = rows[None], y[None]  # of the active clients, for steps that use all rows
    client, here = torch.arange(len(start)), (theta, losses, pull, width * torch.arange(len(start))[:, None], moments)
    step = 0
    for place, size in runs:
        if step in ends:
            left = total[client] > step
            done[0][client], done[1][client] = here[:2]
            client, here = client[left], tree.take(here, left.nonzero()[:, 0])
            whole = whole if place is not None else (rows[client][None], y[client][None])
        step += len(size)
        if len(client) < size.shape[1]:
            place, size = None if place is None else place[:, client], size[:, client]
        if place is None:
            design, response = whole
        else:
            at = (place + here[3]).flatten()
            design = flat.index_select(0, at).view(*place.shape, -1)
            response = responses.index_select(0, at).view(place.shape)
        _run(family, here, design, response, size, lr, rule, step - len(size))
    done[0][client], done[1][client] = here[:2]
    return done[0].reshape(start.shape), (done[1] / total).to(start.dtype)


def _run(
    family: Family,
    here: Any,
    design: Tensor,
    response: Tensor,
    size: Tensor,
    lr: float,
    rule: Rule | None,
    first: int,
) -> None:
    """Take the steps of sizes `(S, K)` of the active clients, in place; rows are of each step, or of all."""
    theta, losses_sum, pull, _, moments = here
    steps, labels, share = len(size), family.code == CATEGORICAL.code, 1 / design.shape[2]
    inside = None
    if labels and bool((response == IGNORED).any()):
        inside = response != IGNORED
        response = response.where(inside, 0)
    if not bool((size == design.shape[2]).all()):
        counted = torch.arange(design.shape[2]) < size[..., None]
        inside = counted if inside is None else counted & inside
    wanted = (response if labels else response.to(theta.dtype))[..., None]
    weights = None
    if inside is not None:
        seen = inside.sum(2)
        weights, share = (inside.to(theta.dtype) / seen.clamp(min=1)[..., None])[..., None], 1.0
    each = [_of(steps, part).unbind() for part in (design, design.mT, wanted)]
    weight = (None,) * steps if weights is None else _of(steps, weights).unbind()
    less = theta.new_full((), -1.0).expand(wanted.shape[1:])
    keep, push = (None, None) if pull is None or rule is not None else (1 - lr * pull[0], lr * pull[1])
    outputs = []  # inputs of the losses: linear predictors, or the log probabilities of labels
    for number, (x, transposed, y, w) in enumerate(zip(*each, weight), first):
        predictor = x @ theta
        if labels:
            log = predictor.log_softmax(-1)
            outputs.append(log.gather(-1, y))
            gap = log.exp_().scatter_add_(-1, y, less)
        else:
            outputs.append(predictor)
            gap = family.misfit(predictor, y)
        if w is not None:
            gap *= w
        if rule is None:
            if keep is not None:
                theta.mul_(keep).add_(push)
            theta.baddbmm_(transposed, gap, alpha=-lr * share)
            continue
        slope = (transposed @ gap).mul_(share)
        rule.step(theta, slope if pull is None else slope.addcmul_(pull[0], theta).sub_(pull[1]), moments, number, lr)
    logged = torch.stack(outputs)
    losses = (-logged if labels else family.loss(logged, _of(steps, wanted), reduction="none"))[..., 0]
    if inside is None:
        losses_sum += losses.mean(2).sum(0)
    else:  # 0 / 0 where all are left out, as in torch
        losses_sum += (torch.where(inside, losses, 0.0).sum(2) / seen).sum(0)


def _of(steps: int, part: Tensor) -> Tensor:
    """Return the part for each of the steps, if it is common to all."""
    return part.expand(steps, *part.shape[1:])
