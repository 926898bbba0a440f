r"""Split networks: every party a bottom network of its own features, the server the rest.

Plain, party j sends :math:`z_j = f_j(x_j)`, the server combines them at the cut layer (a sum, or a concatenation that
goes through a top network) and knows the response. The *hierarchical Bayes* split network is the augmented model with
networks as predictors:

.. math::
    y_i \sim p(y \mid \textstyle\sum_j z_{ij}), \qquad z_{ij} \sim N(f_j(x_{ij}; \varphi_j, w_j), \rho^2), \qquad
    w_j \sim N(0, \tau^2),

with w_j the last layer's weights (or any that match a pattern), q(w_j) Gaussian, q(z | w) amortised, and φ_j found by
maximising the bound. Everything carries a batch (folds × models × seeds) in front and is trained at once: elements of
the batch do not influence each other, share the noise of an iteration, and are plain networks where ρ = 0.

What passes between the nodes are z_j up and ∂L/∂z_j down: `fedtorch.vfl.split.nodes`.

Source: Hassan, Sutton, Mira, Mengersen, "Scalable Vertical Federated Learning via Data Augmentation and Amortized
Inference", section 5.3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from fedtorch import random
from fedtorch.vfl.auxiliary import amortised, sums
from fedtorch.vfl.encoder import perceptron
from fedtorch.vfl.likelihoods import Likelihood
from fedtorch.vfl.model import VerticalData, check_response
from fedtorch.vfl.split.bayes import HierarchicalBayes
from fedtorch.vfl.split.party import PartyNetwork
from fedtorch.vfl.split.rows import batch_of, check_rows, of_party, present, rows_of, shaped
from fedtorch.vfl.split.server import Combine, ServerNetwork, summed
from fedtorch.vfl.split_nn import Stacked

__all__ = ["SplitNetwork", "adam"]

_WEIGHTS = 100  # purpose of an element's key


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam at 1e-3, as in the source."""
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


