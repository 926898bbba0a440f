"""The parts of a split network that one node holds: a party's bottom networks, the server's cut layer and top.

`SplitNetwork` runs them in one graph; `fedtorch.vfl.split_messages` passes values and gradients between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedtorch import random, wire
from fedtorch.models import functional
from fedtorch.models.likelihoods import Likelihood
from fedtorch.models.split_nn import Stacked
from fedtorch.vfl.auxiliary import Auxiliary
from fedtorch.vfl.gaussians import GaussianFamily, diagonal
from fedtorch.vfl.model import Batch, VerticalModel
from fedtorch.vfl.predictors import Predictor, Prior, normal_prior

__all__ = ["HierarchicalBayes", "NodeNoise", "PartyNetwork", "ServerNetwork", "concatenated", "summed"]

_DRAWS, _DROPOUT, _ENCODER, _PREDICT = range(4)  # purposes of a node's key
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
            self.encoder = _encoder(auxiliary, self.model, self.rho, key)
        z = outputs if auxiliary is not None and auxiliary.party is not None else 0
        count = 0 if bayes is None else bayes.theta.noises(sum(shape.numel() for shape in self.random.values()))
        self.noise = NodeNoise(key, count, z)

    def _register(self, bayes: HierarchicalBayes | None) -> None:
        rho = torch.as_tensor(0.0 if bayes is None else bayes.rho, dtype=torch.float64)
        if rho.ndim and len(rho) != self.bottom.size:
            raise ValueError(f"Expected rho of {self.bottom.size} elements, but got {len(rho)}")
        rho = rho.expand(self.bottom.size).to(self.bottom.weights[0])
        self.register_buffer("rho", rho.reshape(-1, 1, 1, 1).clone(), persistent=False)
        self.register_buffer("active", (rho > 0).reshape(-1, 1), persistent=False)

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
        dims = self.bottom.row_dims
        rows, device, sent = x.shape[-1 - dims], self.rho.device, []
        own = random.fold_in(random.fold_in(self.key.to(key.device), key), _PREDICT)
        each = random.fold_in(own, torch.arange(draws, device=key.device))
        thetas = random.normal(random.fold_in(each, 0), (1, 1, self.noise.theta), self.rho.dtype).to(device)
        for theta in thetas:
            sent.append(self.bottom(x, self._weights(theta)[0]).mT)
        etas = torch.stack(sent, 1)
        if not noise or self.bayes is None:
            return etas
        of_rows = random.normal(random.fold_in(each, 1), (self.outputs, rows), self.rho.dtype).to(device)
        return torch.addcmul(etas, self.rho, of_rows)

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
            self.encoder = _encoder(bayes.auxiliary, self.model, self.rho, key)  # type: ignore[union-attr, arg-type]
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
            assert sampled.log_ratio is not None
            ratio = torch.where(self.active.unsqueeze(-1), sampled.log_ratio, 0.0)
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


def _auxiliary_model(likelihood: Likelihood, outputs: int, parties: int, rho: Tensor) -> VerticalModel:
    """What the families of z need to know; ρ = 0 is 1 here, and what it gives is not used."""
    nobody = Predictor(0, lambda theta, x: x, normal_prior(), 0)
    noise = torch.where(rho > 0, rho, 1.0).flatten().double()
    own = dataclasses.replace(likelihood, outputs=outputs)
    return VerticalModel(own, (nobody,) * parties, noise, False, False, normal_prior())


def _encoder(auxiliary: Auxiliary, model: VerticalModel, rho: Tensor, key: Tensor) -> nn.ParameterDict:
    one = torch.zeros(1, 1, 1)
    shown = model.likelihood.features(one, one.new_zeros(model.likelihood.outputs, 1)).shape[-2]
    weights = auxiliary.init(model, len(rho), 0, shown, random.fold_in(key, _ENCODER), rho.dtype)
    if any(weight.numel() == 0 for weight in weights.values()):
        raise ValueError("Expected an amortised family of z, but got one with parameters for every row")
    return nn.ParameterDict(weights)


def _held(q: dict[str, Tensor], bayes: HierarchicalBayes | None) -> dict[str, Tensor]:
    """The parameters for log q: detached to stick the landing."""
    return {name: value.detach() for name, value in q.items()} if bayes is not None and bayes.sticking else q


def _dropout_keys(key: Tensor, step: int, size: int, device: torch.device) -> Tensor:
    own = random.fold_in(random.fold_in(key.to(device), _DROPOUT), step)
    return random.fold_in(own, torch.arange(size, device=device))
