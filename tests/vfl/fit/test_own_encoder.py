"""A user's own encoders and Pyro guides: the numbers of the built-in encoder, one law in three ways of saying it."""

from __future__ import annotations

import math
from pathlib import Path

import pyro
import pytest
import torch
from pyro import distributions as dist
from pyro.nn import PyroModule
from support.oracles.closed_forms import ROUNDING
from support.verticals import KEY, gaussian_data, predictors, regression
from torch import Tensor, nn

from fedtorch import tree, vfl
from fedtorch.models import encoders
from fedtorch.vfl.fit.bound import bound
from fedtorch.vfl.fit.guide import draw_noise, initial
from fedtorch.vfl.fit.part import parts
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.checks import prepared

WIDTHS, ROWS, RHO = [2, 1], 12, 0.7
SHRINKAGE = -0.5 * torch.tensor(RHO, dtype=torch.float64).square().log1p()
MODEL = vfl.augmented(likelihoods.gaussian(0.8), predictors(WIDTHS), RHO)
DATA = gaussian_data(WIDTHS, ROWS)


class Rowwise(nn.Module):
    """The built-in encoder as a user's module: of rows, answering with a pair."""

    def __init__(self, inner: encoders.Encoder) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: Tensor) -> tuple[Tensor, ...]:
        return self.inner(rows.mT[None, None])[0, 0].mT.chunk(2, -1)


class Law(nn.Module):
    """The same law of z as that of the built-in affine encoder, as a distribution."""

    def __init__(self, event: bool = False) -> None:
        super().__init__()
        self.net, self.event = nn.Linear(1, 2).double(), event
        nn.init.constant_(self.net.weight, 0.3)
        nn.init.constant_(self.net.bias, -0.2)

    def forward(self, eta: Tensor) -> torch.distributions.Distribution:
        mean, log_sd = self.net(eta).chunk(2, -1)
        law = torch.distributions.Normal(eta + RHO * mean, RHO * (log_sd + SHRINKAGE).exp())
        return torch.distributions.Independent(law, 1) if self.event else law


class Guide(PyroModule):
    """The same law as a Pyro guide."""

    def __init__(self) -> None:
        super().__init__()
        self.law = Law()

    def forward(self, eta: Tensor) -> None:
        with pyro.plate("rows", len(eta)):
            pyro.sample("z", dist.Normal(self.law(eta).loc[:, 0], self.law(eta).scale[:, 0]))


def by_statements(eta: Tensor) -> None:
    """The same law as a Pyro guide whose parameters are statements."""
    a, b = (
        pyro.param(name, torch.tensor(start, dtype=torch.float64)) for name, start in (("slope", 0.3), ("shift", -0.2))
    )
    unit = pyro.param("unit", torch.ones(()).double(), constraint=dist.constraints.positive)
    answer = a * eta + b
    pyro.sample("z", dist.Normal(eta + RHO * answer, RHO * unit * (answer + SHRINKAGE).exp()).to_event(1))


def sampled(guide: vfl.Guide, start: vfl.Parameters | None = None, draws: int = 3) -> Tensor:
    """The bound of draws with this guide, at its start."""
    parameters = start or initial(MODEL, guide, ROWS, 1, KEY, torch.float64)
    noise = draw_noise(MODEL, guide, KEY.reshape(1), ROWS, draws, torch.float64)
    return bound(MODEL, guide, parameters, prepared(MODEL, DATA), noise)


@pytest.mark.parametrize("family", ["amortised", "y seen", "sums"])
def test_a_module_is_the_built_in_encoder(family: str) -> None:
    """Of the same weights, operations and key a fit has the same bits."""
    families = {
        "amortised": (vfl.amortised, 1, 2),
        "y seen": (lambda make: vfl.amortised(make, sees_response=True), 2, 2),
        "sums": (vfl.sums, 2, 4),
    }
    build, inputs, outputs = families[family]
    make = encoders.perceptron(4)
    guides = [vfl.Guide(build(one)) for one in (make, Rowwise(make(inputs, outputs)))]
    start, mine = (initial(MODEL, guide, ROWS, 1, KEY, torch.float64) for guide in guides)
    for theirs, own in zip((start.server, *start.parties), (mine.server, *mine.parties)):
        for name, value in theirs.get("z", {}).items():
            own["z"][f"inner/{name}"].copy_(value[:, 0])
    fits = [
        vfl.sfvi(MODEL, guide, DATA, steps=3, start=begin, progress=False)
        for guide, begin in zip(guides, (start, mine))
    ]
    assert torch.equal(fits[0].bounds, fits[1].bounds)
    theirs, own = (fit.parameters.server if family == "sums" else fit.parameters.parties[1] for fit in fits)
    for name, value in theirs["z"].items():
        assert torch.equal(own["z"][f"inner/{name}"], value[:, 0])


