r"""The variational approximation: q(γ) ∏_j q(θ_j), or one joint q(γ, θ), and q(z | θ).

The server (index 0) and the parties (1 … J) each hold the parameters and the noise of their own Gaussian family q(θ),
reparametrised as :math:`\theta = \mu + L\varepsilon` with :math:`\Sigma = LL^\top`. L is a Cholesky factor; equation
(8) of the source multiplies by Σ, which would make the covariance Σ². A joint q(γ, θ) is one such family over all
coordinates, fitted in one graph. Tensors are stacked over the batch, `(B, ...)`; draws are `(B, M, d)`.

Source: Hassan, Sutton, Mira, Mengersen, "Scalable Vertical Federated Learning via Data Augmentation and Amortized
Inference", section 4.1.

>>> import torch, fedtorch as ft
>>> family = ft.vfl.diagonal()
>>> q = family.init(1, 2, 0.1, torch.float64, "cpu")
>>> family.covariance(q).diagonal(dim1=1, dim2=2)
tensor([[0.0100, 0.0100]], dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch._representation import without_rows
from fedtorch.vfl.fit.auxiliary import Auxiliary, Tensors, amortised
from fedtorch.vfl.model.vertical import VerticalModel

_ENCODER = 2  # purpose of a node's key


@dataclass(frozen=True)
class GaussianFamily:
    """A family q(θ) on `d` coordinates.

    Attributes:
        init: (batch, d, standard deviation at the start, dtype, device) -> parameters.
        noises: d -> how many standard normal numbers a draw takes.
        draw: (parameters, noise `(B, M, noises)`) -> θ `(B, M, d)`, differentiable in the parameters.
        log_density: (parameters, θ) -> log q(θ), `(B, M)`.
        covariance: parameters -> Σ `(B, d, d)`.
    """

    init: Callable[[int, int, float, torch.dtype, torch.device], Tensors]
    noises: Callable[[int], int]
    draw: Callable[[Tensors, Tensor], Tensor]
    log_density: Callable[[Tensors, Tensor], Tensor]
    covariance: Callable[[Tensors], Tensor]


def _start(batch: int, size: int, sd: float, dtype: torch.dtype, device: torch.device) -> Tensors:
    mean = torch.zeros(batch, size, dtype=dtype, device=device)
    return {"mean": mean, "log_sd": torch.full_like(mean, math.log(sd))}


def _normaliser(size: int) -> float:
    return 0.5 * size * math.log(2 * math.pi)


def diagonal() -> GaussianFamily:
    """Make a family of independent coordinates: `2d` parameters."""

    def log_density(q: Tensors, theta: Tensor) -> Tensor:
        standard = (theta - q["mean"].unsqueeze(1)) * torch.exp(-q["log_sd"]).unsqueeze(1)
        return -0.5 * standard.square().sum(-1) - q["log_sd"].sum(-1, True) - _normaliser(theta.shape[-1])

    return GaussianFamily(
        init=_start,
        noises=lambda size: size,
        draw=lambda q, noise: torch.addcmul(q["mean"].unsqueeze(1), q["log_sd"].exp().unsqueeze(1), noise),
        log_density=log_density,
        covariance=lambda q: torch.diag_embed((2 * q["log_sd"]).exp()),
    )


def point() -> GaussianFamily:
    """Make a family without spread, for parameters that are maximised over; log q counts as 0."""
    return GaussianFamily(
        init=lambda batch, size, sd, dtype, device: {"mean": torch.zeros(batch, size, dtype=dtype, device=device)},
        noises=lambda size: 0,
        draw=lambda q, noise: q["mean"].unsqueeze(1),
        log_density=lambda q, theta: theta.new_zeros(theta.shape[:-1]),
        covariance=lambda q: torch.zeros_like(torch.diag_embed(q["mean"])),
    )


def cholesky(q: Tensors) -> Tensor:
    """Return L of `full_covariance`, `(B, d, d)`: a unit lower triangle whose rows are multiplied by positive scales.

    So a step of the optimiser has the same relative effect for coordinates of any scale, and L stays well conditioned.
    """
    eye = torch.eye(q["lower"].shape[-1], dtype=q["lower"].dtype, device=q["lower"].device)
    return q["log_sd"].exp().unsqueeze(-1) * (q["lower"].tril(-1) + eye)


def full_covariance() -> GaussianFamily:
    """Make a family of any covariance, by its Cholesky factor: `d + d(d + 1)/2` parameters (kept in a square)."""

    def init(batch: int, size: int, sd: float, dtype: torch.dtype, device: torch.device) -> Tensors:
        return {
            **_start(batch, size, sd, dtype, device),
            "lower": torch.zeros(batch, size, size, dtype=dtype, device=device),
        }

    def log_density(q: Tensors, theta: Tensor) -> Tensor:
        centred = (theta - q["mean"].unsqueeze(1)).mT
        standard = torch.linalg.solve_triangular(cholesky(q), centred, upper=False)
        return -0.5 * standard.square().sum(-2) - q["log_sd"].sum(-1, True) - _normaliser(theta.shape[-1])

    return GaussianFamily(
        init=init,
        noises=lambda size: size,
        draw=lambda q, noise: q["mean"].unsqueeze(1) + noise @ cholesky(q).mT,
        log_density=log_density,
        covariance=lambda q: cholesky(q) @ cholesky(q).mT,
    )


def low_rank(rank: int) -> GaussianFamily:
    r"""Make a family of covariance :math:`\mathrm{diag}(D^2) + WW^\top` with W `(d, rank)`: `d(rank + 2)` parameters.

    A draw is μ + Dε + Wη; the density is by Woodbury's identity, at a cost of `d·rank²`.

    Raises:
        ValueError: `rank` is less than 1.
    """
    if rank < 1:
        raise ValueError(f"Expected a rank of at least 1, but got {rank}; see `diagonal` for none")

    def init(batch: int, size: int, sd: float, dtype: torch.dtype, device: torch.device) -> Tensors:
        # Not zero, where W's gradient would vanish: one column for every rank-th coordinate.
        column = torch.arange(size, device=device)[:, None] % rank == torch.arange(rank, device=device)
        factor = (0.1 * sd * column).to(dtype).expand(batch, size, rank).clone()
        return {**_start(batch, size, sd, dtype, device), "factor": factor}

    def draw(q: Tensors, noise: Tensor) -> Tensor:
        independent, common = noise.split([q["mean"].shape[-1], rank], -1)
        return q["mean"].unsqueeze(1) + q["log_sd"].exp().unsqueeze(1) * independent + common @ q["factor"].mT

    def log_density(q: Tensors, theta: Tensor) -> Tensor:
        scale = torch.exp(-q["log_sd"]).unsqueeze(1)
        standard, factor = (theta - q["mean"].unsqueeze(1)) * scale, q["factor"] * scale.mT
        alone = -0.5 * standard.square().sum(-1) - q["log_sd"].sum(-1, True) - _normaliser(theta.shape[-1])
        eye = torch.eye(rank, dtype=factor.dtype, device=factor.device)
        lower = torch.linalg.cholesky(eye + factor.mT @ factor)
        inner = torch.linalg.solve_triangular(lower, (standard @ factor).mT, upper=False)
        return alone + 0.5 * inner.square().sum(-2) - lower.diagonal(dim1=-2, dim2=-1).log().sum(-1, True)

    return GaussianFamily(
        init=init,
        noises=lambda size: size + rank,
        draw=draw,
        log_density=log_density,
        covariance=lambda q: torch.diag_embed((2 * q["log_sd"]).exp()) + q["factor"] @ q["factor"].mT,
    )


@dataclass(frozen=True)
class Guide:
    """The variational approximation; by default amortised encoders and a full covariance for each party.

    Attributes:
        auxiliary: the family of z given θ.
        theta: the family of γ and of each θ_j.
        joint: whether one q over all of γ, θ_1, …, θ_J takes their place.
        sticking: whether the gradient stops at the parameters of log q (equation 4) and not at its sample, so that the
            noise of the gradient vanishes where q is exact; otherwise the gradient of the entropy is in closed form.
        sd: initial standard deviation of q(θ).
        shared: the family of γ; `theta` by default.

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
        """Return the family of node `index`: the server is 0, the parties 1 to J."""
        return self.shared if self.shared is not None and not index else self.theta


