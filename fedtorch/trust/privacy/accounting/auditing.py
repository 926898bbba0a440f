r"""Audits: empirical lower bounds on ε from many runs of a mechanism on two neighbouring data sets.

A test that distinguishes runs with a canary from those without, by a region T of the releases, errs in one way with
probability P(D → D') and in the other with P(D' → D). For an (ε, δ)-private mechanism

.. math:: e^\varepsilon P_{D \to D'} + P_{D' \to D} \ge 1 - \delta \qquad (9.5),

so counts of hits and false alarms bound its ε from below, whatever it claims:

.. math:: \varepsilon \ge \log \frac{P(A(D) \in T) - \delta}{P(A(D') \in T)},

each probability is at its end of a Clopper–Pearson interval, both holding together with the stated confidence. The
region is chosen on other runs than the counted ones. No audit proves privacy; one above the claim disproves it.

Sources: Jung, "Federated learning: from theory to practice", section 9.2, and "How to be sure?" of section 9.3;
Jagielski, Ullman and Oprea (2020), "Auditing differentially private machine learning"; Nasr et al. (2021), "Adversary
instantiation: lower bounds for differentially private machine learning".

>>> from fedtorch.trust.privacy.accounting.auditing import clopper_pearson
>>> [round(end, 3) for end in clopper_pearson(5, 100, confidence=0.975)]
[0.016, 0.113]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from scipy.special import betaincinv
from torch import Tensor, nn

from fedtorch import tree
from fedtorch.data import from_tensors
from fedtorch.federation.algorithm import LocalSolver, identity
from fedtorch.federation.algorithms.separate import separate
from fedtorch.federation.populations.in_process import InProcess
from fedtorch.federation.runs.run import run as go
from fedtorch.progress import tracked
from fedtorch.trust.privacy._checks import check_delta

Score = Callable[[Tensor], Tensor]  # releases (R, D) -> (R,), large with the canary
_CANARY = 1e3  # in units of any clip that leaves the other rows visible
_CHOICES = 200  # thresholds to choose from


class Region(NamedTuple):
    """A region of scores that indicates one of two neighbours; see `Audit`."""

    threshold: float
    above: bool  # whether it contains the scores above the threshold
    canary: bool  # whether it indicates the runs with the canary


class Audit(NamedTuple):
    """Result of an audit.

    Example:
        >>> from fedtorch.trust import privacy
        >>> inside, outside = torch.ones(1000, 1), torch.zeros(1000, 1)  # of a mechanism without noise
        >>> found = privacy.audit_outputs(inside, outside, delta=1e-5, choosing=100, score=lambda told: told[:, 0])
        >>> found.hits, found.false_alarms, found.runs, round(found.epsilon, 1)  # so much can 900 runs show
        (900, 0, 900, 5.5)
        >>> found.region == Region(threshold=0.0, above=True, canary=True)
        True
    """

    epsilon: float  # lower bound with this confidence; 0 if nothing was found
    hits: int  # runs in the region, of the neighbour that it indicates
    false_alarms: int  # runs in the region, of the other neighbour
    runs: int  # number of counted runs with each neighbour
    region: Region
    delta: float
    confidence: float


def clopper_pearson(count: int, trials: int, confidence: float) -> tuple[float, float]:
    """Return the exact interval of a probability, each end of which holds with `confidence`."""
    low = float(betaincinv(count, trials - count + 1, 1 - confidence)) if count > 0 else 0.0
    high = float(betaincinv(count + 1, trials - count, confidence)) if count < trials else 1.0
    return low, high


def audit(
    solver: Callable[..., LocalSolver],
    *,
    runs: int = 100_000,
    choosing: int = 20_000,
    rounds: int = 1,
    rows: int = 2,
    width: int = 1,
    block: int = 10_000,
    confidence: float = 0.95,
    score: Score | None = None,
) -> Audit:
    """Audit a solver that claims to protect rows, with a worst-case canary gradient.

    One client is one run: with the canary, a row whose gradient is a thousand in the first direction, or with a row of
    zero gradient in its place; all others have gradients of zero. The runs go through `ft.run`, stacked.

    Args:
        solver: `(module, loss=, optimizer=) -> LocalSolver`, such as
            `functools.partial(privacy.example_level, clip=1.0, noise=3.73, sampling_rate=1.0, steps=1, delta=1e-5)`.
        runs: how many runs with each neighbour are counted.
        choosing: how many further runs with each neighbour choose the region, and without `score` also the score.
        rounds: of each run.
        rows: of each client.
        width: parameters of the model.
        block: clients at once.
        confidence: confidence of the bound.
        score: of a run's releases `(R, width)`; default: the first direction, which the canary moves.

    Returns:
        The bound, at the δ that the solver claims.

    Raises:
        ValueError: a solver without a budget, or one that draws the same noise in every block, from a seed.

    Example:
        >>> from functools import partial
        >>> from fedtorch.trust import privacy
        >>> solver = partial(
        ...     privacy.example_level, clip=1.0, noise=1.0, sampling_rate=1.0, steps=1, delta=1e-5,
        ...     entropy=privacy.from_seed(0))
        >>> found = audit(solver, runs=200, choosing=200, block=800)
        >>> from fedtorch.trust.privacy.accounting.analytic import gaussian_epsilon
        >>> 0 < found.epsilon < gaussian_epsilon(1.0, delta=1e-5)
        True
    """
    score = (lambda released: -released[:, 0]) if score is None else score
    canary, nothing = torch.zeros(rows, width, dtype=torch.float64), torch.zeros(rows, width, dtype=torch.float64)
    canary[0, 0] = _CANARY
    target, half = torch.zeros(rows), block // 2
    data = from_tensors([(canary, target)] * half + [(nothing, target)] * half)
    outputs: list[Tensor] = []
    delta = math.nan
    for _ in tracked(range(math.ceil((runs + choosing) / half)), "Audit", unit="block"):
        local = solver(_linear(width), loss=_output, optimizer=_descent)
        if local.budget is None:
            raise ValueError("Expected a solver with a budget, such as privacy.example_level, but got one without")
        run = go(separate(local), InProcess(data), rounds=rounds, progress=False)
        delta = float(run.log["delta"][-1])
        outputs.append(tree.leaves(run.tensors())[0].reshape(2, half, width))
        if len(outputs) > 1 and torch.equal(outputs[0], outputs[-1]):
            raise ValueError("Expected other noise in every block of runs, but got the first block again; see entropy=")
    inside, outside = torch.cat(outputs, 1)[:, : runs + choosing]
    return audit_outputs(inside, outside, delta=delta, choosing=choosing, confidence=confidence, score=score)


def audit_outputs(
    inside: Tensor,
    outside: Tensor,
    *,
    delta: float,
    choosing: int,
    confidence: float = 0.95,
    score: Score | None = None,
) -> Audit:
    """Audit any mechanism by its releases on two neighbouring data sets.

    Args:
        inside: `(R, D)` released with the canary, a row a run.
        outside: `(R, D)` without.
        delta: the δ that is claimed.
        choosing: how many first runs with each neighbour choose the region, and without `score` also the score; the
            other runs are counted.
        confidence: confidence of the bound.
        score: of the releases; default: `learnt_attack`, which needs no knowledge of the mechanism.

    Raises:
        ValueError: too few runs, δ or the confidence out of range.
    """
    check_delta(delta)
    if not 0 < confidence < 1:
        raise ValueError(f"Expected a confidence between 0 and 1, but got {confidence}")
    if not (inside.shape == outside.shape and inside.ndim == 2 and 2 <= choosing < len(inside)):
        raise ValueError(
            f"Expected as many runs (R, D) with the canary as without, more than {choosing} of each, but got "
            f"{tuple(inside.shape)} and {tuple(outside.shape)}"
        )
    if score is None:
        score = learnt_attack(inside[:choosing], outside[:choosing])
    with_canary, without = score(inside), score(outside)
    each = 1 - (1 - confidence) / 2
    region = _choose(with_canary[:choosing], without[:choosing], delta, each)
    hits, false_alarms = _counts(region, with_canary[choosing:], without[choosing:])
    counted = len(inside) - choosing
    return Audit(
        _bound(hits, false_alarms, counted, delta, each), hits, false_alarms, counted, region, delta, confidence
    )


def learnt_attack(
    inside: Tensor, outside: Tensor, ridge: float = 1e-6, features: Callable[[Tensor], Tensor] = identity
) -> Score:
    """Learn a score from runs of known neighbours: Fisher's linear discriminant of the releases.

    Args:
        inside: `(R, D)` released with the canary.
        outside: `(R, D)` without.
        ridge: of the covariance, relative to its diagonal.
        features: of the releases `(R, D)`, `(R, F)`; squares and products also detect a canary that only changes the
            spread.

    Example:
        >>> import torch
        >>> outside = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> score = learnt_attack(outside + torch.tensor([0.0, 5.0]), outside)  # the canary moves the second number
        >>> score(torch.eye(2)).round()
        tensor([0., 5.], dtype=torch.float64)
    """
    inside, outside = features(inside), features(outside)
    spread = torch.cat([inside - inside.mean(0), outside - outside.mean(0)]).to(torch.float64)
    covariance = spread.T @ spread / len(spread)
    covariance += ridge * covariance.diagonal().mean().clamp(min=1e-300) * torch.eye(len(covariance)).to(covariance)
    direction = torch.linalg.solve(covariance, (inside.mean(0) - outside.mean(0)).to(torch.float64))
    return lambda released: features(released).to(torch.float64) @ direction


def roc(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (false alarms, detections) of a neighbour test at every threshold, ascending, from scores `(R,)` each.

    >>> import torch
    >>> inside, outside = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0])
    >>> [rates.tolist() for rates in roc(inside, outside)]
    [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]]
    >>> area(inside, outside)  # three of four pairs are in order, and one is a tie
    0.875
    """
    thresholds = torch.cat([inside, outside]).unique().flip(0)
    below = [torch.searchsorted(each.sort().values, thresholds).to(torch.float64) for each in (outside, inside)]
    rates = [1 - number / len(each) for number, each in zip(below, (outside, inside))]
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([zero, rates[0]]), torch.cat([zero, rates[1]])


