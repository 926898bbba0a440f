"""Directed graphs with feedback: Geweke's test, quadrature, updates against fresh values, a known cyclic graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from support.oracles import calibration, geweke
from support.oracles.closed_forms import same_bits
from support.oracles.sampled import sampled
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.models.gibbs import deviations, directed, global_priors, graphical, sparse
from fedtorch.models.gibbs.directed import RowPrior, Walk

LENGTHS = [pytest.param((40, 25), id="short"), pytest.param((300, 400), id="long", marks=pytest.mark.slow)]
SHAPE, SITES, ROWS, SCALE, SPREAD = 2.0, 2, 4, 0.3, 0.5
# Cause to effect is column to row: 0 → 1 → 2 → 3 → 1, with a loop of gain −0.25.
CYCLE = torch.tensor([[0, 0, 0, 0], [0.8, 0, 0, -0.6], [0, 0.7, 0, 0], [0, 0, 0.6, 0]], dtype=torch.float64)


def laplace(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    return random.exponential(random.fold_in(key, 0), shape, torch.float64) - random.exponential(
        random.fold_in(key, 1), shape, torch.float64
    )


def caused(effects: Tensor, errors: Tensor) -> Tensor:
    """Rows `(..., N, p)` whose structural errors are `errors`."""
    p = effects.shape[-1]
    return torch.linalg.solve(torch.eye(p, dtype=torch.float64) - effects, errors.mT).mT


def observe(y: Tensor) -> directed.Observations:
    return directed.observations(ft.data.ClientData(y, torch.full((len(y),), y.shape[1])))


def draw_joint(count: int, p: int, purpose: int) -> geweke.Joint:
    """Direct draws from the hierarchy, again wherever a site is not stable."""
    q, left, attempt = p * (p - 1), torch.arange(count), 0
    joint: Any = None
    own = geweke.keys(purpose, count)
    while len(left):
        keys = random.fold_in(own[left], attempt)
        theta = SPREAD * random.normal(random.fold_in(keys, 0), (q,), torch.float64)
        each = random.fold_in(random.fold_in(keys, 1)[:, None], torch.arange(SITES)).flatten()
        w, u = geweke.horseshoe_scales(random.fold_in(each, 0), (q,))
        z = random.normal(random.fold_in(each, 1), (q,), torch.float64)
        local = theta.repeat_interleave(SITES, 0) + SCALE * z / w.sqrt()
        noise = random.gamma(random.fold_in(each, 2), SHAPE, (p,), torch.float64)
        ones = torch.ones_like(theta)
        shared = sparse.Global(theta, theta, ones / SCALE**2, ones[:, 0], {}, torch.stack((ones, ones), -2))
        zero = torch.zeros(len(each), dtype=torch.float64)
        sites = directed.DirectedSite(*(leaf[:, None] for leaf in (local, w, u, noise, zero)))
        drawn = geweke.Joint(shared, tree.map(lambda leaf: leaf.unflatten(0, (-1, SITES)), sites))
        joint = drawn if joint is None else tree.map(lambda o, n, at=left: o.index_copy(0, at, n), joint, drawn)
        stable = (directed.spectral_radius(graphical.square(local)) < 1).reshape(-1, SITES).all(1)
        left, attempt = left[~stable], attempt + 1
    return joint._replace(sites=tree.map(lambda leaf: leaf.flatten(0, 1), joint.sites))


KERNELS = directed.regression(noise_shape=SHAPE), sparse.hierarchy(global_priors.gaussian(SPREAD), scale=SCALE)


def _setting(p: int) -> geweke.Setting:
    return geweke.Setting(torch.zeros(ROWS, p), SITES, SHAPE, geweke.horseshoe_scales, None, None)  # type: ignore[arg-type]


def statistics(joint: geweke.Joint) -> dict[str, Tensor]:
    found = geweke.statistics(joint, SITES, lambda prior: {})
    matrices = graphical.square(joint.sites.theta[:, 0])
    found["feedback"] = (matrices @ matrices).diagonal(0, 1, 2).sum(-1).tanh().reshape(-1, SITES)
    found["radius"] = directed.spectral_radius(matrices).reshape(-1, SITES)
    return found


def simulate(joint: geweke.Joint, rows: int, step: int = 0) -> directed.Observations:
    effects = graphical.square(joint.sites.theta[:, 0])
    errors = laplace(geweke.keys(3, len(effects), step), (rows, effects.shape[-1])) / joint.sites.noise
    return observe(caused(effects, errors))


def run_geweke(p: int, replicates: int, rounds: int, sweeps: int = 1) -> dict[str, float]:
    direct = statistics(draw_joint(6_000, p, 1))
    joint = draw_joint(replicates, p, 2)
    chains: dict[str, list[Tensor]] = {name: [] for name in direct}
    for t in range(rounds):
        joint = geweke.step(*KERNELS, _setting(p), joint, simulate(joint, ROWS, t), t, sweeps)
        now = statistics(joint)
        for name in chains:
            chains[name].append(now[name])
    return geweke.z_scores(direct, chains)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("p", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_geweke(p: int, length: tuple[int, int]) -> None:
    name, score, bound = geweke.worst(run_geweke(p, *length, sweeps=p - 1))
    assert abs(score) < bound, (name, score, bound)


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(calibration.Length(60, 7, 16, 4), id="short"),
        pytest.param(calibration.Length(500, 15, 60, 12), id="long", marks=pytest.mark.slow),
    ],
)
def test_posteriors_are_calibrated(length: calibration.Length) -> None:
    truth = draw_joint(length.replicates, 2, 6)
    start = graphical.start(2)
    data = simulate(truth, 8)
    calibration.check(
        calibration.of_gibbs(*KERNELS, _setting(2), truth, data, statistics, length, start=start, sweeps=4)
    )


def test_geweke_finds_the_printed_acceptance_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """In print the determinant counts once, whatever the number of rows."""

    class Printed(Walk):
        def __init__(self, y: Tensor, count: Tensor, theta: Tensor) -> None:
            super().__init__(y, count, theta)
            self.count = torch.ones_like(self.count)

    monkeypatch.setattr(directed, "Walk", Printed)
    _, score, bound = geweke.worst(run_geweke(2, 150, 40))
    assert abs(score) > 1.5 * bound


def test_two_variables_against_quadrature() -> None:
    """One site, known scales: the posterior of both effects on a grid; errors from independent chains."""
    y = caused(torch.tensor([[0.0, -0.4], [0.7, 0.0]]).double(), laplace(random.key(4), (9, 2)))
    sure, tau, chains = 1e9, 0.7, 150
    local = directed.regression(deviation=deviations.normal(), noise_shape=sure)
    site = tree.map(lambda leaf: leaf[None], local.init(torch.zeros(chains, 2, dtype=torch.float64)))
    ones = torch.ones(1, chains, 2, dtype=torch.float64)
    factors = torch.stack((ones, ones), -2)
    heard = sparse.GlobalVariables(0.2 * ones, 0.2 * ones, ones / tau**2, sure * ones[..., 0], factors)
    data = observe(y[None])
    draws = []
    for t in range(25):
        site = local.sweep(heard, site, data, geweke.keys(7, chains, t)[None], 8)
        draws.append(site.theta[0])
    kept = torch.stack(draws[7:])
    axis = torch.linspace(-3, 3, 601, dtype=torch.float64)
    first, second = torch.meshgrid(axis, axis, indexing="ij")  # effects of 1 on 0 and of 0 on 1
    errors = (y[:, 0, None, None] - first * y[:, 1, None, None]).abs().sum(0)
    errors = errors + (y[:, 1, None, None] - second * y[:, 0, None, None]).abs().sum(0)
    prior = ((first - 0.2).square() + (second - 0.2).square()) / (2 * tau**2)
    log = len(y) * (1 - first * second).abs().log() - errors - prior
    density = torch.where((first * second).abs() < 1, log, -torch.inf).flatten().softmax(0).reshape(log.shape)
    for value, of in ((kept, (first, second)), (kept.tanh(), (first.tanh(), second.tanh()))):
        means = value.mean(0)
        exact = torch.stack([(density * part).sum() for part in of])
        z = (means.mean(0) - exact) / (means.std(0) / chains**0.5)
        assert float(z.abs().max()) < stats.t.ppf(1 - 1e-3 / 8, df=chains - 1)
    product = (kept[..., 0] * kept[..., 1]).mean(0)
    z = float((product.mean() - (density * first * second).sum()) / (product.std() / chains**0.5))
    assert abs(z) < stats.t.ppf(1 - 1e-3 / 8, df=chains - 1)


def cyclic_sites(counts: list[int], seed: int = 0) -> ft.data.FederatedData:
    errors = laplace(random.key(seed), (sum(counts), 4))
    return ft.data.FederatedData(caused(CYCLE, errors), torch.tensor(counts))


def algorithm(sweeps: int = 3, chains: int = 2) -> ft.Algorithm:
    return ft.gibbs(directed.regression(), sparse.hierarchy(), sweeps=sweeps, chains=chains)


def test_updates_agree_with_fresh_values() -> None:
    """Inverse, residuals and their sums after many accepted moves, to rounding; and every place is stable."""
    data = observe(cyclic_sites([40]).stack([0]).batch)
    walk = Walk(data.y, data.count, torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    walk.refresh()
    ones = torch.ones(4, 1, 3, dtype=torch.float64)
    for t in range(60):
        keys = random.split(geweke.keys(9, 3, t)[None], 2)
        step = 0.2 * random.normal(keys[0], (3,), torch.float64).movedim(-1, 0)
        log = random.uniform(keys[1], (), torch.float64).log()
        walk.move(t % 4, step, 0 * ones[:3], ones[:3], ones[0], log)
    assert float(walk.accepted.min()) > 5
    inverse, errors, absolute = walk.inverse.clone(), walk.errors.clone(), walk.absolute.clone()
    theta = walk.theta.permute(2, 3, 0, 1)
    fresh = Walk(data.y, data.count, theta)
    fresh.refresh()
    for mine, theirs in ((inverse, fresh.inverse), (errors, fresh.errors), (absolute, fresh.absolute)):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-11)
    direct = data.y[0] - data.y[0] @ theta[0].mT
    assert torch.allclose(errors[:, :40, 0].permute(2, 1, 0), direct, rtol=1e-11, atol=1e-11)
    assert bool((directed.spectral_radius(theta) < 1).all())


def test_turns_agree_with_fresh_values() -> None:
    """Residuals and their sums after many turns of two rows; |det(I − θ)| / Π b is what they keep."""
    data = observe(cyclic_sites([40]).stack([0]).batch)
    walk = Walk(data.y, data.count, CYCLE.expand(1, 3, 4, 4))
    noise, nothing = torch.ones(4, 1, 3, dtype=torch.float64), torch.zeros(4, 4, 1, 3, dtype=torch.float64)
    volume = lambda: torch.linalg.det(torch.eye(4, dtype=torch.float64) - walk._square()).abs() * noise.prod(0)
    kept, moved = volume(), 0
    for t in range(60):
        uniforms = random.uniform(geweke.keys(9, 3, t)[None], (3,), torch.float64).movedim(-1, 0)
        before = noise
        noise = walk.turn(t % 4, uniforms, noise, RowPrior(nothing, nothing, 4.0, torch.zeros(3, dtype=torch.float64)))
        changed = (noise != before).sum(0)
        assert bool(((changed == 0) | (changed == 2)).all())
        moved += int((changed > 0).sum())
    assert moved > 5
    assert torch.allclose(volume(), kept, rtol=1e-11)
    fresh = Walk(data.y, data.count, walk._square().contiguous())
    for mine, theirs in ((walk.errors, fresh.errors), (walk.absolute, fresh.absolute)):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_a_site_leaves_a_local_mode() -> None:
    """Started where two rows share what belongs to one of them, most chains find the loop within a few sweeps."""
    stuck = torch.tensor([[0, 0, 0, 0], [0.5, 0, 0.8, 0], [1.5, -0.9, 0, 0], [0, 0, 0.7, 0]], dtype=torch.float64)
    start = stuck.gather(1, graphical.other_variables(4)).flatten()
    sites = ft.run(algorithm(8, 4), ft.InProcess(cyclic_sites([200], seed=1)), start, rounds=25).last.clients.table
    off = (graphical.square(sites.read(slice(0, 1)).variables.theta) - CYCLE).abs().amax((-1, -2))
    assert int((off < 0.4).sum()) >= 2  # by steps of single rows all chains stay off by more than 1


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_same_bits_in_every_chunking(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtorch.federation.populations.in_process.SMALL_BLOCK", 0)
    data = cyclic_sites([30, 4, 70, 40])
    rounds = [
        tuple(
            (round.server, round.clients.state_dict())
            for round in ft.Run(algorithm(), ft.InProcess(data, size), graphical.start(4), cohort=3).rounds(4)
        )
        for size in (None, chunk)
    ]
    assert same_bits(*rounds)


@pytest.mark.parametrize(("p", "rounds"), [(3, 45), pytest.param(4, 400, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_cyclic_graph_is_found(p: int, rounds: int) -> None:
    """The last p variables, which the loop is among; errors of all are drawn."""
    truth = CYCLE[4 - p :, 4 - p :]
    data = ft.data.FederatedData(caused(truth, laplace(random.key(0), (500, p))), torch.full((5,), 100))
    sampler = sampled(
        algorithm(8, 2), ft.InProcess(data), graphical.start(p), rounds=rounds, burn_in=rounds // 3, keep=False
    )
    theta, inclusion = (graphical.square(sampler.mean()[name]) for name in ("theta", "prior.included"))
    assert torch.equal(graphical.edges(inclusion, 0.1), truth != 0)
    assert float((theta - truth).abs().max()) < 0.3


def test_every_site_stays_stable() -> None:
    data = cyclic_sites([5, 8, 12])
    found = ft.run(algorithm(10, 3), ft.InProcess(data), graphical.start(4), rounds=15).last
    sites = found.clients.table.read(slice(0, 3)).variables
    assert bool((directed.spectral_radius(graphical.square(sites.theta)) < 1).all())
    assert bool(((sites.accepted > 0.05) & (sites.accepted < 0.95)).all())


@pytest.mark.slow
def test_permuted_variables() -> None:
    """The posterior is that of the permuted problem, within Monte Carlo errors of the chains."""
    data, order, chains = cyclic_sites([40, 30]).map(lambda y: y[:, 1:]), [2, 0, 1], 8
    means = []
    for turned in (data, data.map(lambda y: y[:, order])):
        sampler = sampled(
            algorithm(4, chains), ft.InProcess(turned), graphical.start(3), rounds=20, burn_in=8, keep=False
        )
        means.append(graphical.square(sampler.moments["theta"].mean))
    first, second = means[0][:, order][:, :, order], means[1]
    off = ~torch.eye(3, dtype=torch.bool)
    z = ((first.mean(0) - second.mean(0)) / ((first.var(0) + second.var(0)) / chains).sqrt())[off]
    assert float(z.abs().max()) < stats.t.ppf(1 - 1e-3 / 12, df=chains - 1)


def test_bad_input() -> None:
    for arguments in ({"noise_shape": 0.0}, {"step": -1.0}):
        with pytest.raises(ValueError, match="Expected a positive"):
            directed.regression(**arguments)
    with pytest.raises(ValueError, match="Expected a start of spectral radius below 1"):
        ft.Run(algorithm(), ft.InProcess(cyclic_sites([9])), torch.ones(12)).step()
    constant = cyclic_sites([9]).map(lambda y: torch.cat([y[:, :3], torch.ones_like(y[:, :1])], 1))
    with pytest.raises(ValueError, match="but got constant number 3"):
        ft.Run(algorithm(), ft.InProcess(constant), graphical.start(4)).step()


@pytest.mark.parametrize("kind", ["directed", "Markov random field"])
def test_a_block_of_no_clients(kind: str) -> None:
    fields = ft.gibbs(graphical.neighbourhoods(), graphical.every_response(sparse.hierarchy()), sweeps=2, chains=2)
    made = algorithm() if kind == "directed" else fields
    progress = ft.Run(made, ft.InProcess(cyclic_sites([9, 5])), graphical.start(4))
    outbox, clients = made.outbox(progress.server), progress.clients
    nobody = clients.reply(clients.empty_block(), outbox, ft.Turn(random.key(0), 0))
    somebody = clients.reply(next(iter(clients.blocks(None))), outbox, ft.Turn(random.key(0), 0))
    for empty, full in zip(nobody[:2], somebody[:2]):
        shapes = [[(path, leaf.shape[1:]) for path, leaf in tree.items(part)] for part in (empty, full)]
        assert shapes[0] == shapes[1]
        assert all(len(leaf) == 0 for leaf in tree.leaves(empty))


@pytest.mark.parametrize(("variables", "chains"), [(2, 3), (3, 7)])
def test_as_many_chains_as_make_a_square(variables: int, chains: int) -> None:
    """(chains, coefficients) then has the shape (p, p − 1) of another p."""
    y = random.normal(random.key(0), (3, 20, variables), torch.float64)
    algorithm = ft.gibbs(directed.regression(), sparse.hierarchy(), sweeps=2, chains=chains)
    found = ft.run(algorithm, ft.InProcess(ft.data.from_tensors(list(y))), graphical.start(variables), rounds=2).last
    assert found.server.variables.theta.shape == (chains, variables * (variables - 1))