@without_rows
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
    """Return initial parameters, on the key's device.

    q(θ) has small sds around zero or a network's weights, and encoders return zero.

    Args:
        model: the model.
        guide: the family.
        rows: n, which only `mean_field` uses.
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
            encoder_key = random.fold_in(random.fold_in(key, index), _ENCODER)
            q["z"] = guide.auxiliary.init(model, model.outputs[index], size, rows, encoder_key, dtype)
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
    """Count the variational parameters of one element of the batch."""
    return sum(leaf[0].numel() for leaf in tree.leaves(parameters))


def draw_theta(
    model: VerticalModel, guide: Guide, parameters: Parameters, noise: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Draw (γ, θ_1, …, θ_J), `(B, M, d_j)` each; return them and their log q, `(B, M)`."""
    if guide.joint:
        q = parameters.joint
        assert q is not None
        # The noise of the coordinates comes in the order of the nodes, and the server's surplus last.
        needed, surplus = noise[0].split([model.sizes[0], noise[0].shape[-1] - model.sizes[0]], -1)
        theta = guide.theta.draw(q, torch.cat([needed, *noise[1:], surplus], -1))
        return list(theta.split(model.sizes, -1)), guide.theta.log_density(fixed(guide, q), theta)
    nodes = [node["theta"] for node in (parameters.server, *parameters.parties)]
    thetas = [draw_own(model, guide, j, q, e) for j, (q, e) in enumerate(zip(nodes, noise))]
    densities = [
        guide.family(j).log_density(fixed(guide, q), theta)
        for j, (q, theta) in enumerate(zip(nodes, thetas))
        if theta.shape[-1]
    ]
    return thetas, model.masked(torch.stack(densities).sum(0), 0.0) if densities else thetas[0].new_zeros(1, 1)


