"""A shared body with personal heads: explicit loops, heads on features that stand still, envelope and descent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, same_bits, sgd
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms.ep import devices, posterior, settled
from fedtorch.models import hierarchical, low_rank
from fedtorch.models.linear import sufficient_statistics
from fedtorch.models.matrix_normal import CovarianceUpdate, data_misfit

SIZES = [9, 7, 12, 8, 17, 6]
K = len(SIZES)
DATA = linear_clients(SIZES)
NAMES = "feature_map.0.weight", "feature_map.0.bias"


def body() -> nn.Module:
    return nn.Sequential(linear(3, 2, seed=3), nn.Tanh())


def trained(rate: float = 0.1, steps: int = 1, **arguments: Any) -> ft.LocalSolver:
    head = ft.LinearHead(2, body(), given=True, dtype=torch.float64)
    return sgd(rate, head, steps=steps, buffers="local", **arguments)


def heads() -> ft.LocalSolver:
    return ft.least_squares(ft.LinearHead(3, intercept=False, dtype=torch.float64))


def design(parameters: list[Tensor], x: Tensor) -> Tensor:
    features = (x @ parameters[0].T + parameters[1]).tanh()
    return torch.cat([features, torch.ones_like(x[:, :1])], 1)


def start() -> list[Tensor]:
    return [parameter.detach().clone() for parameter in body().parameters()]


def fixed(parameters: list[Tensor]) -> ft.data.FederatedData:
    return DATA.map(lambda rows: (design(parameters, rows[0]), rows[1]))


def test_the_explicit_loop_of_heads_on_their_own() -> None:
    """FedRep: each head is the least squares solution, then the body takes three steps from the server's."""
    algorithm = ft.shared_body(trained(0.1, steps=3), ft.separate(heads()), lr=0.7)
    shared, own = start(), torch.zeros(K, 3, dtype=torch.float64)
    for round in ft.Run(algorithm, ft.InProcess(DATA), cohort=4, seed=1).rounds(5):
        ids = round.ids.tolist()
        moved = [torch.zeros_like(part) for part in shared]
        for k in ids:
            x, y = DATA[k]
            own[k] = torch.linalg.lstsq(design(shared, x), y).solution
            mine = [part.clone().requires_grad_() for part in shared]
            for _ in range(3):
                gradients = torch.autograd.grad((design(mine, x) @ own[k] - y).square().mean(), mine)
                mine = [(part - 0.1 * g).detach().requires_grad_() for part, g in zip(mine, gradients)]
            share = SIZES[k] / sum(SIZES[i] for i in ids)
            moved = [total + share * (new.detach() - old) for total, new, old in zip(moved, mine, shared)]
        shared = [old + 0.7 * move for old, move in zip(shared, moved)]
        assert distance(round.server.body, dict(zip(NAMES, shared))) < 100 * ROUNDING
    run_tensors = round.clients.tensors(algorithm.outbox(round.server), torch.arange(K))
    assert distance(run_tensors["coefficients"], own) < 100 * ROUNDING


def test_one_step_follows_the_gradient_of_what_heads_leave() -> None:
    """By the envelope theorem the body moves along −∇_B Σ_k p_k min_θ L_k(B, θ), differentiated through the heads."""
    round = ft.Run(ft.shared_body(trained(0.05), ft.separate(heads())), ft.InProcess(DATA)).step()
    parts = [part.requires_grad_() for part in start()]
    total = torch.zeros((), dtype=torch.float64)
    for x, y in DATA:
        phi = design(parts, x)
        theta = torch.linalg.solve(phi.T @ phi, phi.T @ y)
        total = total + (phi @ theta - y).square().sum() / sum(SIZES)
    gradients = torch.autograd.grad(total, parts)
    wanted = {name: (part - 0.05 * g).detach() for name, part, g in zip(NAMES, parts, gradients)}
    assert distance(round.server.body, wanted) < 100 * ROUNDING


@pytest.mark.parametrize("cohort", [None, 3])
def test_hm1_over_a_body_that_stands_still_is_hm1_on_its_features(cohort: int | None) -> None:
    algorithm = ft.shared_body(trained(0.0), ft.matrix_normal(heads()))
    run = ft.run(algorithm, ft.InProcess(DATA, 2), rounds=6, cohort=cohort, seed=3)
    plain = ft.run(ft.matrix_normal(heads()), ft.InProcess(fixed(start())), rounds=6, cohort=cohort, seed=3)
    assert distance(run.server.heads, plain.server) < 1e3 * ROUNDING
    if cohort is None:
        assert distance(run.tensors()["coefficients"], plain.server.parameters) < 1e3 * ROUNDING


def test_ep_over_a_body_that_stands_still_is_ep_on_its_features() -> None:
    model = hierarchical.linear(hierarchical.normal(3))
    run = ft.run(ft.shared_body(trained(0.0), ft.ep(model)), ft.InProcess(DATA), rounds=30, until=settled())
    plain = ft.run(ft.ep(model), ft.InProcess(fixed(start())), rounds=30, until=settled())
    assert run.number == plain.number < 30
    assert distance(run.server.heads.posterior, plain.server.posterior) < 1e4 * ROUNDING
    means = posterior(plain).mean[:3]
    at = devices(plain)
    wanted = (at.weights[..., None] * at.means).sum(1)
    assert distance(run.tensors()["coefficients"], wanted) < 0.05  # one round before the last
    assert float((means - wanted.mean(0)).abs().max()) < 0.2  # shrunk to what is shared


