r"""The sparse models as Pyro programs: for users of Pyro, and for NUTS as an independent oracle.

The indicators γ of the spike and slab are summed out, so that all variables are continuous. Deviations are written as
λ τ z with standard normal z, or, in linear regression, integrated out: y_k is normal with mean X_k θ and covariance
σ_k² I + X_k D_k X_k', D_k = diag(λ_k² τ²), whose posterior NUTS explores with far shorter paths. Importing this module
imports Pyro.
"""

from __future__ import annotations

import random as stdlib_random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor

from fedtorch import linalg, random
from fedtorch.data import FederatedData

Program = Callable[[], None]
Sites = list[tuple[Tensor, Tensor]]


class Priors(NamedTuple):
    """The numbers of the priors, as in `sparse` and `global_priors.spike_and_slab`."""

    spike: float = 0.01  # c₀
    variance: tuple[float, float] = (2.0, 0.5)  # (a_η, b_η)
    inclusion: tuple[float, float] = (1.0, 1.0)  # (a_ρ, b_ρ)
    noise: tuple[float, float] = (1.0, 1.0)  # (a_σ, b_σ), of linear regression
    intercept_scale: float = 10.0  # the standard deviation of the sites' intercepts, of logistic regression


PRIORS = Priors()


def regression(data: FederatedData, priors: Priors = PRIORS) -> Program:
    """Linear regression with horseshoe deviations and a spike-and-slab mean: `sparse.regression`, `sparse.hierarchy()`.

    Args:
        data: rows (x `(d,)`, y `()`) of all sites, at hand.
        priors: their numbers.

    Returns:
        a Pyro program with sites `theta`, `z`, `lambda`, `tau`, `eta`, `rho`, `sigma2`, and `theta_k` as deterministic.
    """
    sites = _in_double(data)

    def program() -> None:
        theta_k = _coefficients(sites, priors)
        sigma2 = _each_site("sigma2", sites, dist.InverseGamma(_number(priors.noise[0]), _number(priors.noise[1])))
        for k, (x, y) in enumerate(sites):
            pyro.sample(f"y_{k}", dist.Normal(x @ theta_k[k], sigma2[k].sqrt()).to_event(1), obs=y)

    return program


def collapsed_regression(data: FederatedData, priors: Priors = PRIORS) -> Program:
    """The model of `regression` with the sites' coefficients θ_k integrated out; `site_coefficients` draws them.

    Args:
        data: rows (x `(d,)`, y `()`) of all sites, at hand.
        priors: their numbers.

    Returns:
        a Pyro program with sites `theta`, `lambda`, `tau`, `eta`, `rho`, `sigma2`.
    """
    sites = _in_double(data)

    def program() -> None:
        theta, scale = _hierarchy(sites, priors)
        sigma2 = _each_site("sigma2", sites, dist.InverseGamma(_number(priors.noise[0]), _number(priors.noise[1])))
        for k, (x, y) in enumerate(sites):
            law = dist.LowRankMultivariateNormal(x @ theta, x * scale[k], sigma2[k].expand(len(y)))
            pyro.sample(f"y_{k}", law, obs=y)

    return program


def site_coefficients(data: FederatedData, samples: dict[str, Tensor], key: Tensor) -> Tensor:
    """A draw of θ_k for each draw of `collapsed_regression`, `(draws, M, p)`.

    Args:
        data: as the program's.
        samples: draws of the program.
        key: of the randomness.
    """
    precision = (samples["lambda"] * samples["tau"].unsqueeze(-2)).square().reciprocal()
    found = []
    for k, (x, y) in enumerate(_in_double(data)):
        noise = samples["sigma2"][:, k, None]
        factor = torch.linalg.cholesky(x.mT @ x / noise[..., None] + torch.diag_embed(precision[:, k]))
        shift = y @ x / noise + precision[:, k] * samples["theta"]
        z = random.normal(random.fold_in(key, k), shift.shape, torch.float64)
        found.append(linalg.normal_draw(factor, shift, z))
    return torch.stack(found, 1)