def draw_own(model: VerticalModel, guide: Guide, index: int, q: dict[str, Tensor], noise: Tensor) -> Tensor:
    """Draw θ of node `index` alone, `(B, M, d)`: from q, or its mean in elements without priors."""
    theta = guide.family(index).draw(q, noise)
    if model.active is None or not theta.shape[-1]:
        return theta
    return model.masked(theta, q["mean"].unsqueeze(1))


def fixed(guide: Guide, q: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters for log q, detached if the guide is `sticking`."""
    return {name: value.detach() for name, value in q.items()} if guide.sticking else q


_THETA, _Z = 0, 1  # purposes of a node's key in `draw_noise`
_STEPS, _ROWS = 1, 2  # and of the key of `iterations`
_NUMBERS = 2**18  # normal numbers that `iterations` draws at a time


@without_rows
class Noise(NamedTuple):
    """Draws of an iteration; the leading dimension is 1 where the batch shares it.

    >>> import fedtorch as ft
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(2), ft.vfl.linear(3)], rho=1.0)
    >>> noise = draw_noise(model, Guide(ft.vfl.mean_field()), random.key(0).reshape(1), rows=5, draws=4)
    >>> [tuple(part.shape) for part in noise.theta]  # of an intercept, two and three coefficients
    [(1, 4, 1), (1, 4, 2), (1, 4, 3)]
    >>> [tuple(part.shape) for part in noise.z]  # the parties draw z, the server does not
    [(1, 4, 0, 0), (1, 4, 1, 5), (1, 4, 1, 5)]
    """

    theta: tuple[Tensor, ...]  # (1 or B, M, noises), of the server and the parties
    z: tuple[Tensor, ...]  # (1 or B, M, noises · C, n), of the server and the parties
    keys: tuple[Callable[[], Tensor], ...] = ()  # make the keys (B,) of a node's dropout


def draw_noise(
    model: VerticalModel, guide: Guide, key: Tensor, rows: int, draws: int, dtype: torch.dtype = torch.float32
) -> Noise:
    """Return the noise of an iteration, a pure function of its key.

    Every node draws from its own key, so that its draws do not depend on the number of other nodes.

    Args:
        model: the model.
        guide: the family.
        key: `(..., B)`, or `(..., 1)` where the batch shares its noise; other dimensions, such as iterations, in front.
        rows: n.
        draws: M.
        dtype: of the noise.
    """
    theta, z = [], []
    z_count = guide.auxiliary.noises(model)
    for j, size in enumerate(model.sizes):
        key_of_node = random.fold_in(key, j)
        # A joint family may take more numbers than it has coordinates; the server draws the surplus.
        surplus = guide.theta.noises(sum(model.sizes)) - sum(model.sizes) if guide.joint and j == 0 else 0
        count = size + surplus if guide.joint else guide.family(j).noises(size)
        theta.append(random.normal(random.fold_in(key_of_node, _THETA), (draws, count), dtype))
        draws_z = (j > 0) == (guide.auxiliary.party is not None)
        z_shape = (draws, z_count * model.outputs[j], rows) if draws_z else (draws, 0, 0)
        z.append(random.normal(random.fold_in(key_of_node, _Z), z_shape, dtype))
    return Noise(tuple(theta), tuple(z))


def iterations(
    model: VerticalModel,
    guide: Guide,
    key: Tensor,
    like: Tensor,
    total: int,
    steps: int,
    draws: int,
    rows: int | None,
    begin: int = 0,
) -> Iterator[tuple[Tensor | None, Noise]]:
    """Return rows and noise of each iteration, drawn for a block of iterations at a time.

    Args:
        model: the model.
        guide: the family.
        key: `()` or `(B,)`.
        like: a tensor of the noise's dtype.
        total: rows of the data.
        steps: iterations.
        draws: M.
        rows: of a minibatch, drawn uniformly with replacement; None for all.
        begin: the first iteration.
    """
    keys = key.reshape(-1)
    count = rows or total
    parties = len(model.predictors) if guide.auxiliary.party is not None or model.power else 1
    block = max(1, _NUMBERS // (len(keys) * draws * count * model.likelihood.outputs * parties))
    for start in range(begin, steps, block):
        step = torch.arange(start, min(start + block, steps), device=key.device)[:, None]
        of_block = random.fold_in(random.fold_in(keys, _STEPS), step)
        theta, z, _ = draw_noise(model, guide, of_block, count, draws, like.dtype)
        each = zip(zip(*(part.unbind(0) for part in theta)), zip(*(part.unbind(0) for part in z)))
        chosen: list[Tensor | None] = [None] * len(step)
        if rows is not None:
            drawn = random.randint(random.fold_in(random.fold_in(keys[0], _ROWS), step[:, 0]), total, (rows,))
            chosen = list(drawn)
        for step_rows, (step_theta, step_z) in zip(chosen, each):
            yield step_rows, Noise(step_theta, step_z)
