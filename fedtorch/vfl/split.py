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

What passes between the nodes are z_j up and ∂L/∂z_j down: `fedtorch.vfl.split_messages`.

Source: Hassan, Sutton, Mira, Mengersen, "Scalable Vertical Federated Learning via Data Augmentation and Amortized
Inference", section 5.3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn

from fedtorch import random, wire
from fedtorch.models import functional
from fedtorch.models.encoder import perceptron
from fedtorch.models.likelihoods import Likelihood
from fedtorch.models.split_nn import Stacked
from fedtorch.vfl.auxiliary import Auxiliary, amortised, sums
from fedtorch.vfl.gaussians import GaussianFamily, diagonal
from fedtorch.vfl.model import Batch, VerticalData, VerticalModel
from fedtorch.vfl.predictors import Predictor, Prior, normal_prior

__all__ = ["HierarchicalBayes", "NodeNoise", "PartyNetwork", "ServerNetwork", "SplitNetwork", "concatenated", "summed"]

_WEIGHTS, _DRAWS, _DROPOUT, _ENCODER, _PREDICT = range(5)  # purposes of a node's key
_BLOCK = 64  # iterations whose noise is drawn at a time

Combine = Callable[[Sequence[Tensor]], Tensor]


def summed(values: Sequence[Tensor]) -> Tensor:
    """Σ_j z_j: every party sends as many numbers a row as the likelihood's predictor has."""
    return sum(values[1:], values[0])


def concatenated(values: Sequence[Tensor]) -> Tensor:
    """All z_j beside each other, `(B, M, Σ_j C_j, n)`, for a top network."""
    return torch.cat(list(values), -2)


@dataclass(frozen=True)
class HierarchicalBayes:
    """The noise and priors of a hierarchical Bayes split network.

    Attributes:
        rho: standard deviation of z_j given its mean; one for all, or `(B,)`. An element with 0 is a plain network.
        random: shell patterns of the bottom networks' weights that have a prior and a posterior.
        prior: of these, from θ `(B, M, d)` to `(B, M)`; N(0, 1) by default.
        theta: the family q(w_j).
        auxiliary: the family q(z | w); by default one encoder at the server for a sum at the cut layer, and one per
            party otherwise.
        weight_sd: standard deviation of a normal prior on all other weights, whose mode is found; None for none.
        sticking: stop the gradient at the parameters of log q (equation 4).
        sd: standard deviation of q(w_j) at the start.
    """

    rho: float | Tensor
    random: str | Sequence[str] = "last.*"
    prior: Prior = dataclasses.field(default_factory=normal_prior)
    theta: GaussianFamily = dataclasses.field(default_factory=diagonal)
    auxiliary: Auxiliary | None = None
    weight_sd: float | None = None
    sticking: bool = True
    sd: float = 0.1

    def __post_init__(self) -> None:
        rho = torch.as_tensor(self.rho, dtype=torch.float64)
        if rho.ndim > 1 or not bool(((rho >= 0) & rho.isfinite()).all()):
            raise ValueError(f"Expected rho ≥ 0, one for all or one an element, but got {rho.tolist()}")
        if not self.sd > 0 or (self.weight_sd is not None and not self.weight_sd > 0):
            raise ValueError(f"Expected positive sd and weight_sd, but got {self.sd} and {self.weight_sd}")


