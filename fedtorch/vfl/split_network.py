r"""Split networks: every party has a bottom network for its own features, the server has the top.

In a plain split network, party j sends :math:`z_j = f_j(x_j)`. The server combines them at the cut layer (a sum, or a
concatenation that goes through a top network) and knows the response. The *hierarchical Bayes* split network is the
augmented model with networks as predictors:

.. math::
    y_i \sim p(y \mid \textstyle\sum_j z_{ij}), \qquad z_{ij} \sim N(f_j(x_{ij}; \varphi_j, w_j), \rho^2), \qquad
    w_j \sim N(0, \tau^2),

with w_j the last layer's weights (or any that match a pattern), q(w_j) Gaussian, q(z | w) amortised, and φ_j maximised
over in the bound. All tensors have a batch dimension (folds × models × seeds) in front, and the batch is trained at
once: its elements share the noise of an iteration and do not influence each other otherwise. An element with ρ = 0 is
a plain network: its weights have neither prior nor posterior, and its objective is the likelihood alone. It is
therefore *not* the limit ρ → 0 of the hierarchical network, where z has no noise but w_j still has its posterior;
scores jump there. For that limit take a small ρ, such as 1e-3.

*What its messages reveal.* A split network does not hide the labels from the parties. The gradient that a party
receives for a row has the sign of that row's residual, so that the gradients of one step reveal the labels (with two
classes all of them), whatever the noise ρ. A party sends a function of its features that others may invert. By default
the parties of the hierarchical model draw no noise: the one encoder is at the server (`sums`), which receives the sum
of the predictors without noise and draws s itself. Over ranks and streams it receives that sum under the masks of
`fedtorch.sites.secure` only. With `auxiliary=amortised()`, and without a sum at the cut layer, parties send z_j with
new noise in every step, drawn from a key. Whoever has the key knows the noise, and averaging the messages of T steps
reduces it by a factor of √T. The noise is part of the model, and no protection. `fedtorch.trust.attacks.split` has
these attacks, and `fedtorch.trust.privacy.noised_gradients` makes labels private.

Among nodes it is trained by the halves of `fedtorch.vfl.nodes.iteration`. With `torchrun`, every process makes the
`SplitNetwork` from the same seed, takes its own part of it and its own data, and runs its half. Of the other nodes'
modules only their number and their numbers of outputs matter::

    network = SplitNetwork(bottoms, likelihood, seed=0)
    iterations = [Iteration(step=step) for step in range(1000)]
    if rank == 0:  # of a plain network; `bayes=` wants `masked_server` and `masked_party` around the halves
        half = server_half(ServerNode(network.server, VerticalData((), y), optimizer=adam, per_row=True), iterations)
    else:
        data = VerticalData((x,), torch.full((len(x),), torch.nan))
        half = party_half(PartyNode(network.parties[rank - 1], data, optimizer=adam, per_row=True), iterations)
    over_ranks(half, rank, 3)

Source: Hassan, Sutton, Mira, Mengersen, "Scalable Vertical Federated Learning via Data Augmentation and Amortized
Inference", section 5.3.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from fedtorch import random
from fedtorch.checkpoint_io import keep_plain
from fedtorch.protocol.halves import Half, Receive, Send
from fedtorch.vfl.fit.auxiliary import noiseless
from fedtorch.vfl.fit.bound import bound
from fedtorch.vfl.fit.captured import CapturedBound
from fedtorch.vfl.fit.guide import Guide, Noise, Parameters, initial, point
from fedtorch.vfl.fit.hierarchical_bayes import HierarchicalBayes
from fedtorch.vfl.fit.part import Part, combined, draw_noises, evaluating, parts, predicted
from fedtorch.vfl.lightning import TrainerRun
from fedtorch.vfl.model.checks import check_features, check_response, check_rows
from fedtorch.vfl.model.likelihoods import ResponseLikelihood
from fedtorch.vfl.model.split_nn import NetworkPredictor, Stacked
from fedtorch.vfl.model.vertical import VerticalModel, summed
from fedtorch.vfl.nodes.node import Optimizers, PartyNode, ServerNode, value_of
from fedtorch.vfl.rows.data import VerticalData

_WEIGHTS = 100  # purpose of an element's key


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam at 1e-3, as in the source."""
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


