r"""Expectations under a normal density times a factor, by nodes that adapt to the product.

The nodes of a rule for N(0, I) are moved to N(m, LL'), at first the normal density itself. A node ζ_i then has the
weight

.. math:: w_i \propto \omega_i \, \frac{N(\zeta_i; \text{cavity})\, f(\zeta_i)}{N(\zeta_i; m, LL')}.

The rule then moves to the mean and covariance of the weighted nodes, until they are its own. If the nodes cover too
little, because the product is much narrower or elsewhere, ratios are tempered to the greatest power that they cover. A
factor that is much sharper than the cavity is therefore found without derivatives, and a rule's error is due only to
the product's deviation from a normal density: over thousands of factors no other errors add up.

Source: Naylor and Smith (1982), "Applications of a method for the efficient computation of posterior distributions";
tempering as in adaptive importance sampling (Cappé et al., 2004).

>>> from fedtorch.models import quadrature
>>> rule = quadrature.gauss_hermite(1, points=3)
>>> float((rule.weights * rule.nodes[:, 0] ** 4).sum().round(decimals=9))  # E z⁴
3.0
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Moments

_POINTS = {0: 1, 1: 25, 2: 11, 3: 7, 4: 5}  # of the product rule, per dimension, by dimension
_MOST_DESIGNED = 20  # dimensions
_MOVES = 60  # most moves of the rule
_ROUGH_MOVES = 12  # the same with a rough factor, before the factor itself is evaluated
_PATIENT = 8  # moves after which rules with sufficient nodes go half the way
_BISECTIONS = 20
_FITS = 0.02  # difference between the rule's and the product's moments at convergence, in the rule's units
_PLACED = 0.1  # the same for a rule of fewer nodes, or a rough factor
_LOST = 0.25  # the same difference above which, after all moves, nothing has been found
# Least coverage of a density by the nodes, in the rule's units, for a move to its moments. A single node would have no
# spread.
_SHARE = 0.05  # least effective share of the nodes
_LEAST_SPREAD = 0.2  # least eigenvalue of the covariance
_FARTHEST = 2.0  # largest coordinate of the mean


class QuadratureRule(NamedTuple):
    """Nodes and weights for expectations under N(0, I)."""

    nodes: Tensor  # (R, s)
    weights: Tensor  # (R,) positive, of sum 1


class Nodes(NamedTuple):
    """The nodes at which a density was evaluated, and their weights, as `tilt` returns them."""

    nodes: Tensor  # (K, R, s)
    weights: Tensor  # (K, R) of sum 1
    log_normaliser: Tensor  # (K,) log ∫ N(ζ; cavity) f(ζ) dζ
    values: Any  # (K, R, ...) further output of the factor at the nodes


def gauss_hermite(dimensions: int, points: int) -> QuadratureRule:
    """Return the product of Gauss–Hermite rules, exact for polynomials of degree 2 `points` − 1 in each coordinate."""
    if points < 1 or dimensions < 0:
        raise ValueError(f"Expected points of at least 1 and dimensions of at least 0, but got {points}, {dimensions}")
    x, w = (torch.as_tensor(part) for part in _hermite_points(points))
    w = w / w.sum()
    nodes, weights = x.new_zeros((1, 0)), w.new_ones(1)
    for _ in range(dimensions):
        nodes = torch.cat([nodes.repeat_interleave(points, 0), x.repeat(len(nodes))[:, None]], 1)
        weights = (weights[:, None] * w).flatten()
    return QuadratureRule(nodes, weights)


@cache
def _hermite_points(points: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    return numpy.polynomial.hermite_e.hermegauss(points)


def quasi_random(dimensions: int, points: int) -> QuadratureRule:
    """Return Sobol points mapped to N(0, I), with their negatives, and whitened: exact for polynomials of degree 3."""
    if points < 2 * dimensions + 2:
        raise ValueError(f"Expected at least {2 * dimensions + 2} points for {dimensions} dimensions, but got {points}")
    half = (points + 1) // 2
    uniform = torch.quasirandom.SobolEngine(dimensions).draw(half + 1, dtype=torch.float64)[1:]
    normal = torch.special.ndtri(uniform)
    both = torch.cat([normal, -normal])
    factor = torch.linalg.cholesky(both.mT @ both / len(both))
    nodes = torch.linalg.solve_triangular(factor, both.mT, upper=False).mT
    return QuadratureRule(nodes, torch.full((len(nodes),), 1 / len(nodes), dtype=torch.float64))


def two_shells(dimensions: int) -> QuadratureRule:
    """Return central composite designs on two spheres: positive weights, exact up to degree 4, as `tilt` needs.

    On each sphere the ends of the axes and a fractional factorial design of resolution V, which are a spherical design
    with weights 2 : `dimensions`; the radii are those of the Gauss–Laguerre rule for r² ~ χ². The designs on the
    spheres are mirror images, so that moments of degree 5 nearly cancel.
    """
    if dimensions < 1:
        raise ValueError(f"Expected at least 1 dimension, but got {dimensions}")
    n = dimensions
    eye = torch.eye(n, dtype=torch.float64)
    factorial = _resolution_five(n) / n**0.5
    sphere = torch.cat([eye, -eye, factorial])
    share = torch.cat(
        [
            torch.full((2 * n,), 1 / n, dtype=torch.float64),
            torch.full((len(factorial),), n / len(factorial), dtype=torch.float64),
        ]
    ) / (n + 2)
    middle = n / 2 + 1
    half_squares = middle - middle**0.5, middle + middle**0.5
    inner = (half_squares[1] - n / 2) / (half_squares[1] - half_squares[0])
    nodes = torch.cat([sphere * (2 * half_squares[0]) ** 0.5, -sphere * (2 * half_squares[1]) ** 0.5])
    return QuadratureRule(nodes, torch.cat([share * inner, share * (1 - inner)]).to(torch.float64))


def _resolution_five(columns: int) -> Tensor:
    """Return a two-level design `(2^m, columns)` of ±1 in which any four columns are independent."""
    words, sums = [1], {0, 1}  # sums: of up to three words
    singles, pairs = {1}, set[int]()
    while len(words) < columns:
        word = next(w for w in itertools.count(1) if w not in sums)
        sums |= {word} | {word ^ w for w in singles} | {word ^ p for p in pairs}
        pairs |= {word ^ w for w in singles}
        singles.add(word)
        words.append(word)
    runs = torch.arange(2 ** max(words).bit_length())[:, None] & torch.tensor(words)
    parity = torch.zeros_like(runs)
    while bool(runs.any()):
        parity, runs = parity ^ (runs & 1), runs >> 1
    return 1.0 - 2.0 * parity.to(torch.float64)


def default_rule(dimensions: int) -> QuadratureRule:
    """Return a product rule in up to four dimensions, two spherical designs up to twenty, and quasi-random points."""
    if dimensions in _POINTS:
        return gauss_hermite(dimensions, _POINTS[dimensions])
    return two_shells(dimensions) if dimensions <= _MOST_DESIGNED else quasi_random(dimensions, 64 * dimensions)


def scout_rule(dimensions: int) -> QuadratureRule:
    """Return a rule with few nodes, which finds the position for a larger one."""
    return gauss_hermite(dimensions, 5 if dimensions < 2 else 3) if dimensions < 4 else two_shells(dimensions)


Factor = Callable[[Tensor], tuple[Tensor, Any]]  # ζ (K, R, s) -> log f (K, R), and further output there


def tilt(
    cavity: Moments,
    factor: Factor,
    rule: QuadratureRule,
    scout: QuadratureRule | None = None,
    only: Callable[[Tensor], Factor] | None = None,
    rough: tuple[Factor, Callable[[Tensor], Factor]] | None = None,
) -> Nodes:
    """Return nodes and weights of the densities N(ζ; cavity) f(ζ), for `K` clients at once.

    Args:
        cavity: `(K, s)`, `(K, s, s)`.
        factor: ζ `(K, R, s)` -> (log f `(K, R)`, a tree of further output at the nodes, `(K, R, ...)`).
        rule: for `s` dimensions.
        scout: a rule of fewer nodes that moves first, for an expensive factor; `rule` then starts at its end, and
            itself moves if its moments differ by more than a tenth of an sd.
        only: (indices of clients) -> the factor of these; with it, finished clients are left out of the moves of the
            others.
        rough: an approximation of the factor, and of that of some clients, by which `rule` moves before the factor
            itself is evaluated; it then moves on if its moments differ by more than a tenth of an sd.

    In many dimensions a factor that is a hundred times narrower than the cavity and many sds away may be missed; the
    client's weights are NaN then.
    """
    mean, root = cavity.mean, torch.linalg.cholesky_ex(cavity.covariance).L
    start, fits = (mean, root), _FITS
    few = scout is not None and 0 < 2 * len(scout.weights) < len(rule.weights)
    if scout is not None and few:
        start, fits = _moved(cavity, (mean, root), (mean, root), factor, only, scout, _FITS, 1).place, _PLACED
    if rough is not None:
        start = _moved(cavity, (mean, root), start, *rough, rule, fits, 1, _ROUGH_MOVES).place
        fits = _PLACED
    return _moved(cavity, (mean, root), start, factor, only, rule, fits, 0 if few or rough is not None else 1).nodes


class _Moved(NamedTuple):
    """Final position of a rule."""

    nodes: Nodes
    place: tuple[Tensor, Tensor]  # mean and root


def _moved(
    cavity: Moments,
    whole: tuple[Tensor, Tensor],
    start: tuple[Tensor, Tensor],
    factor: Factor,
    only: Callable[[Tensor], Factor] | None,
    rule: QuadratureRule,
    fits: float,
    least: int,
    most: int = _MOVES,
) -> _Moved:
    """Move a rule from `start` until its nodes have its own moments, with a least and a largest number of moves."""
    powers, weights = _Powers.of(*tree.to(rule, cavity.mean)), rule.weights.to(cavity.mean)
    mean, root = start
    at, ratio, values = now = _evaluated(factor, powers, whole, mean, root)
    if at.shape[2] == 0:
        return _Moved(_weighted(at, weights.log() + ratio, values), start)
    seen = partial(_seen, powers)
    settled = torch.zeros_like(mean[:, 0], dtype=torch.bool)
    for move in range(most - 1):
        shift, half, enough = seen(torch.ones_like(ratio[:, 0]), ratio)
        settled = settled | (enough & (_misfit(shift, half) < fits) & (move >= least))
        all_settled, all_enough = torch.stack([settled.all(), enough.all()]).tolist()
        if all_settled:
            return _Moved(_weighted(at, weights.log() + ratio, values), (mean, root))
        if not all_enough:
            few = ~enough
            shift[few], half[few], _ = seen(_power(seen, ratio[few]), ratio[few])
        if move >= _PATIENT:  # alternation between two positions ends with half a move
            eye = torch.eye(half.shape[-1], dtype=half.dtype, device=half.device)
            shift = torch.where(enough[:, None], shift / 2, shift)
            half = torch.where(enough[:, None, None], (half + eye) / 2, half)
        mean = torch.where(settled[:, None], mean, mean + (root @ shift[..., None])[..., 0])
        root = torch.where(settled[:, None, None], root, root @ half)
        if only is None or not bool(settled.any()):
            now = _evaluated(factor, powers, whole, mean, root)
        else:
            ids = (~settled).nonzero()[:, 0]
            these = _evaluated(only(ids), powers, *tree.take((whole, mean, root), ids))
            now = tree.map(lambda every, some, ids=ids: every.index_copy(0, ids, some), now, these)
        at, ratio, values = now
    shift, half, enough = seen(torch.ones_like(ratio[:, 0]), ratio)
    lost = ~settled & ~(_misfit(shift, half) < _LOST)
    if most < _MOVES:
        lost = lost & ~enough  # sufficiently covered ones can be continued
    there = _weighted(at, torch.where(lost[:, None], torch.nan, weights.log() + ratio), values)
    back = torch.where(lost[:, None], whole[0], mean), torch.where(lost[:, None, None], whole[1], root)
    return _Moved(there, back)


class _Evaluated(NamedTuple):
    """A rule's nodes, the log of cavity times factor over the rule's own density there, and further values."""

    at: Tensor  # (K, R, s)
    ratio: Tensor  # (K, R)
    values: Any


def _evaluated(
    factor: Factor,
    rule: _Powers,
    cavity: tuple[Tensor, Tensor],
    mean: Tensor,
    root: Tensor,
) -> _Evaluated:
    """Evaluate a factor at the rule's nodes for N(mean, root root')."""
    across = rule.nodes.mT.expand(len(mean), -1, -1)
    at = torch.baddbmm(mean[:, :, None], root, across).mT  # with contiguous coordinates
    log_factor, values = factor(at)
    same = mean is cavity[0] and root is cavity[1]
    return _Evaluated(at, log_factor if same else log_factor + _log_ratio(rule, cavity, mean, root), values)


def _weighted(at: Tensor, log_weights: Tensor, values: Any) -> Nodes:
    return Nodes(at, torch.softmax(log_weights, 1), log_weights.logsumexp(1), values)


def _misfit(mean: Tensor, factor: Tensor) -> Tensor:
    """Return the distance of the weighted moments from the rule's own, in its units, `(K,)`."""
    eye = torch.eye(mean.shape[1], dtype=mean.dtype, device=mean.device)
    return torch.maximum(mean.abs().amax(1), (factor - eye).abs().amax((1, 2)))


