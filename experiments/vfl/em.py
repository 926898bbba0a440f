"""SOUL, particle EM and coin EM of the noisy predictors, and SOUL with late parties (appendix A of the VFL source).

All three look for ẑ = argmax_z log ∫ p(y | z) p(z | θ) p(θ) dθ, with θ at the parties: SOUL moves z along gradients
averaged over Langevin chains, with a step that falls; particle EM (Kuntz, Lim and Johansen, 2023) moves z and N
particles at once with one step, each particle a Langevin chain; coin EM (Sharrock, Dodd and Nemeth, 2023) has no step:
z and the particles bet on their gradients, the particles' smoothed by a kernel as in Stein variational gradient
descent. With linear predictors and normal priors θ is integrated out exactly, so that ẑ is the maximum of a concave
function, found by Newton's method, and θ given ẑ is normal: both are the oracle. The data are logistic, of two
parties with three columns each.

Error of z: root mean square of z − ẑ over ρ. Error of means: the largest of E[θ] less that of the posterior of all (z
integrated out as well, by NUTS' peer, the normal approximation at its mode), in its sds. Ratio of sds: those of θ given
ẑ over those of that posterior: what an empirical Bayes answer leaves out, whichever way finds it.

With delays a party moves z_j along a gradient of the likelihood that is so many iterations old, at the sum of the z of
then. ẑ stays the maximum, since at rest an old gradient is a new one; the largest stable step falls with the delay, and
the rate here is divided by delay + 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import common, result_pages
from experiments.vfl.oracles import langevin, party_density, prepared
from fedtorch import random, vfl
from fedtorch.vfl.model import likelihoods

WIDTHS, ROWS, RHO, PARTICLES = (3, 3), 200, 1.0, 16
DELAYS, STEP = (0, 4, 16, 64), 0.002  # the Langevin step
READING = result_pages.Reading(smaller="error")


class Problem(NamedTuple):
    """A model, its data, and what is known of it exactly."""

    model: vfl.VerticalModel
    batch: vfl.VerticalData
    z: Tensor  # (J, n) ẑ
    mean: list[Tensor]  # of θ_j given ẑ, (d_j,)
    covariance: list[Tensor]
    posterior: tuple[Tensor, Tensor]  # mean and sd of θ with z integrated out


def problem(seed: int, rows: int = ROWS) -> Problem:
    """Data of a logistic model, with θ ~ N(0, 1) and no intercept."""
    width = sum(WIDTHS)
    keys = [random.fold_in(random.key(seed), i) for i in range(3)]
    x = random.normal(keys[0], (rows, width), torch.float64)
    chance = (x @ random.normal(keys[1], (width,), torch.float64)).sigmoid()
    y = random.bernoulli(keys[2], chance, (rows,)).double()
    data = vfl.VerticalData(x.split(WIDTHS, 1), y)
    model = vfl.augmented(likelihoods.bernoulli(), [vfl.linear(w) for w in WIDTHS], RHO, intercept=False)
    z = mode(data, lambda j: RHO**2 * torch.eye(rows, dtype=x.dtype) + data.features[j] @ data.features[j].mT)
    precision = [part.mT @ part / RHO**2 + torch.eye(part.shape[1], dtype=x.dtype) for part in data.features]
    covariance = [torch.linalg.inv(each) for each in precision]
    mean = [c @ part.mT @ value / RHO**2 for c, part, value in zip(covariance, data.features, z)]
    return Problem(model, prepared(model, data), z, mean, covariance, collapsed(x, y))


def mode(data: vfl.VerticalData, prior: Callable[[int], Tensor]) -> Tensor:
    """ẑ of all parties, `(J, n)`, by Newton's method on Σ z: z_j = S_j (y − σ(Σ z)), S_j the prior's covariance."""
    covariances = [prior(j) for j in range(len(data.features))]
    total, eye = sum(covariances, torch.zeros_like(covariances[0])), torch.eye(len(data.response), dtype=torch.float64)
    s = torch.zeros_like(data.response)
    for _ in range(50):
        chance = s.sigmoid()
        curvature = (chance * (1 - chance))[None, :]
        s = s - torch.linalg.solve(eye + total * curvature, s - total @ (data.response - chance))
    residual = data.response - s.sigmoid()
    return torch.stack([each @ residual for each in covariances])


def collapsed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sd of θ with z integrated out, by importance sampling around the mode of p(θ | y)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(21)
    at, log_weight = torch.tensor(nodes), torch.tensor(weights / math.sqrt(2 * math.pi)).log()
    sd = math.sqrt(len(WIDTHS)) * RHO

    def log_density(theta: Tensor) -> Tensor:
        s = theta @ x.mT
        rows = torch.nn.functional.logsigmoid((2 * y - 1) * (s.unsqueeze(-1) + sd * at).movedim(-1, 0)).movedim(0, -1)
        return (rows + log_weight).logsumexp(-1).sum(-1) - 0.5 * theta.square().sum(-1)

    theta = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(30):
        hessian = torch.func.hessian(log_density)(theta)
        theta = theta - torch.linalg.solve(hessian, torch.func.grad(log_density)(theta))
    around = torch.distributions.MultivariateNormal(theta, torch.linalg.inv(-hessian) * 1.2)
    noise = random.normal(random.key(0), (4000, len(theta)), torch.float64)
    draws = theta + noise @ around.scale_tril.mT
    weight = (torch.stack([log_density(part) for part in draws.split(1)]).flatten() - around.log_prob(draws)).softmax(0)
    mean = weight @ draws
    return mean, (weight @ (draws - mean).square()).sqrt()


def gradients(
    of: Problem, z: Sequence[Tensor], thetas: Sequence[Tensor], stale: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """∇_z of log p(y, z, θ), averaged over particles; the likelihood's at `stale` z, where they are given."""
    leaves = [value.detach().requires_grad_() for value in z]
    gamma = torch.zeros(1, 1, 0, dtype=torch.float64)
    own = [party_density(of.model, of.batch, j, theta, leaves, gamma).mean(1) for j, theta in enumerate(thetas)]
    known = torch.autograd.grad(torch.stack(own).sum(), leaves)
    total = torch.stack(list(z if stale is None else stale)).sum(0).detach().requires_grad_()
    centre, shared = of.model.centre(gamma, total, None)
    likelihood = of.batch.weighted_sum(of.model.likelihood.log_prob(of.batch.y, centre, shared)).sum()
    (shift,) = torch.autograd.grad(likelihood, total)
    return [each + shift for each in known]