class SplitNetwork(L.LightningModule):
    """Split networks, plain or hierarchical Bayes, that an ordinary `Trainer` trains in one graph.

    The loss of an element of the batch is the negative bound per row (of a plain network, the negative log-likelihood).
    The optimiser minimises the sum over the elements, so it has to be elementwise, as Adam and SGD are.

    Args:
        bottoms: one network per party, any module of rows `(n, ...)` to `(n, C_j)`.
        likelihood: of the response, from `fedtorch.vfl.model.likelihoods`.
        seed: of the initial weights, or one for each element of a batch; the first also seeds the noise.
        combine: at the cut layer, `summed` or `concatenated`.
        top: a network at the server of the cut layer `(n, C)` to the likelihood's predictor; none by default.
        bayes: noise and priors; None for plain networks.
        names: of the parties.
        widths: C_j; the likelihood's number of outputs by default.
        row_dims: dimensions of one party's row: 1 for a table, 3 for images. Features with one dimension more are
            shared by the batch; features with two more are stacked.
        optimizer: from parameters to an elementwise optimiser, or to anything else that `configure_optimizers` may
            return, such as one with a schedule; Adam at 1e-3 by default.
        validation_draws: Monte Carlo draws of a validation loss.
        compile: True captures a training step once per shape and replays it, see `fedtorch.vfl.fit.captured`.

    Attributes:
        parties: the `Part` of each party, with its own `save` and `load`.
        server: the server's `Part`.
        bayesian: whether any element has noise and priors.
        validation_losses: `(B,)` negative log scores per row, after a validation epoch.
        run: the run of its training by a Trainer, with the methods of `ft.Run`.

    Raises:
        ValueError: no party, names or widths of another number, or noise at the sum without a sum at the cut layer.

    >>> from fedtorch.vfl.model import likelihoods, split_nn
    >>> bottoms = [split_nn.mlp(3, [4], 1), split_nn.mlp(2, [4], 1)]
    >>> network = SplitNetwork(bottoms, likelihoods.bernoulli(), seed=[0, 1], names=["clinic", "laboratory"])
    >>> network.predict([torch.zeros(5, 3), torch.zeros(5, 2)]).shape
    torch.Size([2, 5])
    """

    parties: Sequence[Part]

    def __init__(
        self,
        bottoms: Sequence[nn.Module],
        likelihood: ResponseLikelihood,
        *,
        seed: int | Sequence[int] = 0,
        combine: Callable[[Sequence[Tensor]], Tensor] = summed,
        top: nn.Module | None = None,
        bayes: HierarchicalBayes | None = None,
        names: Sequence[str] | None = None,
        widths: Sequence[int] | None = None,
        row_dims: Sequence[int] | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], OptimizerLRScheduler] = adam,
        validation_draws: int = 16,
        compile: bool = False,
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
        keys = random.key(seed).reshape(-1)
        guide = Guide(noiseless(), point()) if bayes is None else bayes.guide(combine is summed and top is None)
        rho = _of_elements(1.0 if bayes is None else bayes.rho, len(keys), "rho")
        sd = None if bayes is None or bayes.weight_sd is None else _of_elements(bayes.weight_sd, len(keys), "weight_sd")
        of_weights = lambda j: random.fold_in(random.fold_in(keys, j), _WEIGHTS)
        predictors = [
            NetworkPredictor(
                Stacked(module, of_weights(j), dim), width, name=name, weight_sd=sd,
                random=() if bayes is None else bayes.random, prior=None if bayes is None else bayes.prior,
            )
            for j, (module, name, width, dim) in enumerate(zip(bottoms, names, widths, dims), start=1)
        ]  # fmt: skip
        dtype = predictors[0].start.dtype
        active = None if bool((rho > 0).all()) else rho > 0
        model = VerticalModel(
            likelihood, tuple(predictors), torch.where(rho > 0, rho, 1.0).to(dtype), intercept=False,
            active=active, combine=combine, top=None if top is None else Stacked(top, of_weights(0)),
        )  # fmt: skip
        key = keys[0]
        begin = initial(model, guide, 0, len(keys), key, dtype)
        server, *holders = parts(model, guide, begin, names=names, key=key)
        self.server, self.parties = server, cast("Sequence[Part]", nn.ModuleList(holders))
        self.size, self.bayesian = len(keys), bayes is not None and bool((rho > 0).any())
        self.optimizer, self.validation_draws, self.compiles = optimizer, validation_draws, compile
        self._captured: CapturedBound | None = None
        self.validation_losses = torch.full((len(keys),), math.nan)
        self.run = TrainerRun(self)

    @property
    def model(self) -> VerticalModel:
        """Return the vertical model that the parts belong to, with the parties' networks as its predictors."""
        return dataclasses.replace(
            self.server.model, predictors=tuple(cast("NetworkPredictor", party.network) for party in self.parties)
        )

    @property
    def variational(self) -> Parameters:
        """Return all parts' parameters of q."""
        return Parameters(None, self.server.q, tuple(party.q for party in self.parties))

    def losses(self, data: VerticalData, step: int) -> Tensor:
        """Return the negative bound per row of each element, `(B,)`, with the noise of this step."""
        batch, noise = self._drawn(data, step)
        value = bound(self.model, self.server.guide, self.variational, batch, noise).squeeze(1)
        return -value / batch.total.to(value)

    def _drawn(self, data: VerticalData, step: int) -> tuple[VerticalData, Noise]:
        """Return data in the networks' dtype, and the noise of this step."""
        noise = draw_noises([self.server, *self.parties], step, data.response.shape[-1])
        return data.to_dtype(self.server.rho.dtype), noise

    def setup(self, stage: str) -> None:
        """Make the Trainer write checkpoints atomically, and read none that could run code."""
        keep_plain(self.trainer.strategy)
        self._captured = None  # a capture refers to tensors, which the Trainer may have moved to a device

    def on_train_epoch_start(self) -> None:
        """Start the epoch's timer."""
        self._began = time.perf_counter()

    def on_train_epoch_end(self) -> None:
        """Record the epoch in the run's history."""
        self.run.epoch(dict(self.trainer.callback_metrics), time.perf_counter() - self._began)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the history to a Trainer's checkpoint."""
        checkpoint["history"] = self.run.log.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the history from a Trainer's checkpoint."""
        if "history" in checkpoint:
            self.run.log.load_state_dict(checkpoint["history"])
            self.run.number = len(self.run.log)

    def training_step(self, data: VerticalData, index: int) -> Tensor:
        """Return the sum of the elements' losses."""
        if self.global_step == 0:
            self.check(data)
        losses, total = (self._replayed if self.compiles else self._evaluated)(data, self.global_step)
        self.log("train_loss", losses.detach().mean(), on_step=False, on_epoch=True, batch_size=1)
        return total

    def _evaluated(self, data: VerticalData, step: int) -> tuple[Tensor, Tensor]:
        """Return (the losses, `(B,)`, their sum)."""
        losses = self.losses(data, step)
        return losses, losses.sum()

    def _replayed(self, data: VerticalData, step: int) -> tuple[Tensor, Tensor]:
        """Return (the losses, their sum) by a captured step."""
        batch, noise = self._drawn(data, step)
        if self._captured is None:
            self._captured = CapturedBound(self.model, self.server.guide, self.variational)
        return self._captured.losses(batch, noise, 1 / batch.total.to(self.server.rho).reshape(-1, 1))

    def validation_step(self, data: VerticalData, index: int) -> None:
        """Log the mean over elements of the negative log score."""
        score = self.log_score(data, draws=self.validation_draws)
        weight = torch.ones_like(score) if data.weight is None else data.weight.to(score).expand_as(score)
        self.validation_losses = -(score * weight).sum(-1) / weight.sum(-1)
        self.log("val_loss", self.validation_losses.mean(), batch_size=1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimiser of all nodes' parameters."""
        return self.optimizer(self.parameters())

    def check(self, data: VerticalData) -> None:
        """Check data against the network.

        Raises:
            ValueError: another number of parties or rows, features that are not finite, a response that the likelihood
                does not have, or absent rows with noise drawn at the sum.
        """
        check_features(self.model, data, [party.name for party in self.parties])
        check_response(self.model.likelihood, data)
        if not bool((data.total > 0).all()):
            raise ValueError("Expected a row with a positive weight for each element, but got weights that are all 0")
        if data.present is not None and self.server.guide.auxiliary.server is not None:
            raise ValueError("Expected rows that all parties have, for `sums`, but got absent ones; use `amortised`")

    def nodes(self, data: VerticalData, optimizer: Optimizers = adam) -> tuple[ServerNode, list[PartyNode]]:
        """Return the nodes in one process, each with its own data alone; they train this network in place.

        Args:
            data: aligned rows.
            optimizer: from parameters to an optimiser, for each node.
        """
        self.train()
        self.check(data)
        known = data.known_to_parties(response=self.server.guide.auxiliary.sees_response)
        parties = [PartyNode(p, rows, optimizer=optimizer, per_row=True) for p, rows in zip(self.parties, known)]
        return ServerNode(self.server, data.known_to_server(), optimizer=optimizer, per_row=True), parties

    def totals(
        self, features: Sequence[Tensor], draws: int, seed: int, noise: bool, data: VerticalData | None = None
    ) -> Tensor:
        """Draw the likelihood's predictor of new rows, `(B, M, C, n)`, by all parties together."""
        return predicted(self.server, self.parties, features, draws, self._key(seed), noise, data)[0]

    def predict(
        self,
        features: Sequence[Tensor] | VerticalData,
        *,
        draws: int = 100,
        seed: int = 0,
        noise: bool = True,
    ) -> Tensor:
        """Return the predictive mean of new rows by all parties together, averaged over draws.

        Args:
            features: `(n, ...)` or `(B, n, ...)`, one per party, or the data that have them.
            draws: of weights and noise.
            seed: of the draws.
            noise: whether to add the model's noise to z.

        Returns:
            `(B, n)`; of a categorical likelihood probabilities `(B, C, n)`.

        Raises:
            ValueError: another number of parties, or parties with other numbers of rows.
        """
        features = features.features if isinstance(features, VerticalData) else features
        total = self.totals(features, draws if self.bayesian else 1, seed, noise)
        return self.model.likelihood.mean(total, self._shared).mean(1)

    def party_prediction(
        self,
        name: str,
        x: Tensor,
        *,
        draws: int = 100,
        seed: int = 0,
        noise: bool = True,
        accept_disclosure: bool = False,
    ) -> Half:
        """Return a party's half of a prediction of new rows between organisations; it needs its own part alone.

        The server learns the party's part of each row's predictor, and all that can be inferred from it.

        Args:
            name: of the party.
            x: its features of the new rows, in the order agreed on by all parties.
            draws: the same number as at the server.
            seed: of the draws, the same at all nodes.
            noise: whether to add the model's noise to z.
            accept_disclosure: as in `party_half`, where the noise is drawn at the sum.

        Raises:
            ValueError: no party of this name, or features that are not those of its rows.

        >>> from fedtorch.protocol import together
        >>> from fedtorch.vfl.model import likelihoods, split_nn
        >>> bottoms = [split_nn.mlp(3, [4], 1), split_nn.mlp(2, [4], 1)]
        >>> names = ["clinic", "laboratory"]
        >>> network = SplitNetwork(bottoms, likelihoods.bernoulli(), names=names)
        >>> rows = {"clinic": torch.ones(5, 3), "laboratory": torch.ones(5, 2)}
        >>> halves = {0: network.server_prediction(5)}
        >>> halves |= {j: network.party_prediction(name, rows[name]) for j, name in enumerate(names, start=1)}
        >>> torch.equal(together(halves)[0][0], network.predict([rows["clinic"], rows["laboratory"]]))
        True
        """
        names = [party.name for party in self.parties]
        if name not in names:
            raise ValueError(f"Expected one of the parties {names}, but got {name!r}")
        part = self.parties[names.index(name)]
        predictor = self.model.predictors[part.index - 1]
        check_rows(predictor, x, x.shape[-1 - predictor.row_dims], name)
        return self._send_prediction(part, x, draws, self._key(seed), noise, accept_disclosure)

    def _send_prediction(self, part: Part, x: Tensor, draws: int, key: Tensor, noise: bool, accept: bool) -> Half:
        with evaluating(part):
            value = part.propose(x, key, draws if self.bayesian else 1, noise)
        yield Send(0, value_of(part)(value), summed=part.guide.auxiliary.server is not None and not accept)

    def server_prediction(self, rows: int, *, draws: int = 100, seed: int = 0) -> Half:
        """Return the server's half of a prediction; its result is that of `predict`, and it needs its own part alone.

        Args:
            rows: number of new rows.
            draws: the same number as at the parties.
            seed: the same as at the parties.
        """
        draws, key, server = draws if self.bayesian else 1, self._key(seed), self.server
        kind, values = value_of(server), []
        for rank, outputs in enumerate(self.model.outputs[1:], start=1):
            like = kind(torch.zeros(self.size, draws, outputs, rows, dtype=server.rho.dtype, device=key.device))
            values.append((yield Receive(rank, like)).value)
        with evaluating(server), torch.no_grad():
            total = combined(server, values, draws, key)[0]
            return self.model.likelihood.mean(total, self._shared).mean(1)

    def _key(self, seed: int) -> Tensor:
        """Return the key of a prediction's draws."""
        return random.key(seed).to(self.server.rho.device)

    def log_score(self, data: VerticalData, *, draws: int = 100, seed: int = 0, noise: bool = True) -> Tensor:
        r"""Return the log predictive density of each row, :math:`\log \frac1M \sum_m p(y_i | m)`, `(B, n)`."""
        total = self.totals(data.features, draws if self.bayesian else 1, seed, noise, data)
        rows = self.model.likelihood.log_prob(data.y.to(total.dtype), total, self._shared)
        return rows.logsumexp(1) - math.log(rows.shape[1])

    @property
    def _shared(self) -> Tensor:
        """Return the likelihood's own parameters, `(B, 1, S)`."""
        return self.server.q["theta"]["mean"].detach().unsqueeze(1)

    def predict_step(self, data: VerticalData, index: int) -> Tensor:
        """Predict a batch, see `predict`."""
        return self.predict(data.features)


def _of_elements(value: float | Tensor, size: int, name: str) -> Tensor:
    """Expand a number, or numbers for each element of the batch, to `(B,)`."""
    numbers = torch.as_tensor(value, dtype=torch.float64)
    if numbers.ndim and len(numbers) != size:
        raise ValueError(f"Expected {name} of {size} elements, but got {len(numbers)}")
    return numbers.expand(size)
