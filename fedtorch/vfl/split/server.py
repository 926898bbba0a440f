"""The part of a split network that the server holds: the cut layer and what is above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedtorch.vfl.likelihoods import Likelihood
from fedtorch.vfl.model import Batch
from fedtorch.vfl.split.bayes import (
    HierarchicalBayes,
    NodeNoise,
    auxiliary_model,
    dropout_keys,
    encoder_weights,
    held,
)
from fedtorch.vfl.split.party import PartyNetwork
from fedtorch.vfl.split.saved import Saved
from fedtorch.vfl.split_nn import Stacked

__all__ = ["Combine", "ServerNetwork", "concatenated", "summed"]

Combine = Callable[[Sequence[Tensor]], Tensor]


def summed(values: Sequence[Tensor]) -> Tensor:
    """Σ_j z_j: every party sends as many numbers a row as the likelihood's predictor has."""
    return sum(values[1:], values[0])


def concatenated(values: Sequence[Tensor]) -> Tensor:
    """All z_j beside each other, `(B, M, Σ_j C_j, n)`, for a top network."""
    return torch.cat(list(values), -2)


class ServerNetwork(Saved):
    """What the server holds: the cut layer, perhaps a top network and the encoder of q(s | θ), shared parameters.

    Args:
        likelihood: of the response.
        combine: of the values at the cut layer.
        top: stacked networks on the cut layer `(B, n, C)`; None for none.
        widths: C_j, what each party sends for a row.
        bayes: noise and priors.
        key: of its noise and its encoder's weights.
        like: a party's network, whose dtype and ρ it takes.
    """

    name = "server"
    rho: Tensor  # (B, 1, 1, 1)
    active: Tensor  # (B, 1) whether an element has noise and priors

    def __init__(
        self,
        likelihood: Likelihood,
        combine: Combine,
        top: Stacked | None,
        widths: Sequence[int],
        bayes: HierarchicalBayes | None,
        key: Tensor,
        like: PartyNetwork,
    ) -> None:
        super().__init__()
        self.likelihood, self.combine, self.top, self.bayes, self.key = likelihood, combine, top, bayes, key
        self.widths = list(widths)
        self.register_buffer("rho", like.rho.clone(), persistent=False)
        self.register_buffer("active", like.active.clone(), persistent=False)
        shared = torch.zeros(like.bottom.size, 1, len(likelihood.shared), dtype=like.rho.dtype)
        self.shared, self.encoder = nn.Parameter(shared), nn.ParameterDict()
        here = bayes is not None and bayes.auxiliary is not None and bayes.auxiliary.server is not None
        if here:
            self.model = auxiliary_model(likelihood, likelihood.outputs, len(widths), self.rho)
            self.encoder = encoder_weights(bayes.auxiliary, self.model, self.rho, key)  # type: ignore[union-attr, arg-type]
        self.noise = NodeNoise(key, 0, likelihood.outputs if here else 0)

    def forward(self, values: Sequence[Tensor], step: int, batch: Batch) -> Tensor:
        """The server's term of the bound, `(B, 1)`: log-likelihood, and log p − log q of s where it draws s.

        Args:
            values: z_j, `(B, 1, C_j, n)` each.
            step: of the iteration.
            batch: response, offset and weights.
        """
        total, ratio = self.combine(values), None
        if len(self.encoder):
            auxiliary = self.bayes.auxiliary  # type: ignore[union-attr]
            q, noise = dict(self.encoder), self.noise.at(step, total.shape[-1], self.rho)[1]
            centre = self._with_offset(total, batch.offset)
            sampled = auxiliary.server(q, held(q, self.bayes), centre, noise, batch, self.model)  # type: ignore
            total = torch.where(self.active[..., None, None], sampled.total, centre)
            assert sampled.log_ratio is not None
            ratio = torch.where(self.active.unsqueeze(-1), sampled.log_ratio, 0.0)
        else:
            total = self.predictor(total, batch.offset, step)
        rows = self.likelihood.log_prob(batch.y, total, self.shared)
        return batch.weighted_sum(rows if ratio is None else rows + ratio)

    def predictor(self, combined: Tensor, offset: Tensor | None = None, step: int = 0) -> Tensor:
        """Cut layer `(B, M, C, n)` to the likelihood's predictor."""
        if self.top is not None:
            keys = partial(dropout_keys, self.key, step, self.top.size, combined.device)
            rows = self.top(combined.mT.flatten(1, 2), None, keys)
            combined = rows.unflatten(1, (combined.shape[1], -1)).mT
        return self._with_offset(combined, offset)

    def _with_offset(self, total: Tensor, offset: Tensor | None) -> Tensor:
        if total.shape[-2] != self.likelihood.outputs:
            raise ValueError(
                f"Expected {self.likelihood.outputs} numbers a row for the likelihood, but got {total.shape[-2]}; "
                "see `widths`, `combine` and `top`"
            )
        return total if offset is None else total + offset
