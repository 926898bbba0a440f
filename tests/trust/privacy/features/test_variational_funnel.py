"""The learnt funnel beside the closed form in a linear-Gaussian world, and where no linear map would do."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from fedtorch import random
from fedtorch.trust import privacy


def told(encoder: torch.nn.Module, covariance: Tensor, cross: Tensor) -> float:
    """The information of a linear encoder's z about a normal variable of these covariances with x, and variance."""
    with torch.no_grad():
        slopes = (encoder(torch.eye(2).double()) - encoder(torch.zeros(2, 2).double())).T
    own = slopes @ covariance @ slopes.T + torch.eye(len(slopes)).double()
    along = slopes @ cross[:2]
    return -0.5 * math.log1p(-float(along @ torch.linalg.solve(own, along) / cross[2]))


@pytest.mark.parametrize("share", [pytest.param(0.3, marks=pytest.mark.slow), 0.7])
def test_a_linear_funnel_is_near_the_closed_form(share: float) -> None:
    """Never below it, and within a third of what telling y as it is would leak in addition."""
    generator = torch.Generator().manual_seed(0)  # s and y come in units of their own
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    x = draw(800, 2)
    s = 0.7 * x[:, 0] + math.sqrt(0.51) * draw(800)
    y = 0.8 * math.sqrt(0.5) * x.sum(1) + 0.6 * draw(800)
    s, y = 0.01 * s + 3, 100 * y
    joint = torch.cov(torch.stack([x[:, 0], x[:, 1], s, y]), correction=0)
    covariance, private, label = joint[:2, :2], joint[[0, 1, 2], 2], joint[[0, 1, 3], 3]
    most = -0.5 * math.log1p(-float(label[:2] @ torch.linalg.solve(covariance, label[:2]) / label[2]))
    found = privacy.variational_funnel(x, s, y, share * most, width=1, hidden=(), steps=400)
    leak, information = (told(found.encoder, covariance, cross) for cross in (private, label))
    assert share * most - 0.02 < information < most  # noise of 800 rows moves Î by about 1/√800 of its own size
    best = privacy.privacy_funnel(covariance, private, label, min(information, most)).leak
    guess = torch.linalg.solve(covariance, label[:2])  # y as it is told best, with noise for as much information
    power = float(label[:2] @ guess)
    noise = power**2 / (label[2] * -math.expm1(-2 * information)) - power
    plainly = -0.5 * math.log1p(-float((private[:2] @ guess) ** 2 / ((power + noise) * private[2])))
    assert best - 1e-9 <= leak <= best + (plainly - best) / 3


@pytest.mark.slow
def test_a_network_hides_what_no_linear_map_sees() -> None:
    """s is whether |x₀| is large, which has no covariance with x; a neighbour rule finds it in x and not in z."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(800, 2, generator=generator, dtype=torch.float64)
    s = (x[:, 0].abs() > 0.6745).long()
    y = (x[:, 1] + 0.3 * x[:, 0].abs() > 0.3).long()
    found = privacy.variational_funnel(x, s, y, 0.3, hidden=(16,), steps=120)
    with torch.no_grad():
        z = found.encoder(x, random.key(5))
    right = [
        KNeighborsClassifier(15).fit(rows[:400].numpy(), s[:400].numpy()).score(rows[400:].numpy(), s[400:].numpy())
        for rows in (x, z)
    ]
    assert right[0] > 0.9
    assert right[1] < 0.5 + 4 * math.sqrt(0.25 / 400)
    assert found.information > 0.2
    assert found.leak < 0.03


def test_what_cannot_be_is_refused() -> None:
    x, s = torch.zeros(10, 2), torch.arange(10.0)
    with pytest.raises(ValueError, match="Expected features"):
        privacy.variational_funnel(x, s[:9], s, 0.1)
    with pytest.raises(ValueError, match="got a constant"):
        privacy.variational_funnel(x, s, torch.ones(10), 0.1)
    with pytest.raises(ValueError, match="information of at least 0"):
        privacy.variational_funnel(x, s, s, -0.1)
