"""What FedLin's paper says, once more in plain NumPy: no line of the package, nor of PyTorch, is in these functions.

`experiments.fedlin.printed` holds them against the package and against what is published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = Sequence[tuple[Array, Array]]  # (X_k, y_k) of every device


def least_squares(rows: Rows) -> Array:
    """Every device alone, `(K, d)`."""
    return np.stack([np.linalg.lstsq(x, y, rcond=None)[0] for x, y in rows])


def descended(rows: Rows, rate: float, steps: int, start: Array | None = None) -> Array:
    """Every device alone by gradient steps on its mean squared error, `(K, d)`."""
    gram, cross = per_row(rows)
    theta = np.zeros_like(cross) if start is None else start
    for _ in range(steps):
        theta = theta + 2 * rate * (cross - (gram @ theta[..., None])[..., 0])
    return theta


def per_row(rows: Rows) -> tuple[Array, Array]:
    """X'X / n `(K, d, d)` and X'y / n `(K, d)`."""
    return np.stack([x.T @ x / len(y) for x, y in rows]), np.stack([x.T @ y / len(y) for x, y in rows])


def algorithm_1(rows: Rows, rate: float, steps: int, rounds: int, alpha: float) -> Array:
    """Algorithm 1 as printed, with mean gradients: local steps, one shrinkage by the same rate, then Ω."""
    theta, omega = np.zeros((len(rows), rows[0][0].shape[1])), np.eye(len(rows))
    for _ in range(rounds):
        theta = descended(rows, rate, steps, theta)
        theta = theta - 2 * rate * np.linalg.solve(omega, theta)
        omega = (1 - alpha) * omega + alpha / theta.shape[1] * theta @ theta.T
    return theta


def bayes(rows: Rows, omega: Array, noise: float) -> Array:
    """The posterior mean of who knows Ω and the noise variance: the least risk that any estimator has, `(K, d)`."""
    devices, d = len(rows), rows[0][0].shape[1]
    matrix = np.kron(np.linalg.inv(omega), np.eye(d))
    right = np.zeros(devices * d)
    for k, (x, y) in enumerate(rows):
        place = slice(k * d, (k + 1) * d)
        matrix[place, place] += x.T @ x / noise
        right[place] = x.T @ y / noise
    return np.linalg.solve(matrix, right).reshape(devices, d)


def joint_mode(rows: Rows, rounds: int = 2000) -> Array:
    """Θ at the mode of (Θ, Ω) under the inverse-Wishart prior of the package's HM1, alternating exactly, `(K, d)`."""
    devices, d = len(rows), rows[0][0].shape[1]
    theta = least_squares(rows)
    residual = np.array([((y - x @ own) ** 2).sum() for (x, y), own in zip(rows, theta)])
    freedom = np.array([len(y) - d for _, y in rows], dtype=float)
    noise = (residual + 4 * residual.sum() / freedom.sum()) / (freedom + 4)
    grams = [x.T @ x for x, _ in rows]
    typical = np.sort(noise * np.array([np.trace(np.linalg.inv(gram)) / d for gram in grams]))[(devices - 1) // 2]
    m = d + devices + 1
    blocks = np.zeros((devices * d, devices * d))
    for k, gram in enumerate(grams):
        blocks[k * d : (k + 1) * d, k * d : (k + 1) * d] = gram / noise[k]
    right = np.concatenate([x.T @ y / noise[k] for k, (x, y) in enumerate(rows)])
    for _ in range(rounds):
        omega = typical * np.eye(devices) + theta @ theta.T / m
        new = np.linalg.solve(blocks + np.kron(np.linalg.inv(omega), np.eye(d)), right).reshape(devices, d)
        moved, theta = np.abs(new - theta).max(), new
        if moved < 1e-12:
            break
    return theta


def federated_average(rows: Rows, rate: float, steps: int, rounds: int) -> Array:
    """FedAvg with equal weights, `(d,)`."""
    theta = np.zeros(rows[0][0].shape[1])
    for _ in range(rounds):
        theta = descended(rows, rate, steps, np.tile(theta, (len(rows), 1))).mean(0)
    return theta


def ditto(rows: Rows, rate: float, steps: int, rounds: int, strength: float) -> Array:
    """Ditto: beside FedAvg's model one of each device, drawn to it by strength/2 ‖v − θ̄‖², `(K, d)`."""
    gram, cross = per_row(rows)
    shared, own = np.zeros(cross.shape[1]), np.zeros_like(cross)
    for _ in range(rounds):
        for _ in range(steps):
            own = own - rate * (2 * ((gram @ own[..., None])[..., 0] - cross) + strength * (own - shared))
        shared = descended(rows, rate, steps, np.tile(shared, (len(rows), 1))).mean(0)
    return own


def a_rmse(rows: Rows, theta: Array) -> float:
    """The root mean squared error of each device, averaged."""
    return float(np.mean([np.sqrt(np.mean((y - x @ own) ** 2)) for (x, y), own in zip(rows, theta)]))


def ridge_tails(rows: Rows, points: int = 61) -> Array:
    """The posterior probability of a coefficient's wrong sign under the hierarchical ridge, `(K, d)`, by a grid of φ.

    θ_kj ~ N(0, σ²/λ), y ~ N(Xθ, σ²), log λ and log σ² ~ N(0, 5²): the marginal likelihood is that of a normal density,
    and a device's posterior a mixture of normal densities over the grid.
    """
    from scipy.special import ndtr

    logs, noises = np.linspace(-4, 12, points), np.linspace(-1.5, 1.0, points)
    weight = -(logs[:, None] ** 2 + noises**2) / 50
    parts = []
    for x, y in rows:
        values, vectors = np.linalg.eigh(x.T @ x)
        along, power = vectors.T @ x.T @ y, y @ y
        grid = values[None] + np.exp(logs)[:, None]  # of (X'X + λI)
        fit = power - (along**2 / grid).sum(1)
        free = x.shape[1] * logs - np.log(grid).sum(1)
        weight = weight + 0.5 * free[:, None] - 0.5 * len(y) * noises - 0.5 * fit[:, None] * np.exp(-noises)
        mean = (along / grid) @ vectors.T
        parts.append((mean, (vectors**2 @ (1 / grid).T).T))
    weight = np.exp(weight - weight.max())
    weight /= weight.sum()
    tails = []
    for mean, unit in parts:  # (P, d) each; sd² = σ² unit
        sd = np.sqrt(unit[:, None] * np.exp(noises)[None, :, None])
        below = (weight[..., None] * ndtr(-mean[:, None] / sd)).sum((0, 1))
        tails.append(np.minimum(below, 1 - below))
    return np.stack(tails)


def lasso_tails(rows: Rows, sweeps: int, seed: int) -> Array:
    """The same under the hierarchical lasso, by Gibbs sampling."""
    below = (lasso_draws(rows, sweeps, seed) < 0).mean(0)
    return np.minimum(below, 1 - below)


def lasso_draws(rows: Rows, sweeps: int, seed: int) -> Array:
    """Draws of all coefficients, `(sweeps, K, d)`, by Gibbs sampling (Park and Casella, 2008).

    φ = (log λ, log σ²) moves by Metropolis steps.
    θ_kj Laplace of diversity σ/λ: θ_kj ~ N(0, σ² s_kj), s_kj exponential of rate λ²/2; log λ and log σ² ~ N(0, 5²).
    """
    generator = np.random.default_rng(seed)
    d = rows[0][0].shape[1]
    grams, crosses = [x.T @ x for x, _ in rows], [x.T @ y for x, y in rows]
    theta, scales = np.zeros((len(rows), d)), np.ones((len(rows), d))
    log_rate, log_noise, kept = 1.0, 0.0, []
    for sweep in range(sweeps + sweeps // 4):
        rate, sd = np.exp(log_rate), np.exp(log_noise / 2)
        for k, (gram, cross) in enumerate(zip(grams, crosses)):
            factor = np.linalg.cholesky(gram + np.diag(1 / scales[k]))
            mean = np.linalg.solve(factor.T, np.linalg.solve(factor, cross))
            theta[k] = mean + sd * np.linalg.solve(factor.T, generator.standard_normal(d))
        scales = 1 / generator.wald(rate * sd / np.maximum(np.abs(theta), 1e-12), rate**2)
        misfit = sum(float(((y - x @ own) ** 2).sum()) for (x, y), own in zip(rows, theta))
        total = misfit + float((theta**2 / scales).sum())
        count = sum(len(y) for _, y in rows) + theta.size

        def of_noise(value: float, total: float = total, count: int = count) -> float:
            return -0.5 * count * value - 0.5 * total * np.exp(-value) - value**2 / 50

        def of_rate(value: float, spread: float = float(scales.sum())) -> float:
            return 2 * theta.size * value - 0.5 * np.exp(2 * value) * spread - value**2 / 50

        log_noise = _metropolis(of_noise, log_noise, 2.4 * np.sqrt(2 / count), generator)
        log_rate = _metropolis(of_rate, log_rate, 2.4 / np.sqrt(4 * theta.size), generator)
        if sweep >= sweeps // 4:
            kept.append(theta.copy())
    return np.stack(kept)


def _metropolis(
    log_density: Callable[[float], float], value: float, step: float, generator: np.random.Generator
) -> float:
    for _ in range(3):
        trial = value + step * generator.standard_normal()
        if np.log(generator.uniform()) < log_density(trial) - log_density(value):
            value = trial
    return value
