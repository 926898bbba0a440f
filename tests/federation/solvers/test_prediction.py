"""Predictions of stacked clients are those of each client's module in evaluation mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedtorch import functional, random, tree
from fedtorch.federation.solvers.prediction import predictor


class Tied(nn.Module):
    """Tied weights, a buffer that differs between clients, dropout, dicts in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs["x"]))
        return {"y": self.second(nn.functional.dropout(self.norm(hidden), training=self.training)), "h": hidden}


def stacked(module, count):
    tensors = {**functional.parameters(module), **functional.buffers(module)}
    noise = lambda leaf: 0.2 * random.uniform(random.key(1), (count, *leaf.shape), torch.float64)
    return tree.map(lambda leaf: leaf + noise(leaf) if leaf.is_floating_point() else leaf.expand(count), tensors)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("rows", [0, 4])
def test_each_client_predicts_with_its_own_tensors(batched, count, rows):
    module = Tied().double()
    tensors, inputs = stacked(module, count), {"x": random.normal(random.key(2), (count, rows, 3), torch.float64)}
    outputs = predictor(module, lambda: batched)(tensors, inputs)
    assert {name: tuple(leaf.shape) for name, leaf in outputs.items()} == {"y": (count, rows, 3), "h": (count, rows, 3)}
    for k in range(count):
        own = functional.load(module, tree.map(lambda leaf, k=k: leaf[k], tensors)).eval()
        with torch.no_grad():
            torch.testing.assert_close(tree.map(lambda leaf, k=k: leaf[k], outputs), own({"x": inputs["x"][k]}))
    assert module.training
    assert not any(leaf.requires_grad for leaf in tree.leaves(outputs))


def test_modules_that_vmap_cannot_run():
    module = nn.LSTM(3, 2, batch_first=True).double()
    predict = predictor(
        type("Last", (nn.Sequential,), {"forward": lambda self, x: self[0](x[:, None])[0][:, 0]})(module), lambda: False
    )
    tensors = {f"0.{name}": leaf.expand(2, *leaf.shape) for name, leaf in functional.parameters(module).items()}
    inputs = random.normal(random.key(2), (2, 4, 3), torch.float64)
    expected = module(inputs.reshape(8, 1, 3))[0].reshape(2, 4, 2)
    torch.testing.assert_close(predict(tensors, inputs), expected.detach())
