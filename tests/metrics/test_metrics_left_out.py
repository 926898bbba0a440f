"""Rows that a metric does not count: targets that a loss ignores, and predictions that are NaN."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from fedtorch import metrics, tree
from fedtorch.metrics.stacked import as_stacked


@pytest.mark.parametrize("ignored", [-100, 0, 2])
@pytest.mark.parametrize("kind", ["module", "function"])
def test_targets_that_a_loss_ignores_are_not_counted(kind: str, ignored: int) -> None:
    """As torch's own mean over all rows of a client, and of all clients; they were counted as losses of zero."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 6, 4, 2, generator=generator, dtype=torch.float64)  # of four classes, two outputs
    target = torch.randint(0, 4, (3, 6, 2), generator=generator)
    if ignored < 0:
        target = torch.where(target == 1, ignored, target)
    mask = torch.arange(6) < torch.tensor([6, 2, 5])[:, None]
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    given = loss if kind == "module" else partial(nn.functional.cross_entropy, ignore_index=ignored)
    metric = as_stacked(given)
    sums = metric.update(logits, target, mask)
    expected = torch.stack([loss(logits[k][mask[k]], target[k][mask[k]]) for k in range(3)])
    torch.testing.assert_close(metric.compute(sums), expected, rtol=1e-12, atol=0)
    whole = metric.compute(tree.map(lambda leaf: leaf.sum(0), sums))
    torch.testing.assert_close(whole, loss(logits[mask], target[mask]), rtol=1e-12, atol=0)


def test_nan_predictions_are_never_correct() -> None:
    logits, target = torch.full((1, 4, 3), torch.nan), torch.tensor([[0, 1, 2, 0]])
    binary = torch.full((1, 4), torch.nan)
    for prediction, classes in ((logits, target), (binary, target % 2)):
        found = metrics.accuracy().update(prediction, classes, torch.ones(1, 4, dtype=torch.bool))
        assert float(metrics.accuracy().compute(found)) == 0
