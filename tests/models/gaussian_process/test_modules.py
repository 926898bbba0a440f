"""Modules that were trained alone: what they say of all inputs is what the outputs say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedtorch.models.gaussian_process import ConvolvedGP, fit_modules

DTYPE = torch.float64
UNITS, ROWS, NOISE = 2, 9, 0.01
X = torch.linspace(0, 1, ROWS, dtype=DTYPE)[:, None].expand(UNITS, -1, -1)
Y = torch.tensor([[1.0], [-2.0]], dtype=DTYPE) * (6 * X[..., 0]).sin()


def model() -> ConvolvedGP:
    gp = ConvolvedGP(X[0, ::2], batch_shape=torch.Size([UNITS]))
    gp.start(Y)
    gp.likelihood.noise = NOISE
    return gp


def modules() -> tuple[Tensor, Tensor, Tensor]:
    """The likelihood of outputs with noise: of modules whose pseudo-inputs are all inputs."""
    constant = -0.5 * (ROWS * math.log(2 * math.pi * NOISE) + Y.square().sum(1) / NOISE)
    return (torch.eye(ROWS, dtype=DTYPE) / NOISE).expand(UNITS, -1, -1), Y / NOISE, constant


def test_modules_of_all_inputs_are_the_outputs() -> None:
    """The bound is that of the rows, at the hyperparameters that were found, and so is the posterior."""
    gp = model()
    with torch.no_grad():
        start = float(gp.bound(X, Y))
    bound = float(fit_modules(gp, X, modules(), iterations=15))
    with torch.no_grad():
        # A covariance made by a product is exact to 1e-9 where its kernel is narrow, and enters by 1 / noise.
        assert bound == pytest.approx(float(gp.bound(X, Y)), abs=1e-6)
        assert bound > start + 1
        mean, variance = gp.marginals(X)
        gp.condition(X, Y)
        assert torch.allclose(mean, gp.marginals(X)[0], rtol=0, atol=1e-8)
        assert torch.allclose(variance, gp.marginals(X)[1], rtol=0, atol=1e-8)


@pytest.mark.parametrize("part", range(3))
def test_modules_of_another_shape_are_named(part: int) -> None:
    wrong = [*modules()]
    wrong[part] = wrong[part][:1]
    with pytest.raises(ValueError, match=r"of M = 2 units, but got"):
        fit_modules(model(), X, (wrong[0], wrong[1], wrong[2]))
    with pytest.raises(ValueError, match=r"of M = 2 units, but got"):
        fit_modules(model(), X[..., :0], modules())