class NodeNoise:
    """Standard normal numbers of one node: a pure function of its key and the step, drawn for a block of steps.

    Args:
        key: of the node.
        theta: numbers for its weights.
        z: numbers for a row.
    """

    def __init__(self, key: Tensor, theta: int, z: int) -> None:
        self.key, self.theta, self.z = key, theta, z
        self._blocks: dict[tuple[int, torch.dtype, torch.device], tuple[int, Tensor]] = {}

    def at(self, step: int, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Noise of the weights `(1, 1, theta)` and of z `(1, 1, z, rows)`."""
        count, block = self.theta + self.z * rows, step // _BLOCK
        place = rows, like.dtype, like.device
        if place not in self._blocks or self._blocks[place][0] != block:
            steps = torch.arange(block * _BLOCK, (block + 1) * _BLOCK, device=like.device)
            keys = random.fold_in(random.fold_in(self.key.to(like.device), _DRAWS), steps)
            self._blocks[place] = block, random.normal(keys, (count,), like.dtype)
        own, rest = self._blocks[place][1][step % _BLOCK].split([self.theta, self.z * rows])
        return own.reshape(1, 1, -1), rest.reshape(1, 1, self.z, rows)


class PartyNetwork(nn.Module):
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
        self.q, self.encoder = nn.ParameterDict(), nn.ParameterDict()
        self.random: dict[str, torch.Size] = {}  # shapes of the random weights of one element
        self._register(bayes)
        auxiliary = None if bayes is None else bayes.auxiliary
        if bayes is not None:
            self._make_random(bayes)
        if bayes is not None and auxiliary is not None and auxiliary.party is not None:
            self.model = _auxiliary_model(likelihood, outputs, parties, self.rho)
            self.encoder = _encoder(auxiliary, self.model, bottom, key)
        z = outputs if auxiliary is not None and auxiliary.party is not None else 0
        count = 0 if bayes is None else bayes.theta.noises(sum(shape.numel() for shape in self.random.values()))
        self.noise = NodeNoise(key, count, z)

    def _register(self, bayes: HierarchicalBayes | None) -> None:
        rho = torch.as_tensor(0.0 if bayes is None else bayes.rho, dtype=torch.float64)
        if rho.ndim and len(rho) != self.bottom.size:
            raise ValueError(f"Expected rho of {self.bottom.size} elements, but got {len(rho)}")
        rho = rho.expand(self.bottom.size).to(self.bottom.weights[0].dtype)
        self.register_buffer("rho", rho.reshape(-1, 1, 1, 1).clone(), persistent=False)
        self.register_buffer("active", (rho > 0).reshape(-1, 1), persistent=False)

    def _make_random(self, bayes: HierarchicalBayes) -> None:
        """Moves the random weights from the stack into q, whose mean starts where they did."""
        names = list(functional.split(dict.fromkeys(self.bottom.names, torch.empty(0)), bayes.random)[0])
        released = self.bottom.release(names)
        self.random = {name: value.shape[1:] for name, value in released.items()}
        mean = torch.cat([value.flatten(1) for value in released.values()], 1)
        q = bayes.theta.init(*mean.shape, bayes.sd, mean.dtype, mean.device)
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
        eta = self._rows(x, weights, step)
        bayes = self.bayes
        if bayes is None or bayes.auxiliary is None or bayes.auxiliary.party is None:
            return eta, terms
        q = dict(self.encoder)
        z, ratio = bayes.auxiliary.party(q, _held(q, bayes), eta, z_noise, batch, self.model)
        z = torch.where(self.active[..., None, None], z, eta)
        return z, terms + self.active * batch.weighted_sum(ratio)

    def _rows(self, x: Tensor, weights: dict[str, Tensor] | None, step: int) -> Tensor:
        keys = None
        if self.training and self.bottom._draws is not False:
            keys = _dropout_keys(self.key, step, self.bottom.size, x.device)
        return self.bottom(x, weights, keys).mT.unsqueeze(1)

    def _weights(self, noise: Tensor) -> tuple[dict[str, Tensor] | None, Tensor]:
        """A draw of the random weights, and log p − log q of it, `(B, 1)`."""
        bayes, zero = self.bayes, torch.zeros_like(self.rho[:, :, 0, 0])
        if bayes is None:
            return None, zero
        q = dict(self.q)
        theta = torch.where(self.active.unsqueeze(-1), bayes.theta.draw(q, noise), q["mean"].unsqueeze(1))
        terms = bayes.prior(theta) - bayes.theta.log_density(_held(q, bayes), theta)
        if bayes.weight_sd is not None and len(self.bottom.weights):
            squares = torch.stack([weight.square().flatten(1).sum(1) for weight in self.bottom.weights]).sum(0)
            terms = terms - squares.unsqueeze(1) * (0.5 / bayes.weight_sd**2)
        return self._named(theta), torch.where(self.active, terms, zero)

    def _named(self, theta: Tensor) -> dict[str, Tensor]:
        parts = theta[:, 0].split([shape.numel() for shape in self.random.values()], -1)
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(self.random.items(), parts)}

    @torch.no_grad()
    def propose(self, x: Tensor, key: Tensor, draws: int = 1, noise: bool = True) -> Tensor:
        """Predictions of new rows that it sends to the server: draws of z_j from the model, `(B, draws, C_j, n)`.

        Args:
            x: features of the new rows.
            key: of the draws; the party folds its own number in.
            draws: M; plain networks need only one.
            noise: whether to add ρε, which hides f_j and is part of the model.
        """
        own, sent = random.fold_in(self.key.to(key.device), key), []
        for m in range(draws):
            here = random.fold_in(random.fold_in(own, _PREDICT), m)
            normal = lambda purpose, *shape: random.normal(random.fold_in(here, purpose), shape, self.rho.dtype)
            weights, _ = self._weights(normal(0, 1, 1, self.noise.theta).to(self.rho.device))
            eta = self.bottom(x, weights).mT.unsqueeze(1)
            if noise and self.bayes is not None:
                eta = torch.addcmul(eta, self.rho, normal(1, 1, 1, *eta.shape[2:]).to(eta.device))
            sent.append(eta)
        return torch.cat(sent, 1)

    def save(self, file: str | Path) -> None:
        """Writes this party's parameters, and nobody else's, as safetensors."""
        Path(file).write_bytes(wire.encode(self.state_dict(), {"party": self.name}))

    def load(self, file: str | Path) -> None:
        """Reads what `save` wrote.

        Raises:
            ValueError: the file is another party's, or of a network of another shape.
        """
        payload = Path(file).read_bytes()
        name = wire.metadata(payload, client=self.name).get("party")
        if name != self.name:
            raise ValueError(f"Expected parameters of party {self.name!r}, but got those of {name!r}")
        self.load_state_dict(wire.decode(payload, like=self.state_dict(), client=self.name))


class ServerNetwork(nn.Module):
    """What the server holds: the cut layer, perhaps a top network and the encoder of q(s | θ), shared parameters.

    Args:
        likelihood: of the response.
        combine: of the values at the cut layer.
        top: stacked networks on the cut layer `(B, n, C)`; None for none.
        size: B.
        parties: J.
        bayes: noise and priors.
        key: of its noise and its encoder's weights.
        like: a party's network, whose dtype and ρ it takes.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        combine: Combine,
        top: Stacked | None,
        parties: int,
        bayes: HierarchicalBayes | None,
        key: Tensor,
        like: PartyNetwork,
    ) -> None:
        super().__init__()
        self.likelihood, self.combine, self.top, self.bayes, self.key = likelihood, combine, top, bayes, key
        self.register_buffer("rho", like.rho.clone(), persistent=False)
        self.register_buffer("active", like.active.clone(), persistent=False)
        shared = torch.zeros(like.bottom.size, 1, len(likelihood.shared), dtype=like.rho.dtype)
        self.shared, self.encoder = nn.Parameter(shared), nn.ParameterDict()
        here = bayes is not None and bayes.auxiliary is not None and bayes.auxiliary.server is not None
        if here:
            self.model = _auxiliary_model(likelihood, likelihood.outputs, parties, self.rho)
            self.encoder = _encoder(bayes.auxiliary, self.model, like.bottom, key)  # type: ignore[union-attr, arg-type]
        self.noise = NodeNoise(key, 0, likelihood.outputs if here else 0)

    rho: Tensor
    active: Tensor

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
            centre = total if batch.offset is None else total + batch.offset
            sampled = auxiliary.server(q, _held(q, self.bayes), centre, noise, batch, self.model)  # type: ignore
            total = torch.where(self.active[..., None, None], sampled.total, centre)
            ratio = self.active.unsqueeze(-1) * sampled.log_ratio
        else:
            total = self.predictor(total, batch.offset, step)
        rows = self.likelihood.log_prob(batch.y, total, self.shared)
        return batch.weighted_sum(rows if ratio is None else rows + ratio)

    def predictor(self, combined: Tensor, offset: Tensor | None = None, step: int = 0) -> Tensor:
        """Cut layer `(B, M, C, n)` to the likelihood's predictor."""
        if self.top is not None:
            keys = None
            if self.training and self.top._draws is not False:
                keys = _dropout_keys(self.key, step, self.top.size, combined.device)
            rows = self.top(combined.mT.flatten(1, 2), None, keys)
            combined = rows.unflatten(1, (combined.shape[1], -1)).mT
        return combined if offset is None else combined + offset

    save, load = PartyNetwork.save, PartyNetwork.load
    name = "server"


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam at 1e-3, as in the source."""
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


class SplitNetwork(L.LightningModule):
    """Split networks, plain or hierarchical Bayes, that an ordinary `Trainer` trains in one graph.

    The loss of a batch element is the negative bound per row (the negative log-likelihood, of a plain network); the sum
    over elements goes to the optimiser, which has to act on each number by itself, as Adam and SGD do.

    Args:
        bottoms: one network per party, any module of rows `(n, ...)` to `(n, C_j)`.
        likelihood: of the response, from `fedtorch.models.likelihoods`.
        keys: `(B,)` one per batch element, from which its weights start; the first is also that of the noise.
        combine: at the cut layer, `summed` or `concatenated`.
        top: a network at the server of the cut layer `(n, C)` to the likelihood's predictor; none by default.
        bayes: noise and priors; None for plain networks.
        names: of the parties.
        widths: C_j; the likelihood's number of outputs by default.
        row_dims: dimensions of one party's row: 1 for a table, 3 for images; tells whether features are stacked.
        optimizer: from parameters to an elementwise optimiser; Adam at 1e-3 by default.
        validation_draws: Monte Carlo draws of a validation loss.

    Attributes:
        parties: a `PartyNetwork` each.
        server: the `ServerNetwork`.
        validation_losses: `(B,)` negative log scores per row, after a validation epoch.

    Raises:
        ValueError: no party, names or widths of another number, or noise at the sum without a sum at the cut layer.

    >>> from fedtorch.models import likelihoods, split_nn
    >>> keys = random.fold_in(random.key(0), torch.arange(2))
    >>> bottoms = [split_nn.mlp(3, [4], 1), split_nn.mlp(2, [4], 1)]
    >>> network = SplitNetwork(bottoms, likelihoods.bernoulli(), keys=keys, names=["clinic", "laboratory"])
    >>> network.predict([torch.zeros(5, 3), torch.zeros(5, 2)]).shape
    torch.Size([2, 5])
    """

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
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adam,
        validation_draws: int = 16,
    ) -> None:
        super().__init__()
        count = len(bottoms)
        names = [f"party {j}" for j in range(count)] if names is None else list(names)
        widths = [likelihood.outputs] * count if widths is None else list(widths)
        dims = [1] * count if row_dims is None else list(row_dims)
        if not count or not count == len(names) == len(widths) == len(dims) or len(set(names)) < count:
            raise ValueError(f"Expected parties with a name, width and row_dims each, but got {names}, {widths}, {dims}")
        bayes = _with_auxiliary(bayes, combine is summed and top is None)
        of_node = lambda j: random.fold_in(keys.reshape(-1)[0], j)
        of_weights = lambda j: random.fold_in(random.fold_in(keys, j), _WEIGHTS)
        self.parties = nn.ModuleList()
        for j, (module, name, width, dim) in enumerate(zip(bottoms, names, widths, dims), start=1):
            bottom = Stacked(module, of_weights(j), dim)
            self.parties.append(PartyNetwork(name, bottom, width, likelihood, count, bayes, of_node(j)))
        stacked = None if top is None else Stacked(top, of_weights(0))
        self.server = ServerNetwork(likelihood, combine, stacked, count, bayes, of_node(0), self.parties[0])
        self.optimizer, self.validation_draws = optimizer, validation_draws
        self.validation_losses = torch.full((len(keys),), math.nan)

    @property
    def size(self) -> int:
        """B."""
        return self.parties[0].bottom.size

    def losses(self, data: VerticalData, step: int) -> Tensor:
        """The negative bound per row of each element, `(B,)`, with the noise of this step."""
        batch = batch_of(data, self.parties[0].rho.dtype)
        sent = [party(x, step, of_party(batch, data, j)) for j, (party, x) in enumerate(zip(self.parties, data.features))]
        values = [present(z, data, j) for j, (z, _) in enumerate(sent)]
        bound = self.server(values, step, batch) + sum(terms for _, terms in sent)
        return -bound.squeeze(1) / rows_of(batch)

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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser of all nodes' parameters."""
        return self.optimizer(self.parameters())

    def check(self, data: VerticalData) -> None:
        """Checks data against the network.

        Raises:
            ValueError: another number of parties or rows, features that are not finite, a response that the likelihood
                does not have, or absent rows with noise drawn at the sum.
        """
        check_rows(data, [party.bottom.row_dims for party in self.parties], [party.name for party in self.parties])
        used = data.response if data.weight is None else torch.where(data.weight > 0, data.response, data.response[..., :1])
        self.server.likelihood.check(used)
        if data.present is not None and len(self.server.encoder):
            raise ValueError("Expected rows that all parties have, for `sums`, but got absent ones; use `amortised`")

    @torch.no_grad()
    def totals(
        self, features: Sequence[Tensor], draws: int, key: Tensor | None, noise: bool, data: VerticalData | None = None
    ) -> Tensor:
        """Draws of the likelihood's predictor of new rows, `(B, M, C, n)`, by all parties together."""
        if len(features) != len(self.parties):
            raise ValueError(f"Expected features of {len(self.parties)} parties, but got {len(features)}")
        was_training = self.training
        self.eval()
        key = random.key(0).to(self.server.rho.device) if key is None else key
        values = [party.propose(x, key, draws, noise) for party, x in zip(self.parties, features)]
        if data is not None:
            values = [present(value, data, j) for j, value in enumerate(values)]
        offset = None if data is None or data.offset is None else _shaped(data.offset, 2, values[0].dtype)
        total = self.server.predictor(self.server.combine(values), offset)
        self.train(was_training)
        return total

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
        """
        total = self.totals(features, draws if self._bayesian else 1, key, noise)
        return self.server.likelihood.mean(total, self.server.shared.detach()).mean(1)

    def log_score(
        self, data: VerticalData, *, draws: int = 100, key: Tensor | None = None, noise: bool = True
    ) -> Tensor:
        r"""The log predictive density of each row, :math:`\log \frac1M \sum_m p(y_i | m)`, `(B, n)`."""
        total = self.totals(data.features, draws if self._bayesian else 1, key, noise, data)
        y = _shaped(data.response, 1, total.dtype)
        rows = self.server.likelihood.log_prob(y, total, self.server.shared.detach())
        return rows.logsumexp(1) - math.log(rows.shape[1])

    @property
    def _bayesian(self) -> bool:
        return bool(self.server.active.any())

    def predict_step(self, data: VerticalData, index: int) -> Tensor:
        """What `predict` says of a batch."""
        return self.predict(data.features)


def batch_of(data: VerticalData, dtype: torch.dtype) -> Batch:
    """Response, offset and weights in shapes that broadcast; features stay with the parties."""
    weight = None if data.weight is None else _shaped(data.weight, 1, dtype)
    offset = None if data.offset is None else _shaped(data.offset, 2, dtype)
    return Batch((), _shaped(data.response, 1, dtype), offset, weight, None)


def rows_of(batch: Batch) -> Tensor | int:
    """The rows that a loss is the mean of: their weights' sum, `(1 or B,)`."""
    return batch.y.shape[-1] if batch.weight is None else batch.weight.sum(-1).squeeze(-1)