@pytest.mark.parametrize(
    "own", [Law(), Law(event=True), vfl.pyro_guide(Guide()), vfl.pyro_guide(by_statements)],
    ids=["normal", "event", "pyro module", "pyro function"],
)  # fmt: skip
@pytest.mark.parametrize("sticking", [True, False])
def test_a_law_is_the_built_in_one(own: nn.Module | encoders.EncoderFactory, sticking: bool) -> None:
    """The bound and its gradient are those of the affine encoder with the same weights; nothing else is drawn."""
    built_in = vfl.Guide(vfl.amortised(encoders.affine()), sticking=sticking)
    start = initial(MODEL, built_in, ROWS, 1, KEY, torch.float64)
    for party in start.parties:
        party["z"]["skip"].fill_(0.3)
        party["z"]["shift"].fill_(-0.2)
    before = torch.get_rng_state()
    guide = vfl.Guide(vfl.amortised(own), sticking=sticking)
    mine = initial(MODEL, guide, ROWS, 1, KEY, torch.float64)
    leaves = [tree.map(lambda leaf: leaf.requires_grad_(), each) for each in (start, mine)]
    values = [sampled(*each) for each in zip((built_in, guide), leaves)]
    torch.testing.assert_close(values[1], values[0], rtol=ROUNDING, atol=ROUNDING)
    gradients = [torch.autograd.grad(v.sum(), q.parties[0]["theta"]["mean"]) for v, q in zip(values, leaves)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e3 * ROUNDING, atol=1e3 * ROUNDING)
    assert torch.equal(torch.get_rng_state(), before)
    assert not len(pyro.get_param_store())


class Conditional(nn.Module):
    """The exact law of the noisy predictor given y and θ, of a Gaussian likelihood; it sees y less the predictor."""

    def forward(self, seen: Tensor) -> torch.distributions.Distribution:
        centre, residual = seen.chunk(2, -1)
        ratio = 2 * RHO**2 / (2 * RHO**2 + 0.8**2)
        return torch.distributions.Normal(centre + ratio * residual, 0.8 * ratio**0.5)


def test_a_law_at_the_server_of_sums() -> None:
    """With the exact law of the predictor the bound is that of the model without z and with more noise."""
    guides = [vfl.Guide(family) for family in (vfl.sums(Conditional(), skewed=False), vfl.noiseless())]
    models = [MODEL, vfl.augmented(likelihoods.gaussian((0.8**2 + 2 * RHO**2) ** 0.5), predictors(WIDTHS), RHO)]
    bounds = []
    for model, guide in zip(models, guides):
        start = initial(model, guide, ROWS, 1, KEY, torch.float64)
        noise = draw_noise(model, guide, KEY.reshape(1), ROWS, 2, torch.float64)
        bounds.append(bound(model, guide, start, prepared(model, DATA), noise))
    torch.testing.assert_close(bounds[0], bounds[1], rtol=1e3 * ROUNDING, atol=0)
    powered = vfl.power(likelihoods.gaussian(0.8), predictors(WIDTHS), RHO)
    with pytest.raises(ValueError, match="Expected the augmented model"):
        vfl.sfvi(powered, guides[0], DATA, steps=1, progress=False)


