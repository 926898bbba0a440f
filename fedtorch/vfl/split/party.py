"""The part of a split network that a party holds: its bottom networks, and what it believes of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fedtorch import functional, random
from fedtorch.vfl.likelihoods import Likelihood
from fedtorch.vfl.model import Batch
from fedtorch.vfl.split.bayes import (
    PREDICT,
    HierarchicalBayes,
    NodeNoise,
    auxiliary_model,
    dropout_keys,
    encoder_weights,
    held,
)
from fedtorch.vfl.split.saved import Saved
from fedtorch.vfl.split_nn import Stacked

__all__ = ["PartyNetwork"]


class PartyNetwork(Saved):
    """A party's bottom networks, and what it believes of their weights; in another organisation it runs alone.

    Args:
        name: of the party.
        bottom: the stacked networks, of rows to `(B, n, C_j)`.
        outputs: C_j, the numbers that it sends for a row.
        likelihood: of the response; its encoder is shown what the likelihood shows of y.
        parties: J.
        bayes: noise and priors; None for a plain network.
        key: of its noise and its encoder's weights.
    """

    active: Tensor  # (B, 1) whether an element has noise and priors
    rho: Tensor  # (B, 1, 1, 1)
    precision: Tensor  # (B, 1) of the prior on weights that are not random; 0 for none

    def __init__(
        self,
        name: str,
        bottom: Stacked,
        outputs: int,
        likelihood: Likelihood,
        parties: int,
        bayes: HierarchicalBayes | None,
        key: Tensor,
    ) -> None:
        super().__init__()
        self.name, self.bottom, self.outputs, self.bayes, self.key = name, bottom, outputs, bayes, key
        self.parties = parties
        self.q, self.encoder = nn.ParameterDict(), nn.ParameterDict()
        self.random: dict[str, torch.Size] = {}  # shapes of the random weights of one element
        self._register(bayes)
        auxiliary = None if bayes is None else bayes.auxiliary
        if bayes is not None:
            self._make_random(bayes)
        if bayes is not None and auxiliary is not None and auxiliary.party is not None:
            self.model = auxiliary_model(likelihood, outputs, parties, self.rho)
            self.encoder = encoder_weights(auxiliary, self.model, self.rho, key)
        z = outputs if auxiliary is not None and auxiliary.party is not None else 0
        count = 0 if bayes is None else bayes.theta.noises(sum(shape.numel() for shape in self.random.values()))
        self.noise = NodeNoise(key, count, z)

    def _register(self, bayes: HierarchicalBayes | None) -> None:
        rho = self._of_elements(0.0 if bayes is None else bayes.rho, "rho")
        sd = self._of_elements(math.inf if bayes is None or bayes.weight_sd is None else bayes.weight_sd, "weight_sd")
        self.register_buffer("rho", rho.reshape(-1, 1, 1, 1), persistent=False)
        self.register_buffer("active", (rho > 0).reshape(-1, 1), persistent=False)
        self.register_buffer("precision", sd.square().reciprocal().reshape(-1, 1), persistent=False)

    def _of_elements(self, value: float | Tensor, name: str) -> Tensor:
        """One number for each element, `(B,)`."""
        numbers = torch.as_tensor(value, dtype=torch.float64)
        if numbers.ndim and len(numbers) != self.bottom.size:
            raise ValueError(f"Expected {name} of {self.bottom.size} elements, but got {len(numbers)}")
        return numbers.expand(self.bottom.size).to(self.bottom.weights[0], copy=True)

    def _make_random(self, bayes: HierarchicalBayes) -> None:
        """Moves the random weights from the stack into q, whose mean starts where they did."""
        names = list(functional.split(dict.fromkeys(self.bottom.names, torch.empty(0)), bayes.random)[0])
        released = self.bottom.release(names)
        self.random = {name: value.shape[1:] for name, value in released.items()}
        mean = torch.cat([value.flatten(1) for value in released.values()], 1)
        q = bayes.theta.init(len(mean), mean.shape[1], bayes.sd, mean.dtype, mean.device)
        self.q = nn.ParameterDict({**q, "mean": mean})

    def forward(self, x: Tensor, step: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """(z_j `(B, 1, C_j, n)`, this party's terms of the bound `(B, 1)`) of an iteration.

        Args:
            x: its features, `(n, ...)` or `(B, n, ...)`.
            step: of the iteration.
            batch: the rows' weights, and the response where the party's encoder sees it.
        """
        rows = x.shape[-1 - self.bottom.row_dims]
        theta_noise, z_noise = self.noise.at(step, rows, self.rho)
        weights, terms = self._weights(theta_noise)
        keys = partial(dropout_keys, self.key, step, self.bottom.size, x.device)
        eta = self._rows(x, weights, keys).unsqueeze(1)
        bayes = self.bayes
        if bayes is None or bayes.auxiliary is None or bayes.auxiliary.party is None:
            return eta, terms
        q = dict(self.encoder)
        z, ratio = bayes.auxiliary.party(q, held(q, bayes), eta, z_noise, batch, self.model)
        z = torch.where(self.active[..., None, None], z, eta)
        return z, terms + self.active * batch.weighted_sum(ratio)

    def _rows(self, x: Tensor, weights: dict[str, Tensor] | None, keys: Callable[[], Tensor] | None = None) -> Tensor:
        """Rows of all networks, `(B, C_j, n)`."""
        found = self.bottom(x, weights, keys)
        if found.ndim != 3 or found.shape[-1] != self.outputs:
            raise ValueError(
                f"Expected networks of {self.name!r} that map rows (n, ...) to (n, {self.outputs}), but got "
                f"{tuple(found.shape[1:])}; see `widths`"
            )
        return found.mT

    def _weights(self, noise: Tensor) -> tuple[dict[str, Tensor] | None, Tensor]:
        """A draw of the random weights, and log p − log q of it, `(B, 1)`."""
        bayes, zero = self.bayes, torch.zeros_like(self.rho[:, :, 0, 0])
        if bayes is None:
            return None, zero
        q = dict(self.q)
        theta = torch.where(self.active.unsqueeze(-1), bayes.theta.draw(q, noise), q["mean"].unsqueeze(1))
        terms = bayes.prior(theta) - bayes.theta.log_density(held(q, bayes), theta)
        if bayes.weight_sd is not None and len(self.bottom.weights):
            squares = torch.stack([weight.square().flatten(1).sum(1) for weight in self.bottom.weights]).sum(0)
            terms = terms - 0.5 * self.precision * squares.unsqueeze(1)
        return self._named(theta), torch.where(self.active, terms, zero)

    def _named(self, theta: Tensor) -> dict[str, Tensor]:
        parts = theta[:, 0].split([shape.numel() for shape in self.random.values()], -1)
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(self.random.items(), parts)}

    @torch.no_grad()
    def propose(self, x: Tensor, key: Tensor, draws: int = 1, noise: bool = True) -> Tensor:
        """Predictions of new rows that it sends to the server: draws of z_j from the model, `(B, draws, C_j, n)`.

        A network with dropout has to be in evaluation mode (`eval()`).

        Args:
            x: features of the new rows.
            key: of the draws; the party folds its own number in.
            draws: M; plain networks need only one.
            noise: whether to add ρε, which hides f_j and is part of the model.
        """
        dims = self.bottom.row_dims
        rows, device, sent = x.shape[-1 - dims], self.rho.device, []
        own = random.fold_in(random.fold_in(self.key.to(key.device), key), PREDICT)
        each = random.fold_in(own, torch.arange(draws, device=key.device))
        thetas = random.normal(random.fold_in(each, 0), (1, 1, self.noise.theta), self.rho.dtype).to(device)
        for theta in thetas:
            sent.append(self._rows(x, self._weights(theta)[0]))
        etas = torch.stack(sent, 1)
        if not noise or self.bayes is None:
            return etas
        of_rows = random.normal(random.fold_in(each, 1), (self.outputs, rows), self.rho.dtype).to(device)
        return torch.addcmul(etas, self.rho, of_rows)