def of_party(batch: Batch, data: VerticalData, j: int) -> Batch:
    """The batch with weight zero on rows that party j lacks."""
    if data.present is None:
        return batch
    here = data.present[:, j].to(batch.y.dtype).reshape(1, 1, -1)
    return batch._replace(weight=here if batch.weight is None else batch.weight * here)


def present(value: Tensor, data: VerticalData, j: int) -> Tensor:
    """z_j `(..., n)` with zeros on rows that party j lacks."""
    return value if data.present is None else value * data.present[:, j].to(value.dtype)


def check_rows(data: VerticalData, row_dims: Sequence[int], names: Sequence[str]) -> None:
    """Raises `ValueError` unless every party has as many rows as the response, and finite ones."""
    if len(data.features) != len(names):
        raise ValueError(f"Expected features of {len(names)} parties, but got {len(data.features)}")
    rows = data.response.shape[-1]
    for x, dims, name in zip(data.features, row_dims, names):
        if x.ndim not in (dims + 1, dims + 2) or x.shape[-1 - dims] != rows:
            raise ValueError(
                f"Expected {rows} rows of {dims} dimensions of {name!r}, but got shape {tuple(x.shape)}; align the rows"
            )
        if not bool(x.isfinite().all()):
            raise ValueError(f"Expected finite features of {name!r}, but got NaN or Inf; impute them first")