def logistic_regression(data: FederatedData, priors: Priors = PRIORS) -> Program:
    """Logistic regression: `logistic.logistic_regression`, `sparse.hierarchy()`.

    Args:
        data: rows (x `(d,)`, y `()`), y 0 or 1, of all sites, at hand.
        priors: their numbers.

    Returns:
        a Pyro program with sites as `regression`, `intercept` instead of `sigma2`.
    """
    sites = _in_double(data)

    def program() -> None:
        theta_k = _coefficients(sites, priors)
        intercept = _each_site("intercept", sites, dist.Normal(_number(0.0), _number(priors.intercept_scale)))
        for k, (x, y) in enumerate(sites):
            pyro.sample(f"y_{k}", dist.Bernoulli(logits=intercept[k] + x @ theta_k[k]).to_event(1), obs=y)

    return program


def nuts(
    program: Program, *, draws: int = 1000, warmup: int = 500, seed: int = 0, depth: int = 10, compile: bool = False
) -> dict[str, Tensor]:
    """Draws of a program by Pyro's NUTS, with deterministic sites; the global generators are left as they were.

    Args:
        program: as returned by `regression`.
        draws: how many are kept.
        warmup: how many before.
        seed: of Pyro's generators.
        depth: the largest depth of a tree.
        compile: whether the density is traced once by TorchScript, which makes small programs three times as fast.

    Returns:
        by site, `(draws, ...)`.
    """
    python, arrays = stdlib_random.getstate(), numpy.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pyro.set_rng_seed(seed)
            kernel = NUTS(
                program,
                max_tree_depth=depth,
                target_accept_prob=0.9,
                jit_compile=compile,
                ignore_jit_warnings=compile,
            )
            chain = MCMC(kernel, num_samples=draws, warmup_steps=warmup, disable_progbar=True)
            chain.run()
            samples = chain.get_samples()
    finally:
        stdlib_random.setstate(python)
        numpy.random.set_state(arrays)  # noqa: NPY002
    if "z" in samples:
        scale = samples["lambda"] * samples["tau"].unsqueeze(-2)
        samples["theta_k"] = samples["theta"].unsqueeze(-2) + scale * samples["z"]
    return samples


def inclusion(samples: dict[str, Tensor], spike: float = 0.01) -> Tensor:
    """The posterior inclusion probabilities, P(γ_j = 1 | θ_j, η_j, ρ) averaged over draws: `(p,)`."""
    theta, eta, rho = samples["theta"], samples["eta"], samples["rho"].unsqueeze(-1)
    slab = dist.Normal(0.0, eta.sqrt()).log_prob(theta) + rho.log()
    zero = dist.Normal(0.0, (spike * eta).sqrt()).log_prob(theta) + torch.log1p(-rho)
    return torch.sigmoid(slab - zero).mean(0)


def _in_double(data: FederatedData) -> Sites:
    return [(x.double(), y.double()) for x, y in data]


def _each_site(name: str, sites: Sites, law: Any) -> Tensor:
    """A sample of its own for each site, `(M,)`."""
    with pyro.plate(f"{name} of sites", len(sites)):
        return pyro.sample(name, law)


def _coefficients(sites: Sites, priors: Priors) -> Tensor:
    """Samples the hierarchy and the coefficients of the sites; returns these, `(M, p)`."""
    theta, scale = _hierarchy(sites, priors)
    z = pyro.sample("z", dist.Normal(torch.zeros_like(scale), torch.ones_like(scale)).to_event(2))
    return pyro.deterministic("theta_k", theta + scale * z)


def _hierarchy(sites: Sites, priors: Priors) -> tuple[Tensor, Tensor]:
    """Samples θ `(p,)` and the scales λ τ of the sites' deviations from it, `(M, p)`."""
    ones = torch.ones(sites[0][0].shape[1], dtype=torch.float64)
    rho = pyro.sample("rho", dist.Beta(_number(priors.inclusion[0]), _number(priors.inclusion[1])))
    eta = pyro.sample("eta", dist.InverseGamma(*(number * ones for number in priors.variance)).to_event(1))
    slab, zero = dist.Normal(0.0, eta.sqrt()), dist.Normal(0.0, (priors.spike * eta).sqrt())
    theta = pyro.sample("theta", slab.to_event(1))
    # What the mixture of slab and spike has beyond the slab that θ was sampled from.
    ratio = torch.logaddexp(rho.log(), torch.log1p(-rho) + zero.log_prob(theta) - slab.log_prob(theta))
    pyro.factor("spike", ratio.sum(-1))
    tau = pyro.sample("tau", dist.HalfCauchy(ones).to_event(1))
    scale = pyro.sample("lambda", dist.HalfCauchy(ones.expand(len(sites), -1)).to_event(2))
    return theta, scale * tau


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
