"""Values of clients' metrics from recorded calls: those of a loop, by one pass over all clients."""

from __future__ import annotations

import pytest
import torch
import torchmetrics
import torchmetrics.classification as classification
from torch import Tensor

from fedtorch import random
from fedtorch.metrics.recorded import BatchCall, ClientMetric, take_out

CLASSES = 4


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "metric",
    [
        classification.MulticlassAccuracy(CLASSES),
        classification.MulticlassF1Score(CLASSES),
        classification.MulticlassCohenKappa(CLASSES),
    ],
)
def test_scores_by_class_are_computed_for_all_clients_at_once(metric, padded, monkeypatch):
    logits = random.normal(random.key(0), (3, 5, CLASSES), torch.float64)
    call = take_out(((logits, random.randint(random.key(1), CLASSES - 1, (3, 5))), {}))  # a class that nobody has
    batch = BatchCall(call, call.tensors, (True, True), torch.tensor([5, 3, 0] if padded else [5, 5, 5]))
    looped = ClientMetric(metric)
    looped._states = []
    once = ClientMetric(metric)
    values = once.of_batches([batch, batch])
    assert torch.equal(values.isnan(), (batch.sizes == 0).expand(2, 3))
    assert torch.allclose(values, looped.of_batches([batch, batch]), equal_nan=True, rtol=1e-6)
    monkeypatch.setattr(once, "_looped", None)
    assert torch.allclose(once.of_round([batch, batch]), looped.of_round([batch, batch]), equal_nan=True, rtol=1e-6)


class Largest(torchmetrics.Metric):
    """A sum over batches of what is no sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total = self.total + values.amax()

    def compute(self) -> Tensor:
        return self.total


def test_batches_of_other_sizes_are_updated_without_their_padding() -> None:
    """Of the largest batch the sum over rows is the same, 1 + 0 + 0 + 0."""
    values = torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 5.0, 99.0, 99.0], [-2.0, 99.0, 99.0, 99.0]], dtype=torch.float64)
    call = take_out(((values,), {}))
    batch = BatchCall(call, call.tensors, (True,), torch.tensor([4, 2, 1]))
    assert ClientMetric(Largest()).of_round([batch, batch]).tolist() == [2.0, 10.0, -4.0]