def area(inside: Tensor, outside: Tensor) -> float:
    """Return the area under the ROC of scores `(R,)` each: ½ is guessing."""
    alarms, detections = roc(inside, outside)
    return float(torch.trapezoid(detections, alarms))


def _choose(inside: Tensor, outside: Tensor, delta: float, confidence: float) -> Region:
    """Return the region with the best bound among thresholds at quantiles, denser in the tails, on either side."""
    both = torch.cat([inside, outside]).to(torch.float64).sort().values
    tails = torch.logspace(-4, math.log10(0.5), _CHOICES // 2, dtype=torch.float64)
    at = (torch.cat([tails, 1 - tails]) * (len(both) - 1)).long()
    regions = [
        Region(float(threshold), above, canary)
        for threshold in both[at].unique()
        for above in (True, False)
        for canary in (True, False)
    ]
    bounds = [_bound(*_counts(region, inside, outside), len(inside), delta, confidence) for region in regions]
    return regions[max(range(len(regions)), key=bounds.__getitem__)]


def _counts(region: Region, inside: Tensor, outside: Tensor) -> tuple[int, int]:
    """Return (hits, false alarms) of a region."""
    counts = [int(((scores > region.threshold) == region.above).sum()) for scores in (inside, outside)]
    return (counts[0], counts[1]) if region.canary else (counts[1], counts[0])


def _bound(hits: int, false_alarms: int, runs: int, delta: float, confidence: float) -> float:
    low = clopper_pearson(hits, runs, confidence)[0] - delta
    high = clopper_pearson(false_alarms, runs, confidence)[1]
    return max(0.0, math.log(low / high)) if low > 0 else 0.0


def _linear(width: int) -> nn.Module:
    """Return a linear model at zero, whose gradient is its input."""
    module = nn.Linear(width, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    return module


def _output(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def _descent(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)
