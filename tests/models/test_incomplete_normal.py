"""Draws of missing cells and of sites' means against the dense normal distribution of everything, in any blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.data.frames.incomplete import incomplete_cells
from fedtorch.models import incomplete_normal
from fedtorch.models.incomplete_normal import SiteNormal, drawn, gaps

NAN = torch.nan
CELLS = torch.tensor([[1.0, NAN, 0.5], [NAN, NAN, -1.0], [0.3, 2.0, 1.0], [2.0, NAN, 0.1], [NAN, 1.0, NAN]]).double()
NORMAL = SiteNormal(
    torch.tensor([0.5, -0.5, 1.0]).double(),
    torch.tensor([[1.0, 0.6, 0.2], [0.6, 1.5, -0.3], [0.2, -0.3, 0.8]]).double(),
    torch.tensor([0.4, 0.0, 2.0]).double(),
)


def dense() -> tuple[Tensor, Tensor]:
    """Mean and covariance of (the site's mean, all cells) given the observed ones."""
    rows, p = CELLS.shape
    total = torch.block_diag(torch.zeros(p, p).double(), *[NORMAL.covariance] * rows)
    total = total + torch.diag(NORMAL.between).repeat(rows + 1, rows + 1)
    mean, cells = NORMAL.mean.repeat(rows + 1), torch.cat([torch.full((p,), NAN).double(), CELLS.flatten()])
    seen = ~cells.isnan()
    gain = torch.linalg.solve(total[seen][:, seen], total[seen]).T
    return mean + gain @ (cells[seen] - mean[seen]), total - gain @ total[seen]


def test_draws_have_the_moments_of_the_dense_distribution() -> None:
    copies = 6000
    block = ft.data.FederatedData(incomplete_cells(CELLS), torch.tensor([len(CELLS)])).stack([0])
    many = tree.map(lambda leaf: leaf.expand(copies, *leaf.shape[1:]), gaps(block))
    filled, means = drawn(many, tree.expand(NORMAL, copies), random.fold_in(random.key(1), torch.arange(copies)))
    draws = torch.cat([means, filled.flatten(1)], 1)
    wanted, covariance = dense()
    error = (covariance.diagonal() / copies).sqrt().clamp(min=1e-12)
    assert float(((draws.mean(0) - wanted).abs() / error).max()) < 5
    spread = covariance.diagonal().clamp(min=1e-12).sqrt()
    assert float(((draws.T.cov() - covariance) / (spread[:, None] * spread)).abs().max()) < 5 * (2 / copies) ** 0.5


def blocks() -> ft.data.FederatedData:
    return ft.data.FederatedData(incomplete_cells(torch.cat([CELLS, CELLS[:2], CELLS[1:]])), torch.tensor([5, 2, 4]))


def test_draws_do_not_depend_on_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    data, keys = blocks(), random.fold_in(random.key(0), torch.arange(3))
    together, means = drawn(gaps(data.stack([0, 1, 2])), tree.expand(NORMAL, 3), keys)
    monkeypatch.setattr(incomplete_normal, "_AT_ONCE", 1)  # one row at a time
    for k in range(3):
        alone, mean = drawn(gaps(data.stack([k])), tree.expand(NORMAL, 1), keys[k : k + 1])
        assert torch.allclose(alone[0], together[k, : int(data.counts[k])], atol=1e-12)
        assert torch.allclose(mean[0], means[k], atol=1e-12)


def test_no_clients_are_an_empty_block() -> None:
    empty = tree.take(gaps(blocks().stack([0, 1, 2])), slice(0, 0))
    filled, means = drawn(empty, tree.expand(NORMAL, 0), random.fold_in(random.key(0), torch.arange(0)))
    assert filled.shape == (0, 5, 3)
    assert means.shape == (0, 3)


def test_without_variance_between_sites_all_have_one_mean() -> None:
    one = NORMAL._replace(between=torch.zeros(3).double())
    _, means = drawn(gaps(blocks().stack([0, 1])), tree.expand(one, 2), random.fold_in(random.key(0), torch.arange(2)))
    assert torch.equal(means, NORMAL.mean.expand(2, -1))


def test_other_rows_and_other_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows with missing cells, but got a tuple; make them by"):
        gaps(ft.data.from_tensors([(torch.ones(2, 2), torch.ones(2))]).stack([0]))
    with pytest.raises(ValueError, match="a normal distribution of 3 columns, the response last, but got one of 2"):
        drawn(
            gaps(blocks().stack([0])),
            SiteNormal(torch.zeros(1, 2), torch.eye(2)[None], torch.zeros(1, 2)),
            random.key(0)[None],
        )
