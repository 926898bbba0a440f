r"""The variational approximation: q(γ) ∏_j q(θ_j), or one joint q(γ, θ), and q(z | θ).

The server (index 0) and the parties (1 … J) each hold parameters and noise of their own. A joint q(γ, θ) is
:math:`\theta = \mu + L\varepsilon` over all coordinates, or :math:`\mu + D\varepsilon + W\eta` where it is of low rank:
party j holds its own rows of (μ, L) or (μ, D, W), and everybody draws the same noise from the shared key, so that
correlations between parties' parameters need no exchange of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.vfl.fit.auxiliary import Auxiliary, amortised
from fedtorch.vfl.fit.gaussians import GaussianFamily, full_covariance
from fedtorch.vfl.model.vertical import VerticalModel

_ENCODER = 2  # purpose of a node's key


@dataclass(frozen=True)
class Guide:
    """Which family approximates the posterior; by default amortised encoders and a full covariance for each party.

    Attributes:
        auxiliary: of z given θ.
        theta: of γ and of each θ_j.
        joint: one q over all of γ, θ_1, …, θ_J instead.
        sticking: stop the gradient at the parameters of log q (equation 4), not at its sample, so that the noise of
            the gradient vanishes where q is exact; otherwise the gradient of the entropy in closed form.
        sd: standard deviation of q(θ) at the start.
        shared: of γ, where it is another than `theta`.

    Raises:
        ValueError: `sd` is not positive.
    """

    auxiliary: Auxiliary = field(default_factory=amortised)
    theta: GaussianFamily = field(default_factory=full_covariance)
    joint: bool = field(default=False, kw_only=True)
    sticking: bool = field(default=True, kw_only=True)
    sd: float = field(default=0.1, kw_only=True)
    shared: GaussianFamily | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.sd > 0:
            raise ValueError(f"Expected a positive standard deviation at the start, but got {self.sd}")

    def family(self, index: int) -> GaussianFamily:
        """That of node `index`: the server is 0, the parties 1 to J."""
        return self.shared if self.shared is not None and not index else self.theta


class Parameters(NamedTuple):
    """Variational parameters, `(B, ...)` each.

    >>> import fedtorch as ft
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(2), ft.vfl.linear(3)], rho=1.0)
    >>> guide = Guide(ft.vfl.noiseless(), ft.vfl.diagonal())
    >>> start = initial(model, guide, rows=100, size=4, key=random.key(0))  # of four fits at once
    >>> start.parties[1]["theta"]["mean"].shape
    torch.Size([4, 3])
    >>> count_parameters(start)  # a mean and a standard deviation of 1 + 2 + 3 coordinates
    12
    """

    joint: dict[str, Tensor] | None  # of q(γ, θ), where it is joint
    server: dict[str, dict[str, Tensor]]  # "theta", "z", "weights"
    parties: tuple[dict[str, dict[str, Tensor]], ...]  # "theta", "z"


def initial(
    model: VerticalModel, guide: Guide, rows: int, size: int, key: Tensor, dtype: torch.dtype = torch.float32
) -> Parameters:
    """Parameters to start from: small standard deviations around zero or a network's weights, and encoders that answer
    zero; on the key's device.

    Args:
        model: the model.
        guide: the family.
        rows: n, of which only `mean_field` needs to know.
        size: B.
        key: of the encoders' weights.
        dtype: of the parameters.
    """
    starts = [None, *(p.start for p in model.predictors)]
    at_parties = guide.auxiliary.party is not None

    def node(index: int) -> dict[str, dict[str, Tensor]]:
        q: dict[str, dict[str, Tensor]] = {}
        if not guide.joint:
            q["theta"] = guide.family(index).init(size, model.sizes[index], guide.sd, dtype, key.device)
            if (start := starts[index]) is not None:
                q["theta"]["mean"].copy_(start)
        if (index > 0) == at_parties:
            own = random.fold_in(random.fold_in(key, index), _ENCODER)
            q["z"] = guide.auxiliary.init(model, model.outputs[index], size, rows, own, dtype)
        return q

    server = node(0)
    if model.concentration is not None:
        server["weights"] = {"logits": torch.zeros(size, len(model.predictors), dtype=dtype, device=key.device)}
    joint = guide.theta.init(size, sum(model.sizes), guide.sd, dtype, key.device) if guide.joint else None
    for start, place in zip(starts, joint["mean"].split(model.sizes, -1) if joint else ()):
        if start is not None:
            place.copy_(start)
    return Parameters(joint, server, tuple(node(j) for j in range(1, len(model.sizes))))


def count_parameters(parameters: Parameters) -> int:
    """Variational parameters of one element of the batch."""
    return sum(leaf[0].numel() for leaf in tree.leaves(parameters))
