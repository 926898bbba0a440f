"""Smoothed importance sampling: ArviZ's, of one pointwise matrix."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtorch.federation.runs.sampler import load_arviz
from fedtorch.inference._pareto import left_out, smoothed, widely_applicable


def densities(rows: int = 60, draws: int = 500, seed: int = 0) -> Tensor:
    """Log densities whose ratios have tails from short to far too long, ties among them."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, draws, generator=generator, dtype=torch.float64)
    values = -(normal * torch.linspace(0.05, 4, rows).double()[:, None]).square() + torch.linspace(-3, 1, rows)[:, None]
    values[1] = values[1].round(decimals=1)
    values[2] = -1.0
    return values.double()


def arviz_of(values: Tensor) -> tuple[object, object]:
    az = load_arviz()
    data = az.from_dict(log_likelihood={"y": values.T[None].numpy()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return az.loo(data, pointwise=True, reff=0.8), az.waic(data, pointwise=True)


def test_rows_are_arviz_ones() -> None:
    values = densities()
    loo, waic = arviz_of(values)
    made, other = left_out(values, 0.8), widely_applicable(values)
    np.testing.assert_allclose(made.elpd.numpy(), loo.loo_i.values, atol=1e-8, rtol=0)  # type: ignore[attr-defined]
    np.testing.assert_allclose(made.doubt.numpy(), loo.pareto_k.values, atol=1e-8, rtol=0)  # type: ignore[attr-defined]
    np.testing.assert_allclose(other.elpd.numpy(), waic.waic_i.values, atol=1e-8, rtol=0)  # type: ignore[attr-defined]
    assert (made.lppd - made.elpd).sum() == pytest.approx(loo.p_loo, abs=1e-8)  # type: ignore[attr-defined]
    assert other.doubt.sum() == pytest.approx(waic.p_waic, abs=1e-8)  # type: ignore[attr-defined]


def test_rows_do_not_depend_on_the_others() -> None:
    values = densities(rows=20)
    together = smoothed(values.reshape(4, 5, -1))
    alone = [smoothed(row) for row in values]
    assert torch.equal(together.shape.flatten(), torch.stack([one.shape for one in alone]))
    torch.testing.assert_close(together.log_weights.flatten(0, 1), torch.stack([one.log_weights for one in alone]))


def test_no_rows_and_few_draws() -> None:
    assert left_out(torch.zeros(0, 3, 100).double()).elpd.shape == (0, 3)
    with pytest.raises(ValueError, match="Expected at least 5 draws, but got 4"):
        smoothed(torch.zeros(2, 4))