class Learnt(nn.Module):
    """A law of the noisy predictor by weights of its own, of which the exact one is a member; far from it at first."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.log_sd = nn.Linear(2, 1).double(), nn.Parameter(torch.zeros(()).double())
        nn.init.zeros_(self.shift.weight)
        nn.init.zeros_(self.shift.bias)

    def forward(self, seen: Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Normal(seen[:, :1] + self.shift(seen), self.log_sd.exp().expand(len(seen), 1))


def learnt(seen: Tensor) -> None:
    """The same as a Pyro guide with statements, which a constraint keeps positive."""
    slope, sd = pyro.param("slope", torch.zeros(()).double()), torch.ones(()).double()
    sd = pyro.param("sd", sd, constraint=dist.constraints.positive)
    with pyro.plate("rows", len(seen)):
        pyro.sample("s", dist.Normal(seen[:, 0] + slope * seen[:, 1], sd))


@pytest.mark.slow
@pytest.mark.parametrize("own", [Learnt(), vfl.pyro_guide(learnt)], ids=["module", "pyro function"])
def test_laws_of_ones_own_are_trained_to_the_conjugate_posterior(own: nn.Module | encoders.EncoderFactory) -> None:
    """θ has the posterior of the regression with noise σ² + 2ρ², the bound is its evidence, z the exact conditional.

    The landing is stuck to and the family holds the truth, so that no Monte Carlo error is left at the optimum.
    """
    data = gaussian_data(WIDTHS, 30)
    guide = vfl.Guide(vfl.sums(own, skewed=False), joint=True)
    fit = vfl.sfvi(MODEL, guide, data, steps=800, lr=0.03, progress=False)
    mean, covariance, evidence = regression(data, 0.8**2 + 2 * RHO**2)
    means, covariances = fit.moments()
    sd = covariance.diagonal().sqrt()
    assert float(((means[0] - mean) / sd).abs().max()) < 1e-3
    assert float(((covariances[0] - covariance) / torch.outer(sd, sd)).abs().max()) < 1e-3
    assert float(fit.bounds[-1, 0]) == pytest.approx(evidence, abs=1e-3)
    found = torch.cat([value.flatten() for name, value in sorted(fit.parameters.server["z"].items())])
    ratio = 2 * RHO**2 / (2 * RHO**2 + 0.8**2)
    log_sd = math.log(0.8 * ratio**0.5)
    wanted = [log_sd, 0.0, 0.0, ratio] if isinstance(own, nn.Module) else [log_sd, ratio]
    assert found.tolist() == pytest.approx(wanted, abs=1e-3)


def test_elements_of_a_batch_are_fits_alone_and_nodes_train_them(tmp_path: Path) -> None:
    guide = vfl.Guide(vfl.amortised(Law()))
    both = vfl.sfvi(MODEL, guide, DATA, seed=[0, 1], steps=3, size=2, progress=False).parameters
    alone = vfl.sfvi(MODEL, guide, DATA, seed=1, steps=3, progress=False).parameters
    for together, one in zip(tree.leaves(both), tree.leaves(alone)):
        torch.testing.assert_close(together[1:], one, rtol=ROUNDING, atol=ROUNDING)
    server, *holders = parts(MODEL, guide, alone, key=KEY)
    nodes = [vfl.PartyNode(p, rows) for p, rows in zip(holders, DATA.known_to_parties(response=False))]
    run = vfl.NodesRun(vfl.ServerNode(server, DATA.known_to_server()), nodes)
    for _ in run.rounds(2):
        pass
    run.save(tmp_path / "run.safetensors")
    run.load(tmp_path / "run.safetensors")
    assert {"part.groups.z.net/weight", "part.groups.z.net/bias"} < set(nodes[0].state_dict())


def two(eta: Tensor) -> None:
    pyro.sample("z", dist.Normal(eta, 1.0))
    pyro.sample("u", dist.Normal(eta, 1.0))


def networks(eta: Tensor) -> None:
    pyro.module("net", nn.Linear(1, 1))


def observed(eta: Tensor) -> None:
    pyro.sample("z", dist.Normal(eta, 1.0), obs=eta)


class Answering(nn.Module):
    """Answers with what a function of rows returns."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, rows: Tensor) -> object:
        return self.answer(rows)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (nn.Linear(1, 3), r"rows \(3, 1\) to \(3, 2\)"),
        (Answering(lambda rows: "z"), "tensor, pair of tensors or distribution"),
        (Answering(lambda rows: torch.distributions.Normal(rows[0], 1.0)), r"batch shape \(3, C\)"),
        (Answering(lambda rows: (rows, torch.randn(3, 1))), "draws nothing"),
        (vfl.pyro_guide(two), r"one sample statement, but got \['u', 'z'\]"),
        (vfl.pyro_guide(networks), "pyro.param, but got pyro.module"),
        (vfl.pyro_guide(observed), "samples z and nothing else, but got 'z' observed"),
        (vfl.pyro_guide(lambda eta: None), r"one sample statement, but got \[\]"),
    ],
)
def test_refusals_when_a_fit_begins(own: nn.Module | encoders.EncoderFactory, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        initial(MODEL, vfl.Guide(vfl.amortised(own)), ROWS, 1, KEY)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda rows: torch.distributions.Bernoulli(logits=rows), "with rsample"),
        (lambda rows: torch.distributions.Laplace(rows, 1.0), "one standard normal number"),
        (lambda rows: torch.distributions.Normal(rows.expand(-1, 2), 1.0), "law of 1 numbers a row"),
    ],
)
def test_refusals_when_z_is_drawn(answer: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampled(vfl.Guide(vfl.amortised(Answering(answer))))