def start(of: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """z and particles at zero."""
    zeros = lambda *shape: torch.zeros(shape, dtype=torch.float64)
    return [zeros(1, 1, 1, len(of.z[0])) for _ in WIDTHS], [zeros(1, PARTICLES, w) for w in WIDTHS]


def moved(of: Problem, thetas: Sequence[Tensor], z: Sequence[Tensor], step: float, key: Tensor) -> list[Tensor]:
    """A Langevin step of all particles of all parties."""
    gamma = torch.zeros(1, 1, 0, dtype=torch.float64)
    noise = [random.normal(random.fold_in(key, j), tuple(theta.shape), torch.float64) for j, theta in enumerate(thetas)]
    return [langevin(of.model, of.batch, j, theta, z, gamma, step, noise[j]) for j, theta in enumerate(thetas)]


Course = Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]  # (z, particles) of each iteration


def soul(of: Problem, seed: int, delay: int = 0, rate: float = 0.3) -> Course:
    """SOUL with a falling step; the likelihood's gradient is so many iterations old."""
    z, thetas = start(of)
    past = deque([z] * (delay + 1), maxlen=delay + 1)
    key, i = random.fold_in(random.key(seed), 1), 0
    while True:
        thetas = moved(of, thetas, z, STEP, random.fold_in(key, i))
        lr = RHO**2 * rate / (1 + i / 200) ** 0.6
        z = [value + lr * g for value, g in zip(z, gradients(of, z, thetas, past[0]))]
        past.append(z)
        i += 1
        yield z, thetas


def particle_em(of: Problem, seed: int) -> Course:
    """Particle gradient descent: one step for z and the particles."""
    z, thetas = start(of)
    key, i = random.fold_in(random.key(seed), 2), 0
    while True:
        new = moved(of, thetas, z, STEP, random.fold_in(key, i))
        z = [value + STEP * g for value, g in zip(z, gradients(of, z, thetas))]
        thetas, i = new, i + 1
        yield z, thetas


class Coin:
    """Bets on a tensor's gradients: its place is the start and the wealth times a fraction, without a step."""

    def __init__(self, begin: Tensor) -> None:
        self.begin, self.number = begin, 0
        self.largest, self.total, self.absolute, self.reward = (torch.zeros_like(begin) for _ in range(4))

    def step(self, value: Tensor, gradient: Tensor) -> Tensor:
        """The next place, by the adaptive rule of Orabona and Tommasi (2017)."""
        self.largest = torch.maximum(self.largest, gradient.abs()).clamp(min=1e-12)
        self.total, self.absolute = self.total + gradient, self.absolute + gradient.abs()
        self.reward = (self.reward + (value - self.begin) * gradient).clamp(min=0)
        least = 100 * self.largest
        fraction = self.total / (self.largest * torch.maximum(self.absolute + self.largest, least))
        return self.begin + fraction * (self.largest + self.reward)


