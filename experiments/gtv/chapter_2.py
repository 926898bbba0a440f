"""Checks of the book's chapter 2: how far least squares is from the truth, and what augmentation does.

Proposition 2.1 and (2.22), augmentation by noise (2.26) and by interpolation (problem 2.3), the minimax risk (problem
2.1). Parts of `experiments.gtv.book_figures`.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import beta
from torch import Tensor

import fedtorch as ft
from experiments import common

FEATURES, ROWS, NOISE = 5, 30, 0.5
COPIES, STRENGTH = (1, 4, 16, 64, 256, 1024), 0.2


class Check(NamedTuple):
    """A number beside its closed form."""

    setting: str
    metric: str
    ours: float
    form: float = math.nan
    printed: float | None = None


def normal(seed: int, purpose: int, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return ft.random.normal(ft.random.fold_in(ft.random.key(seed), purpose), shape, torch.float64)


def error_bound(seed: int, draws: int) -> list[Check]:
    """Proposition 2.1: the mean error of least squares and its ratio to (2.18); how often (2.22) holds."""
    x, truth = normal(seed, 0, ROWS, FEATURES), torch.ones(FEATURES, dtype=torch.float64)
    noise = NOISE * normal(seed, 1, draws, ROWS)
    fits = torch.linalg.lstsq(x, (x @ truth + noise).T).solution.T
    squared = (fits - truth).square().sum(1)
    least = float(torch.linalg.eigvalsh(x.T @ x / ROWS)[0])
    bound = 4 / ROWS**2 * (noise @ x).square().sum(1) / least**2
    expected = NOISE**2 * float(torch.linalg.inv(x.T @ x).trace())
    holds = float((noise.mean(1).square() <= 4 * noise.square().sum(1) / ROWS**2).double().mean())
    expected_share = float(beta.cdf(4 / ROWS, 0.5, (ROWS - 1) / 2))
    setting = f"2.4 least squares, d = {FEATURES}, m = {ROWS}"
    return [
        Check(setting, "mean of ‖ŵ − w̄‖²", float(squared.mean()), expected),
        Check(setting, "largest ‖ŵ − w̄‖² / (2.18)", float((squared / bound).max()), 0.25),
        Check("2.4 d = 1, x = 1", "share in which (2.22) holds", holds, expected_share, 1.0),
    ]


def risk(seed: int, draws: int) -> tuple[list[Check], list[tuple[int, float, float]]]:
    """Problem 2.1: the risk of least squares of t Gaussian samples is the minimax one, σ²(1 + d/(t − d − 1))."""
    curve = []
    for t in (8, 10, 14, 20, 40, 80, 160):
        x, noise = normal(seed, t, draws, t, FEATURES), NOISE * normal(seed, t + 1000, draws, t, 1)
        error = torch.linalg.solve(x.mT @ x, x.mT @ noise)[..., 0].square().sum(1)  # (2.14): the risk less σ²
        curve.append((t, NOISE**2 + float(error.mean()), NOISE**2 * (1 + FEATURES / (t - FEATURES - 1))))
    return [Check(f"problem 2.1, {t} samples", "risk", ours, form) for t, ours, form in curve if t >= 14], curve


def augmentation(seed: int) -> tuple[list[Check], dict[int, float]]:
    """(2.26): least squares on noisy copies beside ridge regression; their distance falls as one over √copies."""
    x = normal(seed, 0, ROWS, FEATURES)
    y = x.sum(1) + NOISE * normal(seed, 1, ROWS)
    ridge = torch.linalg.solve(x.T @ x / ROWS + STRENGTH * torch.eye(FEATURES).double(), x.T @ y / ROWS)
    apart = {}
    for copies in COPIES:
        found = []
        for repeat in range(20):
            noisy = x.repeat(copies, 1) + STRENGTH**0.5 * normal(seed, 10 + repeat, copies * ROWS, FEATURES)
            found.append(float((torch.linalg.lstsq(noisy, y.repeat(copies)[:, None]).solution[:, 0] - ridge).norm()))
        apart[copies] = float(np.mean(found))
    slope = np.polyfit(np.log(COPIES[2:]), np.log([apart[copies] for copies in COPIES[2:]]), 1)[0]
    return [Check("(2.26) noisy copies", "exponent of the distance to ridge regression", float(slope), -0.5)], apart


def interpolation(seed: int) -> list[Check]:
    """Problem 2.3: the training error on lines between data points, of a line and of a polynomial of degree 9.

    With residuals that add up to zero it is (1 − 2s − 2s/(m − 1)) times the one before, s the mean of r(1 − r): with an
    intercept, a linear model stays what it was.
    """
    x = normal(seed, 0, ROWS)
    y = torch.sin(2 * x) + 0.1 * normal(seed, 1, ROWS)
    first, second = torch.tensor(list(itertools.permutations(range(ROWS), 2))).T
    r = torch.arange(100).double()[:, None] / 100
    between_x, between_y = ((v[first] + (v[second] - v[first]) * r).flatten() for v in (x, y))
    mean = float((r * (1 - r)).mean())
    checks = []
    for name, degree in (("line", 1), ("polynomial of degree 9", 9)):
        powers = lambda at, degree=degree: torch.stack([at**k for k in range(degree + 1)], 1)
        fit = lambda at, to, powers=powers: torch.linalg.lstsq(powers(at), to[:, None], driver="gelsd").solution[:, 0]
        before = float((powers(x) @ fit(x, y) - y).square().mean())
        after = float((powers(between_x) @ fit(between_x, between_y) - between_y).square().mean())
        form = 1 - 2 * mean * (1 + 1 / (ROWS - 1)) if degree == 1 else math.nan
        checks.append(Check(f"problem 2.3, {name}", "training error, after / before", after / before, form))
    return checks


def draw_augmentation(apart: dict[int, float], curve: list[tuple[int, float, float]], seed: int) -> Figure:
    """Figure 2.4, the distance to ridge regression by copies, and the risk by samples."""
    figure, (left, middle, right) = common.subplots(1, 3, figsize=(13, 3.8))
    x = normal(seed, 20, 6)
    y = 1.5 * x + 0.3 * normal(seed, 21, 6)
    noisy = x.repeat(200) + STRENGTH**0.5 * normal(seed, 22, 1200)
    left.plot(noisy, y.repeat(200), ".", color="0.75", markersize=2, label="noisy copies (2.26)")
    left.plot(x, y, "ko", label="data")
    ends = torch.tensor([-3.0, 3.0])
    for label, slope, line in (
        ("least squares", float(x @ y / (x @ x)), "-"),
        ("least squares on the copies", float(noisy @ y.repeat(200) / (noisy @ noisy)), "-"),
        (f"ridge regression, α = {STRENGTH}", float(x @ y / (x @ x + 6 * STRENGTH)), "--"),
    ):
        left.plot(ends, slope * ends, line, label=label)
    left.set_xlabel("x")
    left.set_ylabel("y")
    left.legend(frameon=False, fontsize="small")
    middle.loglog(list(apart), list(apart.values()), "o-", label="least squares on the copies")
    middle.loglog(COPIES, [apart[64] * (64 / copies) ** 0.5 for copies in COPIES], "--", label="one over √copies")
    middle.set_xlabel("copies of a data point")
    middle.set_ylabel("distance to ridge regression")
    right.loglog([t for t, *_ in curve], [ours for _, ours, _ in curve], "o", label="least squares")
    right.loglog([t for t, *_ in curve], [form for *_, form in curve], "-", label="minimax, σ²(1 + d/(t − d − 1))")
    right.axhline(NOISE**2, color="0.5", linestyle=":", label="σ²")
    right.set_xlabel("samples")
    right.set_ylabel("risk")
    for axes in (middle, right):
        axes.legend(frameon=False, fontsize="small")
    return figure
