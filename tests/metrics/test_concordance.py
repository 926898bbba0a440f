"""The concordance index against a loop over pairs, and what does not change it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.metrics import concordance


def by_pairs(risk: Tensor, target: Tensor) -> float:
    """The definition: of all pairs in which it is known who had the event first."""
    right = pairs = 0.0
    for (a, (event, time)), (b, (other, later)) in itertools.permutations(zip(risk.tolist(), target.tolist()), 2):
        if event and (time < later or (time == later and not other)):
            pairs += 1
            right += 1.0 if a > b else 0.5 if a == b else 0.0
    return right / pairs if pairs else math.nan


def example(seed: int, clients: int = 3, rows: int = 17) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    risk = torch.randint(0, 6, (clients, rows), generator=generator).double()  # with ties
    time = torch.randint(1, 9, (clients, rows), generator=generator).double()
    event = torch.randint(0, 2, (clients, rows), generator=generator).double()
    mask = torch.arange(rows) < torch.tensor([[rows], [5], [11]])[:clients]
    return risk, torch.stack([event, time], -1), mask


@pytest.mark.parametrize("seed", range(4))
def test_the_definition_by_pairs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    risk, target, mask = example(seed)
    metric = ft.metrics.concordance_index()
    whole = metric.compute(metric.update(risk, target, mask))
    for k in range(3):
        assert float(whole[k]) == pytest.approx(by_pairs(risk[k][mask[k]], target[k][mask[k]]), nan_ok=True)
    monkeypatch.setattr(concordance, "_PAIRS", 60)  # a row at a time
    assert torch.equal(metric.compute(metric.update(risk[..., None], target, mask)), whole)


def test_monotone_changes_of_risk_and_time_do_not_matter() -> None:
    risk, target, mask = example(9)
    metric = ft.metrics.concordance_index()
    later = torch.stack([target[..., 0], target[..., 1].exp()], -1)
    for changed in ((risk.exp(), target, mask), (risk, later, mask)):
        assert torch.equal(metric.compute(metric.update(*changed)), metric.compute(metric.update(risk, target, mask)))
    opposite = metric.compute(metric.update(-risk, target, mask))
    torch.testing.assert_close(opposite, 1 - metric.compute(metric.update(risk, target, mask)))


def test_targets_are_checked() -> None:
    metric = ft.metrics.concordance_index()
    with pytest.raises(ValueError, match=r"Expected targets \(event, time\) of shape \(K, N, 2\)"):
        metric.update(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2).bool())
    with pytest.raises(ValueError, match="Expected events 0 or 1"):
        metric.update(torch.zeros(1, 2), torch.full((1, 2, 2), 3.0), torch.ones(1, 2).bool())
