"""Reference posteriors by Pyro's No-U-Turn sampler: of the collapsed, the plain and the augmented model.

They see all parties' data at once and serve to judge what the parties find without pooling. Pyro is imported here only.
Besides, parts of the package that experiments put together in another way.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import vfl
from fedtorch.protocol.halves import Half, Receive, Send, wrapped
from fedtorch.sites import Hub, Roster, connect, serve
from fedtorch.sites.identity import identity
from fedtorch.sites.streams.hub import Link
from fedtorch.vfl.fit.guide import initial
from fedtorch.vfl.fit.part import parts
from fedtorch.vfl.fit.soul import langevin as langevin, party_density as party_density
from fedtorch.vfl.model.checks import prepared as prepared
from fedtorch.vfl.model.collapsed import collapsed_log_likelihood
from fedtorch.vfl.model.vertical import VerticalModel
from fedtorch.vfl.rows.data import VerticalData


class Draws(NamedTuple):
    """Draws of a sampler.

    >>> draws = Draws(torch.arange(6.0).reshape(2, 3, 1), torch.ones(1), torch.tensor([6.0]))  # of two chains
    >>> draws.flat.mean(0)
    tensor([2.5000])
    """

    values: Tensor  # (chains, draws, D) γ, θ_1, …, θ_J one after the other
    r_hat: Tensor  # (D,)
    effective: Tensor  # (D,) effective number of draws

    @property
    def flat(self) -> Tensor:
        """All chains' draws, `(chains · draws, D)`."""
        return self.values.flatten(0, 1)


def log_joint(
    model: VerticalModel, data: VerticalData, *, collapsed: bool = True, points: int = 32, adaptive: bool = False
) -> Callable[[Tensor], Tensor]:
    """log p(y, γ, θ) up to a constant, of `(D,)` to `()`.

    Args:
        model: with one ρ.
        data: without a leading batch dimension.
        collapsed: with the auxiliary variables integrated out; False leaves the noise away: the ordinary model, in
            which the sum of the predictors is exact.
        points: of the quadrature.
        adaptive: whether its nodes follow the likelihood; see `collapsed_log_likelihood`.

    >>> import torch, fedtorch as ft
    >>> data = ft.vfl.VerticalData((torch.ones(2, 1, dtype=torch.float64),), torch.tensor([1.0, 2.0]))
    >>> flat = ft.vfl.model.predictors.flat_prior()
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.gaussian(1.0), [ft.vfl.linear(1, flat)], rho=1.0, intercept=False)
    >>> at = log_joint(model, data)
    >>> mean, zero = torch.tensor([[1.5], [0.0]], dtype=torch.float64)
    >>> round(float(at(mean) - at(zero)), 3)  # (1² + 2² − 2 · 0.5²) / (2 (σ² + ρ²))
    1.125
    """
    batch = prepared(model, data)

    def log_density(coordinates: Tensor) -> Tensor:
        thetas = coordinates.reshape(1, 1, -1).split(model.sizes, -1)
        centre, shared = model.predictor(thetas, batch)
        if collapsed:
            rows = collapsed_log_likelihood(model, batch.y, centre, shared, points, adaptive=adaptive)
        else:
            rows = model.likelihood.log_prob(batch.y, centre, shared)
        prior = model.log_shared_prior(thetas[0]) + sum(p.log_prior(t) for p, t in zip(model.predictors, thetas[1:]))
        return (batch.weighted_sum(rows) + prior).sum()

    return log_density


