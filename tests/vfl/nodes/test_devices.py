"""Vertical models on a device give the numbers of the CPU."""

from __future__ import annotations

import pytest
import torch
from support import splits, verticals
from torch import Tensor

from fedtorch import random, tree, vfl
from fedtorch.vfl.fit import encoder
from fedtorch.vfl.model import likelihoods

CLOSE = {"rtol": 1e-8, "atol": 1e-10}  # float64 sums in another order, over three steps
DEVICE = pytest.mark.parametrize(
    "device",
    [
        "cpu",  # the way itself
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)


def trained(case: str, device: str) -> dict[str, Tensor]:
    """The parameters of a split network after three steps."""
    model, rows = splits.CASES[case]().to(device), tree.to(splits.data(), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        model.train().losses(rows, step).sum().backward()
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@DEVICE
@pytest.mark.parametrize("case", splits.CASES)
def test_split_networks(case, device) -> None:
    found, wanted = trained(case, device), trained(case, "cpu")
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


def fitted(device: str) -> vfl.VariationalFit:
    """A variational posterior after a few steps."""
    data = tree.to(verticals.gaussian_data([3], 30), device)
    model = vfl.augmented(likelihoods.gaussian(verticals.SD), verticals.predictors([3]), torch.tensor((0.5, 1.0)))
    guide = vfl.Guide(vfl.sums(encoder.affine(), skewed=False), joint=True)
    return vfl.sfvi(model, guide, data, key=random.key(0), steps=2, draws=2, size=2)


@DEVICE
def test_variational_inference(device) -> None:
    found, wanted = fitted(device), fitted("cpu")
    # Adam takes whole steps along gradients that are zero but for rounding, so that parameters themselves differ.
    for one, other in zip(found.moments(), wanted.moments()):
        torch.testing.assert_close(one.cpu(), other, **CLOSE)
    torch.testing.assert_close(found.bounds.cpu(), wanted.bounds, **CLOSE)