def _power(seen: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], ratio: Tensor) -> Tensor:
    """Return the greatest power in (0, 1) of the ratios that nodes cover sufficiently, `(K,)`."""
    low, top = torch.zeros_like(ratio[:, 0]), torch.ones_like(ratio[:, 0])
    for _ in range(_BISECTIONS):
        middle = (low + top) / 2
        good = seen(middle, ratio)[2]
        low, top = torch.where(good, middle, low), torch.where(good, top, middle)
    return low


class _Powers(NamedTuple):
    """A rule's nodes and their products, in which all moments are sums."""

    nodes: Tensor  # (R, s)
    products: Tensor  # (R, s (s + 1) / 2)
    twice: Tensor  # (s (s + 1) / 2,) how often each is in a square of all coordinates
    weights: Tensor  # (R,)
    log_weights: Tensor  # (R,)

    @staticmethod
    def of(nodes: Tensor, weights: Tensor) -> _Powers:
        size = nodes.shape[1]
        twice = gaussian.pack(2 - torch.eye(size, dtype=nodes.dtype, device=nodes.device))
        return _Powers(nodes, gaussian.pack(nodes[:, :, None] * nodes[:, None]), twice, weights, weights.log())


def _seen(rule: _Powers, power: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and Cholesky factor of the nodes weighted by ratio ** power, and whether coverage suffices."""
    weights = torch.softmax(rule.log_weights + power[:, None] * ratio, 1)
    mean = weights @ rule.nodes
    covariance = gaussian.unpack(weights @ rule.products) - mean[:, :, None] * mean[:, None]
    effective = 1 / (weights.square() @ (1 / rule.weights))
    factor, info = torch.linalg.cholesky_ex(covariance)
    least = _LEAST_SPREAD * torch.eye(mean.shape[1], dtype=mean.dtype, device=mean.device)
    spread = torch.linalg.cholesky_ex(covariance - least).info == 0
    return mean, factor, (effective >= _SHARE) & (mean.abs().amax(1) <= _FARTHEST) & spread & (info == 0)


def _log_ratio(rule: _Powers, cavity: tuple[Tensor, Tensor], mean: Tensor, root: Tensor) -> Tensor:
    """Return log N(ζ; cavity) − log N(ζ; mean, root root') at the rule's nodes `(K, R)`: a quadratic of these."""
    away = torch.cat([root, (mean - cavity[0])[..., None]], 2)
    white = torch.linalg.solve_triangular(cavity[1], away, upper=False)
    turn, shift = white[..., :-1], white[..., -1]
    bend = gaussian.pack(turn.mT @ turn - torch.eye(turn.shape[2], dtype=turn.dtype, device=turn.device))
    linear = (shift[:, None] @ turn)[:, 0] @ rule.nodes.mT
    constant = turn.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * shift.square().sum(-1)
    return constant[:, None] - linear - 0.5 * ((bend * rule.twice) @ rule.products.mT)