def stein(theta: Tensor, gradient: Tensor) -> Tensor:
    """The kernel's direction of particles `(N, d)`, with the median bandwidth."""
    gaps = theta[:, None] - theta[None]
    squares = gaps.square().sum(-1)
    width = squares.median().clamp(min=1e-3) / math.log(len(theta))
    kernel = torch.exp(-squares / width)
    return (kernel @ gradient + 2 * (kernel[..., None] * gaps).sum(1) / width) / len(theta)


def coin_em(of: Problem, seed: int) -> Course:
    """Coin EM: z and the particles, spread at the start, bet on their gradients."""
    z, thetas = start(of)
    key = random.fold_in(random.key(seed), 3)
    thetas = [0.1 * random.normal(random.fold_in(key, j), tuple(t.shape), torch.float64) for j, t in enumerate(thetas)]
    coins = [Coin(value) for value in z], [Coin(theta) for theta in thetas]
    gamma = torch.zeros(1, 1, 0, dtype=torch.float64)
    while True:
        each = []
        for j, theta in enumerate(thetas):
            leaf = theta.detach().requires_grad_()
            density = party_density(of.model, of.batch, j, leaf, z, gamma)
            each.append(stein(theta[0], torch.autograd.grad(density.sum(), leaf)[0][0])[None])
        upward = gradients(of, z, thetas)
        z = [coin.step(value, g) for coin, value, g in zip(coins[0], z, upward)]
        thetas = [coin.step(theta, g) for coin, theta, g in zip(coins[1], thetas, each)]
        yield z, thetas


def error_of_z(of: Problem, z: Sequence[Tensor]) -> float:
    """Root mean square of z − ẑ over ρ."""
    return float((torch.stack([value.flatten() for value in z]) - of.z).square().mean().sqrt()) / RHO


def course(of: Problem, way: Course, steps: int) -> tuple[list[float], dict[str, float]]:
    """Errors of z by iteration, and figures at the end, of particles of the last half."""
    errors, kept = [], []
    for i, (z, thetas) in zip(range(steps), way):
        errors.append(error_of_z(of, z))
        if i >= steps // 2:
            kept.append(torch.cat([theta[0] for theta in thetas], -1))
    draws, (mean, sd) = torch.cat(kept), of.posterior
    exact = torch.cat([c.diagonal() for c in of.covariance]).sqrt()
    given = torch.cat(of.mean)
    return errors, {
        "error of z": errors[-1],
        "error of means given ẑ, in sds": float(((draws.mean(0) - given) / exact).abs().max()),
        "error of means, in the posterior's sds": float(((draws.mean(0) - mean) / sd).abs().max()),
        "ratio of sds to those given ẑ": float((draws.std(0) / exact).mean()),
        "ratio of sds to the posterior's": float((draws.std(0) / sd).mean()),
    }


def draw(curves: dict[str, list[float]], delays: dict[str, list[float]]) -> Figure:
    """The error of z by iteration: three ways, and SOUL with delays."""
    figure, axes = common.subplots(1, 2, figsize=(9.5, 3.6), sharey=True)
    for axis, lines in zip(axes, (curves, delays)):
        for name, errors in lines.items():
            axis.plot(range(1, len(errors) + 1), errors, label=name)
        axis.set(xscale="log", yscale="log", xlabel="iteration")
        axis.legend(frameon=False)
    axes[0].set_ylabel("error of z, over ρ")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run all ways from the same start; print their distances from what is exact, and draw them."""
    parser = common.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=4000, help="iterations (default 4000)")
    options = parser.parse_args(argv)
    size, steps = (30, 20) if options.smoke else (ROWS, options.steps)
    runs: dict[str, list[dict[str, float]]] = {}
    curves: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        of = problem(seed, size)
        ways = {"SOUL": soul(of, seed), "particle EM": particle_em(of, seed), "coin EM": coin_em(of, seed)}
        ways |= {f"SOUL, {delay} iterations late": soul(of, seed, delay, 0.3 / (1 + delay)) for delay in DELAYS[1:]}
        for name, way in ways.items():
            errors, figures = course(of, way, steps)
            runs.setdefault(name, []).append(figures)
            curves.setdefault(name, errors)
    rows = [row for name, each in runs.items() for row in common.over_seeds(name, each)]
    common.show_rows("Maximum marginal likelihood of z", rows, ".4f")
    late = {name: errors for name, errors in curves.items() if name == "SOUL" or "late" in name}
    ways_of = {name: errors for name, errors in curves.items() if "late" not in name}
    common.finish("vfl.em", rows, options, lambda: {"vfl_em": draw(ways_of, late)})


if __name__ == "__main__":
    main()
