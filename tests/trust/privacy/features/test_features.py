"""Private features against regressions, and the privacy funnel against a search among all Gaussian maps."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import Tensor

from fedtorch.trust import privacy
from fedtorch.trust.privacy.features.features import reconstruction_error

GENERATOR = torch.Generator().manual_seed(0)


def test_projected_features_hide_the_attribute() -> None:
    x = torch.randn(500, 4, generator=GENERATOR, dtype=torch.float64) @ torch.randn(4, 4, generator=GENERATOR).double()
    s = x @ torch.tensor([1.0, -2.0, 0.0, 0.5]).double() + torch.randn(500, generator=GENERATOR).double() + 7
    projection = privacy.private_projection(x, s)
    z = (x @ projection).numpy()
    assert LinearRegression().fit(z, s.numpy()).score(z, s.numpy()) == pytest.approx(0.0, abs=1e-12)
    centred = x - x.mean(0)
    cross = centred.T @ (s - s.mean()) / 500
    printed = torch.eye(4).double() - torch.outer(cross, cross) / cross.square().sum()
    assert float((projection - printed).abs().max()) < 1e-12
    variance = float((s - s.mean()).square().mean())
    assert reconstruction_error(x, s, projection) == pytest.approx(variance)
    plain = LinearRegression().fit(x.numpy(), s.numpy())
    residual = float(((s.numpy() - plain.predict(x.numpy())) ** 2).mean())
    assert reconstruction_error(x, s, torch.eye(4).double()) == pytest.approx(residual)


def test_several_attributes_are_projected_out_at_once() -> None:
    x = torch.randn(200, 5, generator=GENERATOR, dtype=torch.float64)
    s = torch.stack([x[:, 0], x[:, 0] + x[:, 1], torch.zeros(200)], 1)
    projection = privacy.private_projection(x, s)
    assert float(((x - x.mean(0)) @ projection).T.mm(s - s.mean(0)).abs().max()) < 1e-9
    assert float(projection.trace()) == pytest.approx(3.0)
    assert float((projection @ projection - projection).abs().max()) < 1e-12
    with pytest.raises(ValueError, match="Expected features"):
        privacy.private_projection(x, s[:10])


def gaussian_problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A joint covariance of x (3), s and y."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    joint = factor @ factor.T
    return joint[:3, :3], torch.cat([joint[:3, 3], joint[3:4, 3]]), torch.cat([joint[:3, 4], joint[4:, 4]])


def told(covariance: Tensor, cross: Tensor, direction: Tensor, noise: float) -> float:
    """I(z; ·) of z = ⟨direction, x⟩ + N(0, noise) by the correlation."""
    if math.isinf(noise):
        return 0.0
    correlation = float(direction @ cross[:-1]) ** 2 / (float(direction @ covariance @ direction) + noise)
    return -0.5 * math.log(1 - correlation / float(cross[-1]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.95, 1.0])
def test_the_funnel_leaks_least(seed: int, share: float) -> None:
    """Among 200 000 random Gaussian maps, none that tells as much leaks less."""
    covariance, private, label = gaussian_problem(seed)
    root = torch.linalg.cholesky(covariance)
    white = [torch.linalg.solve(root, each[:-1]) / each[-1].sqrt() for each in (private, label)]
    most = -0.5 * math.log(1 - float(white[1].square().sum()))
    found = privacy.privacy_funnel(covariance, private, label, share * most)
    assert told(covariance, label, found.direction, found.noise) == pytest.approx(share * most, abs=1e-9)
    assert told(covariance, private, found.direction, found.noise) == pytest.approx(found.leak, abs=1e-9)
    generator = torch.Generator().manual_seed(99)
    bases = torch.linalg.qr(torch.randn(200_000, 3, 3, generator=generator, dtype=torch.float64))[0]
    sizes = torch.rand(200_000, 3, generator=generator, dtype=torch.float64).round(decimals=1)
    along = [(bases.mT @ each).square() for each in white]  # (N, 3) in each map's own basis
    leak, information = (-0.5 * torch.log1p(-(sizes * each).sum(1)) for each in along)
    enough = information >= share * most - 1e-12
    assert not bool((leak[enough] < found.leak - 1e-9).any())


def test_the_funnel_at_its_ends() -> None:
    covariance = torch.eye(2, dtype=torch.float64)
    private = torch.tensor([0.6, 0.0, 1.0], dtype=torch.float64)
    orthogonal = torch.tensor([0.0, 0.7, 1.0], dtype=torch.float64)
    most = -0.5 * math.log(1 - 0.49)
    assert privacy.privacy_funnel(covariance, private, orthogonal, most).leak == 0.0  # nothing has to leak
    same = privacy.privacy_funnel(covariance, private, private, 0.1)
    assert same.leak == pytest.approx(0.1)  # all that is told leaks
    opposite = privacy.privacy_funnel(covariance, private, torch.tensor([-0.6, 0.0, 1.0]).double(), 0.1)
    assert opposite.leak == pytest.approx(0.1)
    unknown = privacy.privacy_funnel(covariance, torch.tensor([0.0, 0.0, 1.0]).double(), orthogonal, 0.2)
    assert (unknown.leak, unknown.information) == (0.0, 0.2)
    with pytest.raises(ValueError, match=r"I\(y; x\) = 0.33"):
        privacy.privacy_funnel(covariance, private, orthogonal, 2.0)
    with pytest.raises(ValueError, match="x determines"):
        privacy.privacy_funnel(covariance, torch.tensor([1.0, 0.0, 1.0]).double(), orthogonal, 0.1)
    with pytest.raises(ValueError, match="positive definite"):
        privacy.privacy_funnel(-covariance, private, orthogonal, 0.1)
    with pytest.raises(ValueError, match="Expected a covariance"):
        privacy.privacy_funnel(covariance, private[:2], orthogonal, 0.1)