def nuts(
    log_density: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    draws: int = 1000,
    warmup: int = 500,
    chains: int = 2,
    seed: int = 0,
) -> Draws:
    """Samples a density with Pyro's NUTS; torch's global generator is put back afterwards.

    Args:
        log_density: of `(D,)` to `()`.
        start: `(D,)`, where all chains start, with a little noise.
        draws: kept of each chain.
        warmup: discarded before.
        chains: one after another.
        seed: of torch's global generator, from which Pyro draws.

    >>> normal = lambda x: -0.5 * x.square().sum()
    >>> found = nuts(normal, torch.zeros(2), draws=4, warmup=1, chains=1)
    >>> found.values.shape, found.flat.shape, found.r_hat.shape
    (torch.Size([1, 4, 2]), torch.Size([4, 2]), torch.Size([2]))
    """
    from pyro.infer import MCMC, NUTS
    from pyro.ops.stats import effective_sample_size, split_gelman_rubin

    found = []
    for chain in range(chains):
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1000 * seed + chain)
            kernel = NUTS(potential_fn=lambda z: -log_density(z["x"]))
            first = start + 0.1 * torch.randn(start.shape, dtype=start.dtype)
            sampler = MCMC(kernel, draws, warmup, initial_params={"x": first}, disable_progbar=True)
            sampler.run()
            found.append(sampler.get_samples()["x"].detach())
    values = torch.stack(found)
    return Draws(values, split_gelman_rubin(values, 0, 1), effective_sample_size(values, 0, 1))


def nuts_posterior(
    model: VerticalModel,
    data: VerticalData,
    *,
    collapsed: bool = True,
    points: int = 32,
    adaptive: bool = False,
    start: Tensor | None = None,
    **settings: int,
) -> Draws:
    """NUTS on `log_joint`, from `start` or from zero; `settings` are those of `nuts`.

    >>> import fedtorch as ft
    >>> data = ft.vfl.VerticalData((torch.ones(3, 2),), torch.tensor([0.0, 1.0, 1.0]))
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(2)], rho=1.0)
    >>> nuts_posterior(model, data, draws=4, warmup=1, chains=1).values.shape  # of the intercept and two coefficients
    torch.Size([1, 4, 3])
    """
    begin = torch.zeros(sum(model.sizes), dtype=data.features[0].dtype) if start is None else start
    return nuts(log_joint(model, data, collapsed=collapsed, points=points, adaptive=adaptive), begin, **settings)


def nodes(
    model: VerticalModel,
    guide: vfl.Guide,
    data: vfl.VerticalData,
    key: Tensor,
    optimizer: Callable[..., torch.optim.Optimizer],
    start: vfl.Parameters | None = None,
    response_shared: bool = False,
) -> tuple[vfl.ServerNode, list[vfl.PartyNode]]:
    """The nodes of a model in one process: each draws its own noise and knows its own data, y the server or all."""
    begin = start or initial(model, guide, len(data.response), 1, key, torch.float64)
    server, *holders = parts(model, guide, begin, key=key)
    known = data.known_to_parties(response=response_shared)
    party = partial(vfl.PartyNode, response_shared=response_shared, optimizer=optimizer)
    whole = partial(vfl.ServerNode, response_shared=response_shared, optimizer=optimizer)
    return whole(server, data.known_to_server()), [party(part, rows) for part, rows in zip(holders, known)]


def delayed(half: Half, seconds: float, sent: list[int]) -> Half:
    """A half that is late with each message; the first of `sent` counts them."""

    def around(step: Send | Receive) -> Half:
        if isinstance(step, Send):
            time.sleep(seconds)
            sent[0] += 1
        return (yield step)

    return wrapped(half, around)


class Connected(NamedTuple):
    """A hub that listens, and how each party connects."""

    hub: Hub
    links: dict[str, Callable[[], Link]]


def connected(folder: Path, names: Sequence[str]) -> Connected:
    """A server and parties with certificates of one authority."""
    own, roster = identity.make_server(folder), Roster(folder / "roster.json")
    made = {name: identity.make_site(folder, name) for name in names}
    for name, each in made.items():
        roster.add(name, identity.fingerprint(each.certificate))
    hub = serve("127.0.0.1:0", own, roster)
    return Connected(hub, {name: partial(connect, f"127.0.0.1:{hub.port}", each) for name, each in made.items()})