def _shaped(value: Tensor, ones: int, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).reshape(-1, *(1,) * ones, value.shape[-1])


def _with_auxiliary(bayes: HierarchicalBayes | None, at_sum: bool) -> HierarchicalBayes | None:
    if bayes is None:
        return None
    auxiliary = bayes.auxiliary or (sums(perceptron(4), skewed=False) if at_sum else amortised(perceptron(8)))
    if auxiliary.server is not None and not at_sum:
        raise ValueError("Expected a sum at the cut layer and no top network for `sums`, but got others; use `amortised`")
    return dataclasses.replace(bayes, auxiliary=auxiliary)


def _auxiliary_model(likelihood: Likelihood, outputs: int, parties: int, rho: Tensor) -> VerticalModel:
    """What the families of z need to know; ρ = 0 is 1 here, and what it gives is not used."""
    nobody = Predictor(0, lambda theta, x: x, normal_prior(), 0)
    noise = torch.where(rho > 0, rho, 1.0).flatten().double()
    own = dataclasses.replace(likelihood, outputs=outputs)
    return VerticalModel(own, (nobody,) * parties, noise, False, False, normal_prior())


def _encoder(auxiliary: Auxiliary, model: VerticalModel, bottom: Stacked, key: Tensor) -> nn.ParameterDict:
    dtype, one = bottom.weights[0].dtype, torch.zeros(1, 1, 1)
    shown = model.likelihood.features(one, one.new_zeros(model.likelihood.outputs, 1)).shape[-2]
    weights = auxiliary.init(model, bottom.size, 0, shown, random.fold_in(key, _ENCODER), dtype)
    if any(weight.numel() == 0 for weight in weights.values()):
        raise ValueError("Expected an amortised family of z, but got one with parameters for every row")
    return nn.ParameterDict(weights)


def _held(q: dict[str, Tensor], bayes: HierarchicalBayes | None) -> dict[str, Tensor]:
    """The parameters for log q: detached to stick the landing."""
    return {name: value.detach() for name, value in q.items()} if bayes is not None and bayes.sticking else q


def _dropout_keys(key: Tensor, step: int, size: int, device: torch.device) -> Tensor:
    own = random.fold_in(random.fold_in(key.to(device), _DROPOUT), step)
    return random.fold_in(own, torch.arange(size, device=device))
