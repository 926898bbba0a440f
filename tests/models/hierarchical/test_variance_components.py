"""Margins of linear mixed-effects models: the program, its reference, and densities spelled out row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

import fedtorch as ft
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.gaussian import Moments
from fedtorch.programs import choice, variance_components
from fedtorch.programs.variance_components import VarianceComponents

needs = pytest.mark.skipif(not variance_components.write_log_densities.usable(), reason="needs numba")


def vectors(clients: int, nodes: int, size: int, *, pairs: bool, seed: int = 0) -> VarianceComponents:
    """Components of every diagonal entry, or of every pair, whose sum is positive definite."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    rows, columns = torch.tril_indices(size, size) if pairs else torch.arange(size).expand(2, size)
    half = draw(clients, nodes, size, size) if pairs else torch.diag_embed(draw(clients, nodes, size))
    shared, root = draw(clients, size, size) / size, draw(clients, size, size)
    return VarianceComponents(
        values=(half @ half.mT)[..., rows, columns],
        inputs=draw(clients, nodes, 3),
        noise=draw(clients, nodes).exp(),
        rows=rows,
        columns=columns,
        root=root,
        shared=shared @ shared.mT,
        origin=draw(clients, 3),
        centre=draw(clients, size),
        slope=draw(clients, 3, size),
    )


def found(model: VarianceComponents, weights: Tensor) -> tuple[Tensor, ...]:
    return (variance_components.log_densities(model), *variance_components.scores(model, weights))


