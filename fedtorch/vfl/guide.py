r"""The variational approximation: q(γ) ∏_j q(θ_j), or one joint q(γ, θ), and q(z | θ).

The server (index 0) and the parties (1 … J) each hold parameters and noise of their own. A joint q(γ, θ) is
:math:`\theta = \mu + L\varepsilon` over all coordinates, or :math:`\mu + D\varepsilon + W\eta` where it is of low rank:
party j holds its own rows of (μ, L) or (μ, D, W), and everybody draws the same noise from the shared key, so that
correlations between parties' parameters need no exchange of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.vfl.auxiliary import Auxiliary, amortised
from fedtorch.vfl.gaussians import GaussianFamily, full_covariance
from fedtorch.vfl.model import Batch, VerticalModel

__all__ = ["Guide", "Noise", "Parameters", "count_parameters", "draw_noise", "draw_theta", "initial"]

_THETA, _Z, _ENCODER = 0, 1, 2  # purposes of a node's key


@dataclass(frozen=True)
class Guide:
    """Which family approximates the posterior.

    Attributes:
        auxiliary: of z given θ.
        theta: of γ and of each θ_j.
        joint: one q over all of γ, θ_1, …, θ_J instead.
        sticking: stop the gradient at the parameters of log q (equation 4), not at its sample, so that the noise of
            the gradient vanishes where q is exact; otherwise the gradient of the entropy in closed form.
        sd: standard deviation of q(θ) at the start.
    """

    auxiliary: Auxiliary
    theta: GaussianFamily
    joint: bool = False
    sticking: bool = True
    sd: float = 0.1

    @staticmethod
    def of(
        auxiliary: Auxiliary | None = None,
        theta: GaussianFamily | None = None,
        *,
        joint: bool = False,
        sticking: bool = True,
        sd: float = 0.1,
    ) -> Guide:
        """A guide; by default amortised encoders and a full covariance for each party.

        Raises:
            ValueError: `sd` is not positive.
        """
        if not sd > 0:
            raise ValueError(f"Expected a positive standard deviation at the start, but got {sd}")
        return Guide(auxiliary or amortised(), theta or full_covariance(), joint, sticking, sd)


class Parameters(NamedTuple):
    """Variational parameters, `(B, ...)` each."""

    joint: dict[str, Tensor] | None  # of q(γ, θ), where it is joint
    server: dict[str, dict[str, Tensor]]  # "theta", "z", "weights"
    parties: tuple[dict[str, dict[str, Tensor]], ...]  # "theta", "z"


class Noise(NamedTuple):
    """Standard normal numbers of one iteration; the leading dimension is 1 where the batch shares them."""

    theta: tuple[Tensor, ...]  # (1 or B, M, noises), of the server and the parties
    z: tuple[Tensor, ...]  # (1 or B, M, noises · C, n), of the server and the parties


def initial(model: VerticalModel, guide: Guide, batch: Batch, size: int, key: Tensor) -> Parameters:
    """Parameters to start from: small standard deviations around zero, and encoders that answer the prior.

    Args:
        model: the model.
        guide: the family.
        batch: the data.
        size: B.
        key: of the encoders' weights.
    """
    dtype, device, rows = batch.features[0].dtype, batch.features[0].device, batch.y.shape[-1]
    one = batch.y[..., :1]
    shown = model.likelihood.features(one, one.new_zeros(model.likelihood.outputs, 1)).shape[-2]

    def theta(count: int) -> dict[str, dict[str, Tensor]]:
        return {} if guide.joint else {"theta": guide.theta.init(size, count, guide.sd, dtype, device)}

    def z(index: int) -> dict[str, dict[str, Tensor]]:
        own = random.fold_in(random.fold_in(key, index), _ENCODER)
        return {"z": guide.auxiliary.init(model, size, rows, shown, own, dtype)}

    at_parties = guide.auxiliary.party is not None
    server = theta(model.sizes[0]) | ({} if at_parties else z(0))
    if model.concentration is not None:
        server["weights"] = {"logits": torch.zeros(size, len(model.predictors), dtype=dtype, device=device)}
    parties = tuple(theta(d) | (z(j) if at_parties else {}) for j, d in enumerate(model.sizes[1:], start=1))
    joint = guide.theta.init(size, sum(model.sizes), guide.sd, dtype, device) if guide.joint else None
    return Parameters(joint, server, parties)


def count_parameters(parameters: Parameters) -> int:
    """Variational parameters of one element of the batch."""
    return sum(leaf[0].numel() for leaf in tree.leaves(parameters))


def draw_noise(
    model: VerticalModel, guide: Guide, key: Tensor, rows: int, draws: int, dtype: torch.dtype, prefix: int = 0
) -> Noise:
    """The noise of an iteration, a pure function of its key.

    Every node draws from a key of its own: what one draws does not depend on how many others there are.

    Args:
        model: the model.
        guide: the family.
        key: `(*prefix, B)`, or `(*prefix, 1)` where the batch shares its noise.
        rows: n.
        draws: M.
        dtype: of the noise.
        prefix: leading dimensions of `key` beside the batch, such as iterations.
    """
    nodes = range(len(model.predictors) + 1)
    outputs = model.likelihood.outputs
    z_count = guide.auxiliary.noises(model) * outputs
    theta, z = [], []
    for j in nodes:
        own = random.fold_in(key, j)
        # A joint family may take more numbers than coordinates; the server draws the surplus.
        surplus = guide.theta.noises(sum(model.sizes)) - sum(model.sizes) if guide.joint and j == 0 else 0
        count = model.sizes[j] + surplus if guide.joint else guide.theta.noises(model.sizes[j])
        theta.append(random.normal(random.fold_in(own, _THETA), (draws, count), dtype))
        here = (j > 0) == (guide.auxiliary.party is not None)
        of_z = (draws, z_count, rows) if here else (draws, 0, 0)
        z.append(random.normal(random.fold_in(own, _Z), of_z, dtype))
    return Noise(tuple(theta), tuple(z))


def draw_theta(
    model: VerticalModel, guide: Guide, parameters: Parameters, noise: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Draws (γ, θ_1, …, θ_J), `(B, M, d_j)` each, and log q of them, `(B, M)`."""
    if guide.joint:
        q = parameters.joint
        assert q is not None
        # The coordinates' noise in the order of the nodes, and the server's surplus last.
        own, surplus = noise[0].split([model.sizes[0], noise[0].shape[-1] - model.sizes[0]], -1)
        theta = guide.theta.draw(q, torch.cat([own, *noise[1:], surplus], -1))
        return list(theta.split(model.sizes, -1)), guide.theta.log_density(fixed(guide, q), theta)
    families = [parameters.server, *parameters.parties]
    thetas = [guide.theta.draw(q["theta"], e) for q, e in zip(families, noise)]
    densities = [guide.theta.log_density(fixed(guide, q["theta"]), theta) for q, theta in zip(families, thetas)]
    return thetas, torch.stack(densities).sum(0)


def fixed(guide: Guide, q: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters for log q: detached to stick the landing."""
    return {name: value.detach() for name, value in q.items()} if guide.sticking else q