class SplitNetwork(L.LightningModule):
    """Split networks, plain or hierarchical Bayes, that an ordinary `Trainer` trains in one graph.

    The loss of a batch element is the negative bound per row (the negative log-likelihood, of a plain network); the sum
    over elements goes to the optimiser, which has to act on each number by itself, as Adam and SGD do.

    Args:
        bottoms: one network per party, any module of rows `(n, ...)` to `(n, C_j)`.
        likelihood: of the response, from `fedtorch.vfl.likelihoods`.
        keys: `(B,)` one per batch element, from which its weights start; the first is also that of the noise.
        combine: at the cut layer, `summed` or `concatenated`.
        top: a network at the server of the cut layer `(n, C)` to the likelihood's predictor; none by default.
        bayes: noise and priors; None for plain networks.
        names: of the parties.
        widths: C_j; the likelihood's number of outputs by default.
        row_dims: dimensions of one party's row: 1 for a table, 3 for images; tells whether features are stacked.
        optimizer: from parameters to an elementwise optimiser, or to anything else that `configure_optimizers` may
            return, such as one with a schedule; Adam at 1e-3 by default.
        validation_draws: Monte Carlo draws of a validation loss.

    Attributes:
        parties: a `PartyNetwork` each.
        server: the `ServerNetwork`.
        validation_losses: `(B,)` negative log scores per row, after a validation epoch.

    Raises:
        ValueError: no party, names or widths of another number, or noise at the sum without a sum at the cut layer.

    >>> from fedtorch.vfl import likelihoods, split_nn
    >>> keys = random.fold_in(random.key(0), torch.arange(2))
    >>> bottoms = [split_nn.mlp(3, [4], 1), split_nn.mlp(2, [4], 1)]
    >>> network = SplitNetwork(bottoms, likelihoods.bernoulli(), keys=keys, names=["clinic", "laboratory"])
    >>> network.predict([torch.zeros(5, 3), torch.zeros(5, 2)]).shape
    torch.Size([2, 5])
    """

    parties: Sequence[PartyNetwork]

    def __init__(
        self,
        bottoms: Sequence[nn.Module],
        likelihood: Likelihood,
        *,
        keys: Tensor,
        combine: Combine = summed,
        top: nn.Module | None = None,
        bayes: HierarchicalBayes | None = None,
        names: Sequence[str] | None = None,
        widths: Sequence[int] | None = None,
        row_dims: Sequence[int] | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], OptimizerLRScheduler] = adam,
        validation_draws: int = 16,
    ) -> None:
        super().__init__()
        count = len(bottoms)
        names = [f"party {j}" for j in range(count)] if names is None else list(names)
        widths = [likelihood.outputs] * count if widths is None else list(widths)
        dims = [1] * count if row_dims is None else list(row_dims)
        if not count or not count == len(names) == len(widths) == len(dims) or len(set(names)) < count:
            raise ValueError(
                f"Expected parties with a name, width and row_dims each, but got {names}, {widths}, {dims}"
            )
        bayes = _with_auxiliary(bayes, combine is summed and top is None)
        of_node = lambda j: random.fold_in(keys.reshape(-1)[0], j)
        of_weights = lambda j: random.fold_in(random.fold_in(keys, j), _WEIGHTS)
        parties = []
        for j, (module, name, width, dim) in enumerate(zip(bottoms, names, widths, dims), start=1):
            bottom = Stacked(module, of_weights(j), dim)
            parties.append(PartyNetwork(name, bottom, width, likelihood, count, bayes, of_node(j)))
        self.parties = cast("Sequence[PartyNetwork]", nn.ModuleList(parties))
        stacked = None if top is None else Stacked(top, of_weights(0))
        self.server = ServerNetwork(likelihood, combine, stacked, widths, bayes, of_node(0), parties[0])
        self.optimizer, self.validation_draws = optimizer, validation_draws
        self.validation_losses = torch.full((len(keys),), math.nan)

    @property
    def size(self) -> int:
        """B."""
        return self.parties[0].bottom.size

    def losses(self, data: VerticalData, step: int) -> Tensor:
        """The negative bound per row of each element, `(B,)`, with the noise of this step."""
        batch = batch_of(data, self.parties[0].rho.dtype)
        sent = [
            party(x, step, of_party(batch, data, j)) for j, (party, x) in enumerate(zip(self.parties, data.features))
        ]
        values = [present(z, data, j) for j, (z, _) in enumerate(sent)]
        bound = self.server(values, step, batch) + sum(terms for _, terms in sent)
        return -bound.squeeze(1) / rows_of(data).to(bound)

    def training_step(self, data: VerticalData, index: int) -> Tensor:
        """The sum of the elements' losses."""
        if self.global_step == 0:
            self.check(data)
        losses = self.losses(data, self.global_step)
        self.log("train_loss", losses.detach().mean(), on_step=False, on_epoch=True, batch_size=1)
        return losses.sum()

    def validation_step(self, data: VerticalData, index: int) -> None:
        """Logs the mean over elements of the negative log score."""
        score = self.log_score(data, draws=self.validation_draws)
        weight = torch.ones_like(score) if data.weight is None else data.weight.to(score).expand_as(score)
        self.validation_losses = -(score * weight).sum(-1) / weight.sum(-1)
        self.log("val_loss", self.validation_losses.mean(), batch_size=1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimiser of all nodes' parameters."""
        return self.optimizer(self.parameters())

    def check(self, data: VerticalData) -> None:
        """Checks data against the network.

        Raises:
            ValueError: another number of parties or rows, features that are not finite, a response that the likelihood
                does not have, or absent rows with noise drawn at the sum.
        """
        check_rows(data, [party.bottom.row_dims for party in self.parties], [party.name for party in self.parties])
        check_response(self.server.likelihood, data)
        if data.present is not None and len(self.server.encoder):
            raise ValueError("Expected rows that all parties have, for `sums`, but got absent ones; use `amortised`")

    @torch.no_grad()
    def totals(
        self, features: Sequence[Tensor], draws: int, key: Tensor | None, noise: bool, data: VerticalData | None = None
    ) -> Tensor:
        """Draws of the likelihood's predictor of new rows, `(B, M, C, n)`, by all parties together."""
        if len(features) != len(self.parties):
            raise ValueError(f"Expected features of {len(self.parties)} parties, but got {len(features)}")
        rows = [x.shape[-1 - party.bottom.row_dims] for party, x in zip(self.parties, features)]
        if len(set(rows)) > 1:
            raise ValueError(f"Expected the same rows of all parties, but got {rows} of them; align the rows")
        was_training = self.training
        self.eval()
        try:
            key = random.key(0).to(self.server.rho.device) if key is None else key
            values = [party.propose(x, key, draws, noise) for party, x in zip(self.parties, features)]
            if data is not None:
                values = [present(value, data, j) for j, value in enumerate(values)]
            offset = None if data is None or data.offset is None else shaped(data.offset, 2, values[0].dtype)
            return self.server.predictor(self.server.combine(values), offset)
        finally:
            self.train(was_training)

    def predict(
        self, features: Sequence[Tensor], *, draws: int = 100, key: Tensor | None = None, noise: bool = True
    ) -> Tensor:
        """The predictive mean of new rows by all parties together, averaged over draws.

        Args:
            features: `(n, ...)` or `(B, n, ...)`, one per party.
            draws: of weights and noise.
            key: of the draws.
            noise: whether with the model's noise on z.

        Returns:
            `(B, n)`; of a categorical likelihood probabilities `(B, C, n)`.

        Raises:
            ValueError: another number of parties, or parties with other numbers of rows.
        """
        total = self.totals(features, draws if self._bayesian else 1, key, noise)
        return self.server.likelihood.mean(total, self.server.shared.detach()).mean(1)

    def log_score(
        self, data: VerticalData, *, draws: int = 100, key: Tensor | None = None, noise: bool = True
    ) -> Tensor:
        r"""The log predictive density of each row, :math:`\log \frac1M \sum_m p(y_i | m)`, `(B, n)`."""
        total = self.totals(data.features, draws if self._bayesian else 1, key, noise, data)
        y = shaped(data.response, 1, total.dtype)
        rows = self.server.likelihood.log_prob(y, total, self.server.shared.detach())
        return rows.logsumexp(1) - math.log(rows.shape[1])

    @property
    def _bayesian(self) -> bool:
        return bool(self.server.active.any())

    def predict_step(self, data: VerticalData, index: int) -> Tensor:
        """What `predict` says of a batch."""
        return self.predict(data.features)


def _with_auxiliary(bayes: HierarchicalBayes | None, at_sum: bool) -> HierarchicalBayes | None:
    if bayes is None:
        return None
    auxiliary = bayes.auxiliary or (sums(perceptron(4), skewed=False) if at_sum else amortised(perceptron(8)))
    if auxiliary.server is not None and not at_sum:
        raise ValueError(
            "Expected a sum at the cut layer and no top network for `sums`, but got others; use `amortised`"
        )
    return dataclasses.replace(bayes, auxiliary=auxiliary)
