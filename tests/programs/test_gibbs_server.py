"""The server's draws by programs for the CPU are those of torch's operations with the same random numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from support.programs import reference
from torch import Tensor

from fedtorch import random, tree
from fedtorch.models import gaussian
from fedtorch.models.gibbs import _interweaving, _levels, _scales
from fedtorch.models.gibbs._gaussian_conditional import Design
from fedtorch.models.gibbs.global_priors import spike_and_slab
from fedtorch.models.linear import SufficientStatistics
from fedtorch.programs import choice, gibbs_server, program

pytest.importorskip("numba")
SIZES = [(4, 11), (1, 1), (3, 2), (0, 3), (2, 33)]


@pytest.fixture(autouse=True)
def _by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "on")


exponential, log = gibbs_server.exponential, gibbs_server._log


@program("void(float64[::1], float64[:, ::1])")
def formulas(x, out):
    """Write what the formulas give of each number."""
    for i in range(len(x)):
        out[0, i], out[1, i] = exponential(x[i]), log(x[i])


def test_formulas_at_their_limits() -> None:
    """Everywhere to a unit or two in the last place, also where numbers are subnormal, zero, or out of range."""
    ends = [0.0, -0.0, 5e-324, 1e-310, 2.0**-1022, 1.0, 709.782712893384, 709.79, 800.0, -744.0, -745.13, -745.14]
    ends += [-800.0, float("inf"), -float("inf"), float("nan"), 1.7976931348623157e308, -(2.0**1023)]
    points = torch.linspace(-750, 715, 9001, dtype=torch.float64)
    x = torch.cat([torch.tensor(ends, dtype=torch.float64), points, normal(1, 999).exp()])
    out = numpy.empty((2, len(x)))
    formulas(x.numpy(), out)
    wanted = torch.stack((x.exp(), x.log()))
    torch.testing.assert_close(torch.from_numpy(out), wanted, rtol=2.0**-51, atol=5e-324, equal_nan=True)


def normal(seed: int, *shape: int) -> Tensor:
    return random.normal(random.key(seed), shape, torch.float64)


def keys_of(chains: int) -> Tensor:
    return random.fold_in(random.key(9), torch.arange(chains))


def compare(draw: Callable[[], tree.Tree], close: float, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    original = getattr(gibbs_server, function)
    monkeypatch.setattr(gibbs_server, function, lambda *a: called.append(function) or original(*a))
    found = draw()
    assert called
    monkeypatch.undo()
    with reference():
        wanted = draw()
    for one, other in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one, other, rtol=close, atol=close)


@pytest.mark.parametrize(("chains", "p"), [size for size in SIZES if size[0]])
@pytest.mark.parametrize("prior", ["a number", "each", "flat"])
def test_moves(prior: str, chains: int, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where columns depend on each other: θ stays under a flat prior."""
    x = normal(1, chains, p + 5, p)
    if p > 1:
        x[: chains // 2, :, 1] = x[: chains // 2, :, 0] = 0.0
    packed = gaussian.pack(x.mT @ x)
    precision = {
        "a number": torch.tensor(0.5).double(),
        "each": normal(2, chains, p).exp(),
        "flat": torch.zeros(1).double(),
    }
    score, theta = normal(3, chains, p), normal(4, chains, p)
    centre = normal(5, p, chains).mT  # strided
    draw = lambda: _interweaving.move(score, packed, theta, centre, precision[prior], keys_of(chains))
    compare(draw, 1e-10, "move", monkeypatch)  # condition numbers of some hundreds
    if prior == "flat" and p > 1 and chains > 1:
        assert torch.equal(draw()[0], theta[0])
        assert not torch.equal(draw()[-1], theta[-1])


@pytest.mark.parametrize(("chains", "p"), SIZES)
@pytest.mark.parametrize("shared", [False, True])
def test_spikes_and_slabs(shared: bool, chains: int, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps from the start, with estimates that are precise and others that say nothing."""
    prior = spike_and_slab(spike=0.02, variance=(1.5, 0.4), inclusion=(0.7, 2.0), shared_variance=shared)
    estimate = 2 * normal(1, chains, p) * (torch.arange(p) % 2)
    precision = (3 * normal(2, chains, p)).exp()

    def draw() -> tree.Tree:
        variables, drawn = prior.init(torch.zeros(chains, p).double()), []
        for key in random.split(keys_of(chains), 6):
            theta, variables = prior.update(variables, estimate, precision, key)
            drawn.append((theta, variables))
        return tuple(drawn)

    compare(draw, 1e-10, "spike_and_slab", monkeypatch)
    with reference():
        included = torch.stack([variables.included for _, variables in draw()])
    assert included.numel() == 0 or p == 1 or 0 < float(included.mean()) < 1  # of both kinds


def test_groups_are_drawn_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gibbs_server, "spike_and_slab", lambda *a: pytest.fail("it knows no groups"))
    prior = spike_and_slab(groups=[0, 0, 1])
    start = torch.zeros(2, 3).double()
    theta, variables = prior.update(prior.init(start), start, start + 1, keys_of(2))
    assert theta.shape == (2, 3)
    assert torch.equal(variables.included[:, 0], variables.included[:, 1])


@pytest.mark.parametrize(("chains", "p"), SIZES)
@pytest.mark.parametrize("parts", [1, 3])
def test_scales(parts: int, chains: int, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws in a row from near and far, of one site and of many, without scatter, and of components without a share."""
    clients = 10.0 ** torch.arange(chains)[:, None].double()
    weight, scatter = (2 * normal(1, p, chains).mT).exp(), (3 * normal(2, chains, p)).exp()  # strided
    scatter = scatter * (torch.arange(p) % 3 > 0) * (clients - 1)
    heard = _scales.ScaleStatistics(clients, weight, 3 * normal(3, chains, p), scatter)
    shares = normal(4, parts, chains, 1).exp()
    shares[:-1, : chains // 2] = 0.0
    components = _scales.Components(shares, normal(5, parts, 1, p).exp())

    def draw() -> tree.Tree:
        precision, drawn = (6 * normal(6, chains, p)).exp(), []
        for key in random.split(keys_of(chains), 5):
            precision = _scales.draw(heard, precision, components, key)
            drawn.append(precision)
        return tuple(drawn)

    compare(draw, 1e-10, "scales", monkeypatch)


@pytest.mark.parametrize(("chains", "p"), SIZES)
@pytest.mark.parametrize("loosest", [2.0**50, 1.5])
def test_levels(loosest: float, chains: int, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several moves in a row, also where factors keep running into their bounds; one site, and none with energy."""
    sums = [(2 * normal(seed, p, chains).mT).exp() for seed in (1, 2, 3)]  # strided
    sums[0] = sums[0] * (torch.arange(p) % 3 > 0)
    clients = torch.arange(1.0, chains + 1).double()

    def draw() -> tree.Tree:
        precision = normal(4, chains, p).exp()
        factors = torch.ones(chains, 2, p).double()
        drawn = []
        for key in random.split(keys_of(chains), 4):
            precision, factors = _levels.move(_levels.Levels(clients, *sums), precision, factors, 69.0, key)
            drawn.append((precision, factors))
        return tuple(drawn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_levels, "LOOSEST", loosest)
        compare(draw, 1e-10, "levels", monkeypatch)


def test_a_chain_does_not_see_the_others() -> None:
    prior, start = spike_and_slab(), torch.zeros(5, 4).double()
    variables = prior.init(start)
    estimate, precision = normal(1, 5, 4), normal(2, 5, 4).exp()
    whole = prior.update(variables, estimate, precision, keys_of(5))
    part = tree.take((variables, estimate, precision, keys_of(5)), slice(2, 3))
    for one, together in zip(tree.leaves(prior.update(*part)), tree.leaves(whole)):
        assert torch.equal(one[0], together[2])


@pytest.mark.parametrize(("chains", "p"), SIZES)
@pytest.mark.parametrize("clients", [0, 1, 3])
def test_likelihoods_of_moves(clients: int, chains: int, p: int) -> None:
    x = normal(1, clients, p + 2, p)
    statistics = SufficientStatistics(x.mT @ x, *(normal(2, 0),) * 3)
    design = Design(statistics, normal(3, p, clients).mT, *(normal(2, 0),) * 2, None, None)  # strided
    place, noise = normal(4, clients, p, chains).mT, normal(5, clients, chains).exp()
    assert gibbs_server.likelihoods(statistics.gram, design.estimate, place, noise) is not None
    found = _interweaving.linear(design, place, noise)
    with reference():
        wanted = _interweaving.linear(design, place, noise)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert gibbs_server.likelihoods(statistics.gram.float(), design.estimate, place, noise) is None
