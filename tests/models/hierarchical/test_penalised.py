"""Penalised generalised linear models: score and information are derivatives, however the rows are summed."""

from __future__ import annotations

import pytest
import torch

import fedtorch as ft
from fedtorch.models.hierarchical import penalised
from fedtorch.models.hierarchical.integrals.modes import Problem, White


def rows(features: int, sizes: tuple[int, ...], family: str, weighted: bool = False) -> penalised.Rows:
    draws = torch.Generator().manual_seed(len(sizes) * 10 + features)
    parts = []
    for size in sizes:
        x = torch.randn(size, features, generator=draws, dtype=torch.float64)
        y = torch.randint(0, 2 if family == "logistic" else 5, (size,), generator=draws).double()
        weight = torch.rand(size, generator=draws, dtype=torch.float64) + 0.5
        parts.append((x, y, {"weight": weight}) if weighted else (x, y))
    return penalised.observed(family, ft.data.from_tensors(parts).stack(list(range(len(sizes)))), features)


@pytest.mark.parametrize("family", ["logistic", "poisson"])
@pytest.mark.parametrize("weighted", [False, True])
def test_score_and_information_are_derivatives_of_the_likelihood(family: str, weighted: bool) -> None:
    given, width = rows(3, (5, 1, 8), family, weighted), 1e-5
    theta = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)
    score, information = penalised.score_and_information(family, given, theta)
    for j, move in enumerate(width * torch.eye(3, dtype=torch.float64)):
        low, high = (penalised.negative_log_likelihood(family, given, theta + sign * move) for sign in (-1, 1))
        torch.testing.assert_close(score[:, j], (low - high) / (2 * width), rtol=1e-7, atol=1e-7)
        low, high = (penalised.score_and_information(family, given, theta + sign * move)[0] for sign in (-1, 1))
        torch.testing.assert_close(information[:, j], (low - high) / (2 * width), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("features", "sizes"), [(1, (4,)), (4, (3, 7, 2)), (7, (20, 1))])
def test_rows_are_summed_as_at_many_nodes(features: int, sizes: tuple[int, ...]) -> None:
    given = rows(features, sizes, "poisson", True)
    theta = torch.randn(len(sizes), features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    many = Problem.of(penalised.FAMILIES["poisson"], given, features).about(theta[:, None])
    for one, other in zip(penalised.score_and_information("poisson", given, theta), many, strict=True):
        torch.testing.assert_close(one, other[:, 0], rtol=1e-12, atol=1e-12)


def test_modes_are_those_of_a_prior_that_all_nodes_share_and_lies_in_memory_once() -> None:
    """PyTorch returns memory that nobody has written as the median of an expanded dimension."""
    given = rows(3, (6, 4), "logistic")
    problem = Problem.of(penalised.FAMILIES["logistic"], given, 3)
    mean = torch.zeros(2, 1, 3, dtype=torch.float64)
    root = torch.diag(torch.tensor([40.0, 1.0, 9.0], dtype=torch.float64)).expand(2, 1, 3, 3)
    shared = White(mean.expand(2, 25, 3), root.expand(2, 25, 3, 3))
    written = White(*(part.contiguous() for part in shared))
    torch.full((5000,), 1e3, dtype=torch.float64)  # what is read then
    found = [problem.mode(prior, exact=False) for prior in (shared, written)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