def test_no_round_increases_the_objective_of_body_and_heads() -> None:
    """With known Ω and noise, Σ ‖y − Φ_B θ‖²/σ² + tr(Θ'Ω⁻¹Θ) is what both halves of a round decrease."""
    factor = random.normal(random.key(4), (K, 2), torch.float64)
    omega = low_rank.LowRank.from_factor(torch.tensor(0.3, dtype=torch.float64), factor, 2)
    known = CovarianceUpdate(lambda *_: omega, lambda *_: torch.zeros(()))
    algorithm = ft.shared_body(trained(0.05), ft.matrix_normal(heads(), covariance=known, noise=0.25))
    noise, values = torch.full((K,), 0.25, dtype=torch.float64), []
    for round in ft.Run(algorithm, ft.InProcess(DATA)).rounds(40):
        block = fixed([round.server.body[name] for name in NAMES]).stack(range(K))
        statistics = sufficient_statistics(*block.batch, block.mask)
        theta = round.server.heads.parameters
        values.append(float(data_misfit(statistics, noise, theta) + omega.quadratic_form(theta)))
    later = torch.tensor(values[2:])  # the first round has no prior
    assert bool((later.diff() <= 1e-9).all())
    assert float(later[-1]) < 0.95 * float(later[0])


def test_permuted_clients_and_a_silent_one() -> None:
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    algorithm = ft.shared_body(trained(0.1, steps=2), ft.matrix_normal(heads()))
    one, other = (ft.run(algorithm, ft.InProcess(d), rounds=4) for d in (DATA, DATA.select(order.tolist())))
    assert distance(one.server.body, other.server.body) < 1e4 * ROUNDING
    assert distance(one.tensors()["coefficients"][order], other.tensors()["coefficients"]) < 1e4 * ROUNDING
    run = ft.Run(algorithm, ft.InProcess(DATA), cohort=3, seed=5)
    before = run.tensors()["coefficients"]
    asked = run.step().ids
    silent = torch.tensor([k for k in range(K) if k not in asked.tolist()])
    assert same_bits(run.tensors()["coefficients"][silent], before[silent])


def test_a_run_goes_on_where_it_stopped(tmp_path: Any) -> None:
    algorithm = ft.shared_body(trained(0.1, batch_size=4), ft.ep(hierarchical.linear(hierarchical.normal(3))))
    whole = ft.run(algorithm, ft.InProcess(DATA), rounds=5, cohort=4)
    half = ft.run(algorithm, ft.InProcess(DATA), rounds=2, cohort=4)
    half.save(tmp_path / "half.safetensors")
    again = ft.Run(algorithm, ft.InProcess(DATA), cohort=4)
    again.load(tmp_path / "half.safetensors")
    for _ in again.rounds(5):
        pass
    assert same_bits(again.server, whole.server)
    module = whole.client_module(2)
    assert torch.equal(module.coefficients, whole.tensors([2])["coefficients"][0])


def test_what_does_not_fit_is_refused_by_name() -> None:
    good, separate = trained(), ft.separate(heads())
    with pytest.raises(TypeError, match=r"Expected a local solver of a LinearHead, but got one of Linear; pass the b"):
        ft.shared_body(sgd(0.1), separate)
    head = ft.LinearHead(2, body(), dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"Expected coefficients that stay at each client .*given=True\), buffers=\"loc"
    ):
        ft.shared_body(sgd(0.1, head, buffers="local"), separate)
    given = ft.LinearHead(2, body(), given=True, dtype=torch.float64)
    with pytest.raises(ValueError, match="Expected coefficients that stay at each client while its body is trained"):
        ft.shared_body(sgd(0.1, given), separate)
    with pytest.raises(ValueError, match="Expected heads with a server, over a star or private rows"):
        ft.shared_body(good, ft.gtv(heads(), ft.Network.ring(K), 0.1))
    with pytest.raises(TypeError, match=r"Expected heads with coefficients, but got an algorithm of \['bias', 'weight"):
        ft.shared_body(good, ft.separate(ft.least_squares(linear())))
    with pytest.raises(
        ValueError, match="Expected a LinearHead of which the coefficients alone are trained, but got n"
    ):
        ft.matrix_normal(ft.least_squares(ft.LinearHead(3, given=True, dtype=torch.float64)))
    wide = ft.matrix_normal(ft.least_squares(ft.LinearHead(4, intercept=False, dtype=torch.float64)))
    with pytest.raises(
        ValueError, match=r"Expected heads of 3 coefficients, .* but got 4; write ft\.LinearHead\(3, int"
    ):
        ft.shared_body(good, wide)
    with pytest.raises(ValueError, match=r"shapes \(4,\)"):
        ft.Run(ft.shared_body(good, ft.ep(hierarchical.linear(hierarchical.normal(4)))), ft.InProcess(DATA))
    head = ft.LinearHead(2, linear(3, 2), given=True, dtype=torch.float64)
    steep = ft.shared_body(sgd(0.1, head, buffers="local"), separate)
    far = {name: torch.full_like(part, 1e308) for name, part in steep.start.items()}
    with pytest.raises(ValueError, match=r"client 0.*Expected finite features, but the shared body gives NaN or Inf"):
        ft.run(steep, ft.InProcess(DATA), far, rounds=1)
