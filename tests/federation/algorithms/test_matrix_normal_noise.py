"""What devices of HM1 tell of their noise does not depend on how it is computed."""

from __future__ import annotations

import warnings

import torch

from fedtorch import tree
from fedtorch.models.linear import least_norm, spectral, sufficient_statistics


def test_least_norm_from_eigenvectors_is_that_of_each_client() -> None:
    """Also of clients with dependent columns, fewer rows than features, or none, whoever they are beside."""
    x = torch.randn(6, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.randn(6, 9, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[1, :, 3] = x[1, :, 0]
    x[2, :, 1] *= 1e-5
    x[3, :, 2] = 0.0
    mask = torch.ones(6, 9).bool()
    mask[4, 2:] = mask[5] = False
    with warnings.catch_warnings(action="ignore"):
        every = sufficient_statistics(x, y, mask)
        wanted = least_norm(every.per_row()._replace(cross=every.per_row().cross[..., 0]))
        found = spectral(every.per_row()).fit
        alone = spectral(tree.take(every.per_row(), slice(0, 1))).fit
        found, alone = (fit._replace(solution=fit.solution[..., 0]) for fit in (found, alone))
    for one, other, single in zip(found, wanted, alone):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(one[:1], single, rtol=1e-13, atol=1e-13)