def assert_same(model: VarianceComponents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways agree to the rounding of the worse conditioned of these matrices."""
    weights = torch.rand(model.noise.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    monkeypatch.setenv(choice.VARIABLE, "off")
    reference = found(model, weights)
    monkeypatch.setenv(choice.VARIABLE, "on")
    for one, other in zip(found(model, weights), reference, strict=True):
        scale = float(other.abs().max()) if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10 * scale)


@needs
@pytest.mark.parametrize("size", [1, 2, 3, 10, 16])
@pytest.mark.parametrize("nodes", [1, 8, 21])
@pytest.mark.parametrize("pairs", [False, True])
def test_program_equals_the_reference(size: int, nodes: int, pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(vectors(3, nodes, size, pairs=pairs), monkeypatch)


@needs
def test_of_no_client_of_no_component_and_of_other_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that all clients share are not copied, and tensors may have their axes in any order."""
    model = vectors(4, 9, 3, pairs=False)
    assert_same(ft.tree.take(model._replace(rows=model.rows[None], columns=model.columns[None]), slice(0, 0))._replace(
        rows=model.rows, columns=model.columns), monkeypatch)  # fmt: skip
    assert_same(
        model._replace(values=model.values[..., :0], rows=model.rows[:0], columns=model.columns[:0]), monkeypatch
    )
    turned = {name: getattr(model, name).mT.contiguous().mT for name in ("values", "inputs", "root", "slope")}
    assert_same(model._replace(noise=model.noise.mT.contiguous().mT, **turned), monkeypatch)
    alike = {name: getattr(model, name)[:1].expand(4, *getattr(model, name).shape[1:]) for name in ("values", "inputs")}
    assert_same(model._replace(noise=model.noise[:1].expand(4, 9), **alike), monkeypatch)


@needs
def test_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = vectors(5, 13, 4, pairs=True), torch.get_num_threads()
    monkeypatch.setattr(variance_components, "_FEW", 1)
    got = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        got.append(found(model, torch.ones_like(model.noise)))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*got, strict=True))


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("pairs", [False, True])
def test_values_are_those_of_the_normal_density(mode: str, pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """log |M| + u'M⁻¹u from torch's density of M spelled out, and its gradient M⁻¹u by automatic differentiation."""
    monkeypatch.setenv(choice.VARIABLE, mode)
    model = vectors(2, 11, 4, pairs=pairs)
    weights = torch.rand(2, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log, score, information = found(model, weights)
    eye = torch.eye(4, dtype=torch.float64)
    for k in range(2):
        total = torch.zeros_like(eye)
        for r in range(11):
            spread = torch.zeros(4, 4, dtype=torch.float64)
            spread[model.rows, model.columns] = model.values[k, r]
            spread[model.columns, model.rows] = model.values[k, r]
            covariance = model.root[k].T @ spread @ model.root[k] + model.shared[k] + model.noise[k, r] * eye
            at = (model.centre[k] - (model.inputs[k, r] - model.origin[k]) @ model.slope[k]).requires_grad_()
            density = MultivariateNormal(torch.zeros(4).double(), covariance, validate_args=False).log_prob(at)
            density.backward()
            expected = -2 * density.detach() - 4 * math.log(2 * math.pi)
            torch.testing.assert_close(log[k, r], expected, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(score[k, r], -at.grad, rtol=1e-8, atol=1e-10)  # type: ignore[operator]
            total += weights[k, r] * torch.linalg.inv(covariance)
        torch.testing.assert_close(information[k], total, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mode", ["on", "off"])
def test_what_is_no_covariance_has_no_density(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the node whose variances are negative, infinite or NaN is NaN."""
    monkeypatch.setenv(choice.VARIABLE, mode)
    model = vectors(1, 5, 2, pairs=False)
    model.noise[0, 1:4] = torch.tensor([-100.0, torch.nan, torch.inf]).double()
    log, score, information = found(model, torch.ones_like(model.noise))
    assert log.isfinite().tolist() == [[True, False, False, False, True]]
    assert bool(information.isnan().any())
    assert bool(score[0, [0, 4]].isfinite().all())


@needs
def test_the_reference_runs_where_the_program_cannot() -> None:
    """Of float32, of more than 16 dimensions, where a gradient is asked for, and under vmap."""
    model = vectors(1, 2, 3, pairs=False)
    tensors = model.values, model.noise
    assert variance_components.usable(3, tensors)
    assert not variance_components.usable(17, tensors)
    assert not variance_components.usable(3, [tensor.float() for tensor in tensors])
    slope = model.slope.clone().requires_grad_()
    assert not variance_components.usable(3, [slope])
    variance_components.log_densities(model._replace(slope=slope)).sum().backward()
    score, _ = variance_components.scores(model, torch.ones_like(model.noise))
    away = model.inputs - model.origin[:, None]
    torch.testing.assert_close(slope.grad, -2 * away.mT @ score)
    one = torch.vmap(lambda centre: variance_components.log_densities(model._replace(centre=centre)))
    torch.testing.assert_close(one(model.centre[None])[0], variance_components.log_densities(model))


MODELS = {
    "noise learnt": lambda: hierarchical.linear(hierarchical.normal(3)),
    "noise known": lambda: hierarchical.linear(hierarchical.normal(3), noise=0.3),
    "correlated": lambda: hierarchical.linear(hierarchical.normal(3, random=[0, 2], correlated=True)),
    "fixed effects": lambda: hierarchical.linear(hierarchical.normal(3, random=[1])),
    "nothing random": lambda: hierarchical.linear(hierarchical.normal(3, random=[])),
}


def results(model: hierarchical.Model, block: Any, count: int) -> list[Tensor]:
    """What a fit and its correction ask of a model, under a cavity of all coordinates."""
    size = len(model.names)
    generator = torch.Generator().manual_seed(3)
    root = 0.2 * torch.randn(size, size, generator=generator, dtype=torch.float64).tril() + 0.6 * torch.eye(size)
    mean = 0.3 * torch.randn(count, size, generator=generator, dtype=torch.float64)
    cavity = Moments(mean, (root @ root.mT).expand(count, size, size))
    prepared = model.prepare(block)
    phi = torch.randn(1, 40, size, generator=generator, dtype=torch.float64).expand(count, 40, size)
    tilted = model.project(cavity, prepared, torch.zeros(count, dtype=torch.int64)).tilted
    assert model.log_evidence is not None
    posterior = model.devices(cavity, prepared)
    told = model.log_factor(phi, prepared), model.log_evidence(cavity, prepared)
    return [*tilted, *told, posterior.weights, posterior.means, posterior.covariances]


@needs
@pytest.mark.parametrize("name", MODELS)
def test_models_find_the_same_with_the_program_as_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ragged rows, fewer than there are coefficients too, and of no client."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (9, 2, 30, 5)]
    data = ft.data.from_tensors([(part[:, :3], part[:, 3]) for part in rows])
    for ids in ([0, 1, 2, 3], []):
        got = {}
        for mode in ("off", "on"):
            monkeypatch.setenv(choice.VARIABLE, mode)
            got[mode] = results(MODELS[name](), data.stack(ids), len(ids))
        for one, other in zip(got["on"], got["off"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@needs
def test_runs_end_at_the_same_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of very different units, whose matrices are badly scaled, change nothing."""
    generator = torch.Generator().manual_seed(2)
    clients = []
    for _ in range(12):
        x = torch.randn(15, 2, generator=generator, dtype=torch.float64)
        y = x @ torch.tensor([1.0, -0.5]).double() + 0.3 * torch.randn(15, generator=generator, dtype=torch.float64)
        clients.append((x * torch.tensor([1e5, 1e-4]).double(), y))
    variance = [ft.models.hierarchical.hyperpriors.log_normal(scale, 1.0) for scale in (-24.0, 18.0)]
    hierarchy = hierarchical.normal(2, sd=torch.tensor([1e-5, 1e4]).double(), variance=variance)
    got = []
    for mode in ("off", "on"):
        monkeypatch.setenv(choice.VARIABLE, mode)
        run = ft.run(ft.ep(hierarchical.linear(hierarchy)), ft.InProcess(ft.data.from_tensors(clients)), rounds=8)
        got.append(gaussian.moments(run.server.posterior))
    sd = got[0].covariance.diagonal().sqrt()
    torch.testing.assert_close((got[1].mean - got[0].mean) / sd, torch.zeros_like(sd), rtol=0, atol=1e-7)
    torch.testing.assert_close(
        got[1].covariance / sd / sd[:, None], got[0].covariance / sd / sd[:, None], rtol=0, atol=1e-7
    )
