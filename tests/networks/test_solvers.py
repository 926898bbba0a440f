"""Solvers of GTV minimisation against the dense solution, least norm, limits in α, KKT conditions, costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, clock_clients, distance
from support.oracles.gtv_problems import bare_linear_clients, dense_solution, dense_system, weighted_network
from torch import Tensor

import fedtorch as ft
from fedtorch.networks import solvers
from fedtorch.networks.solvers import LinearProblem, Solution
from fedtorch.networks.solvers.admm import admm
from fedtorch.networks.solvers.penalties import equal, norm2
from fedtorch.networks.solvers.primal_dual import primal_dual
from fedtorch.networks.solvers.proximal_averaging import proximal_averaging

SIZES = [7, 4, 9, 5, 12, 6, 8, 5]
N = len(SIZES)
SQUARED: dict[str, Callable[..., Solution]] = {
    "admm": lambda problem, **arguments: admm(problem, solvers.squared, **arguments),
    "chebyshev": solvers.chebyshev,
    "conjugate_gradient": solvers.conjugate_gradient,
    "direct": solvers.direct,
    "fedgd": solvers.fedgd,
    "fedrelax": solvers.fedrelax,
    "primal_dual": lambda problem, **arguments: primal_dual(problem, solvers.squared, **arguments),
}
TOLERANCE = 1e-12
# Solutions are as near as the residual's tolerance times the condition number of these problems, below a thousand.
NEAR = 1e-9
every_solver = pytest.mark.parametrize("solve", SQUARED.values(), ids=SQUARED)


def problem(alpha: float = 0.7, seed: int = 0) -> tuple[ft.data.FederatedData, ft.Network, LinearProblem]:
    data, network = bare_linear_clients(SIZES, seed=seed), weighted_network(N, seed)
    return data, network, solvers.linear_problem(data, network, alpha)


def singular() -> tuple[ft.data.FederatedData, ft.Network]:
    """A feature that is always zero, few rows, two components and a node without neighbours."""
    data = bare_linear_clients([1, 2, 1, 6, 3, 2, 4], features=4)
    x, y = data.rows
    x = x.clone()
    x[:, 2] = 0
    network = ft.Network([(0, 1), (1, 2), (3, 4), (4, 5)], [1.0, 2.0, 0.5, 1.0], nodes=7)
    return ft.data.FederatedData((x, y), data.counts), network


@every_solver
@pytest.mark.parametrize("alpha", [0.05, 0.7, 10.0])
def test_every_solver_reaches_the_dense_solution(solve: Callable[..., Solution], alpha: float) -> None:
    data, network, one = problem(alpha)
    found = solve(one, tolerance=TOLERANCE)
    assert found.converged
    assert found.optimality <= TOLERANCE
    assert distance(found.parameters, dense_solution(data, network, alpha)) < NEAR


@every_solver
def test_singular_problems_have_the_solution_of_least_norm(solve: Callable[..., Solution]) -> None:
    data, network = singular()
    q, b = dense_system(data, network, 0.5)
    assert int(torch.linalg.matrix_rank(q, hermitian=True)) < len(q)
    found = solve(solvers.linear_problem(data, network, 0.5), tolerance=TOLERANCE)
    assert found.converged
    assert distance(found.parameters, dense_solution(data, network, 0.5)) < NEAR
    assert distance(q @ found.parameters.flatten(), b) < NEAR


@every_solver
def test_without_coupling_models_are_separate(solve: Callable[..., Solution]) -> None:
    data, _, one = problem(0.0)
    expected = torch.stack([torch.linalg.lstsq(x, y).solution for x, y in data])
    assert distance(solve(one, tolerance=TOLERANCE).parameters, expected) < NEAR


def test_small_alpha_is_separate_and_large_alpha_pooled_to_first_order() -> None:
    data, network, _ = problem()
    separate = torch.stack([torch.linalg.lstsq(x, y).solution for x, y in data])
    shares = [1 / len(y) for _, y in data]  # a node's loss is a mean over its rows
    gram = sum(s * x.T @ x for s, (x, y) in zip(shares, data))
    pooled = torch.linalg.solve(gram, sum(s * x.T @ y for s, (x, y) in zip(shares, data)))

    def gap(alpha: float, limit: Tensor) -> Tensor:
        return (solvers.direct(solvers.linear_problem(data, network, alpha)).parameters - limit).norm()

    assert float(gap(1e-5, separate) / gap(1e-6, separate)) == pytest.approx(10, rel=0.01)
    assert float(gap(1e4, pooled) / gap(1e5, pooled)) == pytest.approx(10, rel=0.01)


@every_solver
def test_permuted_nodes_have_permuted_solutions(solve: Callable[..., Solution]) -> None:
    data, network, one = problem()
    order = torch.tensor([3, 5, 0, 1, 7, 4, 2, 6])  # new node k is old node order[k]
    place = order.argsort()
    moved = ft.Network(place[network.edges], network.weights, nodes=N)
    other = solvers.linear_problem(data.select(order), moved, 0.7)
    found, expected = solve(other, tolerance=TOLERANCE), solve(one, tolerance=TOLERANCE)
    assert distance(found.parameters, expected.parameters[order]) < NEAR


@pytest.mark.parametrize("name", ["chebyshev", "conjugate_gradient", "fedgd", "fedrelax"])
def test_any_start_leads_to_the_solution(name: str) -> None:
    data, network, one = problem()
    start = torch.ones(N, 3, dtype=torch.float64)
    found = SQUARED[name](one, start=start, tolerance=TOLERANCE)
    assert distance(found.parameters, dense_solution(data, network, 0.7)) < NEAR
    assert bool((start == 1).all())
    with pytest.raises(ValueError, match=r"Expected a start of shape \(8, 3\), but got \(3, 8\)"):
        SQUARED[name](one, start=start.T)


def test_gradient_descent_goes_to_the_nearest_solution() -> None:
    data, network = singular()
    start = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q, b = dense_system(data, network, 0.5)
    found = solvers.fedgd(solvers.linear_problem(data, network, 0.5), start=start, tolerance=TOLERANCE)
    inverse = torch.linalg.pinv(q, rtol=1e-12, hermitian=True)
    nearest = start.flatten() + inverse @ (b - q @ start.flatten())
    assert distance(found.parameters.flatten(), nearest) < NEAR


def test_the_product_is_that_of_the_matrix_and_half_the_gradient_of_the_objective() -> None:
    data, network, one = problem()
    q, _ = dense_system(data, network, 0.7)
    w = torch.randn(N, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert distance(one.product(w).flatten(), q @ w.flatten()) < ROUNDING
    assert distance(torch.from_numpy(one.matrix().toarray()), q) < ROUNDING
    rows = w.clone().requires_grad_()
    loss = sum((y - x @ rows[i]).square().mean() for i, (x, y) in enumerate(data))
    ends = network.edges
    loss = loss + 0.7 * (network.weights * (rows[ends[:, 0]] - rows[ends[:, 1]]).square().sum(1)).sum()
    assert one.objective(w) == pytest.approx(float(loss.detach()), rel=ROUNDING)
    (gradient,) = torch.autograd.grad(loss, rows)
    assert distance(2 * (one.product(w) - one.cross), gradient) < ROUNDING


def test_a_round_of_fedgd_is_a_gradient_step() -> None:
    _, _, one = problem()
    start = torch.ones(N, 3, dtype=torch.float64)
    found = solvers.fedgd(one, rate=0.01, rounds=1, tolerance=0, start=start)
    assert distance(found.parameters, start - 0.02 * (one.product(start) - one.cross)) < ROUNDING
    assert (found.rounds, found.sums, found.bytes) == (1, 2, 2 * len(one.network.edges) * 3 * 8)


def test_a_round_of_fedrelax_minimises_over_every_node_with_alpha_not_half_of_it() -> None:
    data, network, one = problem()
    start = torch.ones(N, 3, dtype=torch.float64)
    q, b = dense_system(data, network, 0.7)
    found = solvers.fedrelax(one, rounds=1, tolerance=0, start=start).parameters
    for i in range(N):
        own = slice(3 * i, 3 * i + 3)
        others = b[own] - q[own] @ start.flatten() + q[own, own] @ start[i]
        assert distance(found[i], torch.linalg.solve(q[own, own], others)) < ROUNDING


def test_the_safe_rate_is_safe() -> None:
    for seed in range(5):
        for alpha in (0.01, 1.0, 100.0):
            data, network, one = problem(alpha, seed)
            largest = float(torch.linalg.eigvalsh(dense_system(data, network, alpha)[0])[-1])
            assert 0.2 / largest < one.safe_rate < 1 / largest


def test_chebyshev_with_the_eigenvalue_needs_no_sums_but_checks() -> None:
    data, network, one = problem()
    q, _ = dense_system(data, network, 0.7)
    values, vectors = torch.linalg.eigh(torch.block_diag(*one.blocks))
    root = vectors @ values.rsqrt().diag() @ vectors.T
    smallest = float(torch.linalg.eigvalsh(root @ q @ root)[0])
    found = solvers.chebyshev(one, smallest=smallest, tolerance=TOLERANCE)
    assert distance(found.parameters, dense_solution(data, network, 0.7)) < NEAR
    assert found.sums <= 3 + 2 * (found.rounds // 20) + 2  # the error of what it ends with
    for wrong in (0.0, 2.0):
        with pytest.raises(ValueError, match="Expected the smallest eigenvalue between 0 and 2"):
            solvers.chebyshev(one, smallest=wrong)
    with pytest.raises(ValueError, match="Expected at least 2 Lanczos rounds"):
        solvers.chebyshev(one, lanczos_rounds=1)


def ill_conditioned(nodes: int, seed: int = 0) -> LinearProblem:
    """The issue's setting: the 3-nearest-neighbour graph of random points, 10 rows, 4 features, α = 100."""
    generator = torch.Generator().manual_seed(seed)
    network = ft.Network.k_nearest(torch.randn(nodes, 2, generator=generator, dtype=torch.float64), 3)
    return solvers.linear_problem(bare_linear_clients([10] * nodes, 4, seed), network, 100.0)


def rounds_to(solve: Callable[..., Solution], one: LinearProblem, best: Tensor, error: float = 1e-8) -> Solution:
    return solve(one, tolerance=0, rounds=1000, watch=lambda _, w: (w - best).norm() < error * best.norm())


def test_rounds_to_a_relative_error_of_1e_8() -> None:
    one = ill_conditioned(1000)
    best = solvers.direct(one).parameters
    assert rounds_to(solvers.chebyshev, one, best).rounds < 450
    assert rounds_to(solvers.conjugate_gradient, one, best).rounds < 400
    plain = solvers.fedgd(one, tolerance=0, rounds=450).parameters
    assert float((plain - best).norm() / best.norm()) > 1e-3


def test_float32_gets_as_far_as_float32_does() -> None:
    data, network, _ = problem()
    one = solvers.linear_problem(data, network, 0.7, dtype=torch.float32)
    expected = dense_solution(data, network, 0.7).float()
    for solve in SQUARED.values():
        found = solve(one, tolerance=1e-6)
        assert found.parameters.dtype == torch.float32
        assert distance(found.parameters, expected) < 1e-4  # the tolerance times the condition number


NON_SMOOTH = {"norm1": solvers.norm1, "norm2": norm2}
every_penalty = pytest.mark.parametrize("penalty", NON_SMOOTH.values(), ids=NON_SMOOTH)
every_splitting = pytest.mark.parametrize("solve", [admm, primal_dual])


def two_groups(alpha: float) -> tuple[ft.data.FederatedData, ft.Network, LinearProblem]:
    """Two triangles of nodes, alike within and different between, joined by a weak edge."""
    generator = torch.Generator().manual_seed(5)
    clients = []
    for k in range(6):
        x = torch.randn(30, 2, generator=generator, dtype=torch.float64)
        truth = torch.tensor([3.0, -1.0] if k < 3 else [-2.0, 2.0], dtype=torch.float64)
        clients.append((x, x @ truth + 0.1 * torch.randn(30, generator=generator, dtype=torch.float64)))
    data = ft.data.from_tensors(clients)
    edges = [(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (2, 3)]
    network = ft.Network(edges, [1.0] * 6 + [0.1])  # edges are kept in lexicographic order
    return data, network, solvers.linear_problem(data, network, alpha)


@every_splitting
@every_penalty
def test_a_strong_coupling_merges_all_into_the_pooled_model(solve: Any, penalty: Any) -> None:
    """KKT: all differences are zero, and flows y within the strength balance the gradients."""
    _, network, one = two_groups(1e3)
    found: Solution = solve(one, penalty, tolerance=1e-10)
    assert found.converged
    pooled = torch.linalg.solve(one.gram.sum(0), one.cross.sum(0))
    assert distance(found.parameters, pooled.expand(6, 2)) < 1e-7
    assert int(found.clusters.max()) == 0
    assert torch.equal(found.parameters, found.parameters[:1].expand(6, 2))  # exact ties
    gradient = 2 * (torch.bmm(one.gram, found.parameters[..., None])[..., 0] - one.cross)
    incidence = torch.zeros(7, 6, dtype=torch.float64)
    for e, (i, j) in enumerate(network.edges.tolist()):
        incidence[e, i], incidence[e, j] = 1, -1
    flow = torch.linalg.lstsq(incidence.T, -gradient, driver="gelsd").solution
    assert distance(incidence.T @ flow, -gradient) < 1e-7
    bound = 1e3 * network.weights
    assert bool((flow.norm(dim=1) < bound).all())


@every_splitting
@every_penalty
def test_a_weak_coupling_leaves_all_separate(solve: Any, penalty: Any) -> None:
    """KKT: every difference has its subgradient, so the gradients are known: solve for the parameters and compare."""
    _, network, one = two_groups(1e-3)
    found: Solution = solve(one, penalty, tolerance=1e-11)
    assert found.clusters is None or len(found.clusters.unique()) == 6
    ends = network.edges
    s = found.parameters[ends[:, 0]] - found.parameters[ends[:, 1]]
    assert bool((s != 0).all())
    slope = s.sign() if penalty is solvers.norm1 else s / s.norm(dim=1, keepdim=True)
    y = 1e-3 * network.weights[:, None] * slope
    pull = torch.zeros_like(one.cross).index_add_(0, ends[:, 0], y).index_add_(0, ends[:, 1], -y)
    expected = torch.linalg.solve(2 * one.gram, 2 * one.cross - pull)
    assert distance(found.parameters, expected) < 1e-8


@every_splitting
@every_penalty
def test_clusters_are_read_off_exact_ties(solve: Any, penalty: Any) -> None:
    found: Solution = solve(two_groups(1.0)[2], penalty, tolerance=1e-10)
    assert found.converged
    assert found.clusters.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(found.parameters[:3], found.parameters[:1].expand(3, 2))
    assert torch.equal(found.parameters[3:], found.parameters[3:4].expand(3, 2))


@every_penalty
def test_both_splittings_minimise_the_same_objective(penalty: Any) -> None:
    _, _, one = problem(0.1)
    first, second = (f(one, penalty, tolerance=1e-11) for f in (admm, primal_dual))
    assert distance(first.parameters, second.parameters) < 1e-7
    least = one.objective(first.parameters, penalty)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        near = first.parameters + 1e-3 * torch.randn(N, 3, generator=generator, dtype=torch.float64)
        assert one.objective(near, penalty) > least


def test_the_proximal_operators_minimise() -> None:
    generator = torch.Generator().manual_seed(4)
    v, t = torch.randn(200, 3, generator=generator, dtype=torch.float64), torch.rand(200, generator=generator).double()
    for penalty in (solvers.squared, solvers.norm1, norm2):

        def cost(s: Tensor, penalty: Any = penalty) -> Tensor:
            return t * penalty.value(s) + (s - v).square().sum(1) / 2

        best = penalty.prox(v, t)
        for _ in range(20):
            step = 0.1 * torch.randn(200, 3, generator=generator, dtype=torch.float64)
            assert bool((cost(best + step) > cost(best)).all())
    assert bool((equal.prox(v, t) == 0).all())
    assert equal.value(torch.tensor([[0.0, 0.0], [0.0, 1.0]])).tolist() == [0.0, torch.inf]


def test_consensus_admm_is_pooled_and_proximal_averaging_is_biased_by_its_rate() -> None:
    _, _, one = problem()
    pooled = torch.linalg.solve(one.gram.sum(0), one.cross.sum(0))
    found = admm(one, equal, tolerance=1e-11)
    assert distance(found.parameters, pooled.expand(N, 3)) < 1e-8

    def bias(rate: float) -> float:
        averaged = proximal_averaging(one, rate=rate, rounds=100_000)
        assert averaged.converged
        return float((averaged.parameters[0] - pooled).norm() / pooled.norm())

    assert bias(1.0) > 1e-2
    assert bias(1e-2) / bias(1e-3) == pytest.approx(10, rel=0.1)  # O(η)
    eta, eye = 1.0, torch.eye(3, dtype=torch.float64)
    inverse = torch.linalg.inv(one.gram + eye / eta)
    fixed = torch.linalg.solve(
        eye - (inverse / eta).mean(0), (inverse @ one.cross[..., None]).mean(0)
    )  # w = mean of the minimisers around w
    assert distance(proximal_averaging(one).parameters[0], fixed[:, 0]) < 1e-9


def test_nodes_without_rows_follow_their_neighbours_when_asked_to() -> None:
    x, y = bare_linear_clients([4, 3, 5]).rows
    data = ft.data.FederatedData((x, y), torch.tensor([4, 0, 3, 5]), allow_empty=True)
    network = weighted_network(4)
    with pytest.raises(ValueError, match="Expected every node to have rows, but node '1' has none; pass unlabelled="):
        solvers.linear_problem(data, network, 0.5)
    one = solvers.linear_problem(data, network, 0.5, unlabelled=True)
    for solve in SQUARED.values():
        found = solve(one, tolerance=TOLERANCE).parameters
        assert distance(found, dense_solution(data, network, 0.5)) < NEAR
        mean = network.adjacency()[1].to_dense() @ found / network.degrees[1]
        assert distance(found[1], mean) < NEAR


def test_what_does_not_fit_is_refused() -> None:
    data, network, one = problem()
    with pytest.raises(ValueError, match="Expected a network of as many nodes as there are clients, 8, but got 5"):
        solvers.linear_problem(data, weighted_network(5), 1.0)
    with pytest.raises(ValueError, match="Expected alpha of at least 0 and finite, but got -1"):
        solvers.linear_problem(data, network, -1.0)
    with pytest.raises(ValueError, match=r"Expected rows \(x, y\) of shapes \(d,\) and \(\)"):
        solvers.linear_problem(ft.data.from_tensors([(torch.ones(2, 3), torch.ones(2, 2))] * N), network, 1.0)
    with pytest.raises(ValueError, match="Expected statistics of shapes"):
        LinearProblem(network, 1.0, one.statistics._replace(cross=one.cross[:, :2]))
    for solve, setting in (
        (solvers.fedgd, "rate"),
        (admm, "rho"),
        (primal_dual, "theta"),
        (proximal_averaging, "rate"),
    ):
        with pytest.raises(ValueError, match=f"Expected a positive {setting}, but got 0.0"):
            solve(one, **{setting: 0.0})
    with pytest.raises(ValueError, match="Expected a tolerance of at least 0"):
        solvers.fedgd(one, tolerance=-1.0)
    with pytest.raises(ValueError, match="Expected at least one round, but got 0"):
        solvers.fedgd(one, rounds=0)


def test_costs_are_counted() -> None:
    _, network, one = problem()
    per_round = 2 * len(network.edges) * 3 * 8
    for name in ("chebyshev", "conjugate_gradient", "fedgd", "fedrelax", "admm", "primal_dual"):
        seen: list[int] = []
        found = SQUARED[name](one, watch=lambda k, w, seen=seen: seen.append(k))
        assert seen == list(range(1, found.rounds + 1))
        assert found.bytes == found.rounds * per_round
        assert found.scope == ("reference" if name == "conjugate_gradient" else "local")
    assert solvers.direct(one).scope == proximal_averaging(one).scope == "reference"
    stopped = solvers.fedgd(one, rounds=7)
    assert (stopped.rounds, stopped.converged, stopped.reason) == (7, False, "rounds")
    assert stopped.optimality == one.optimality(stopped.parameters)


UNITS = torch.tensor([1e6, 1e-6, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("name", ["chebyshev", "conjugate_gradient", "direct", "fedrelax"])
def test_units_of_features_do_not_matter_without_coupling(name: str) -> None:
    data = bare_linear_clients(SIZES)
    scaled = data.map(lambda batch: (batch[0] * UNITS, batch[1]))
    network = weighted_network(N)
    found = SQUARED[name](solvers.linear_problem(scaled, network, 0.0), tolerance=TOLERANCE)
    assert found.converged
    expected = torch.stack([torch.linalg.lstsq(x, y).solution for x, y in data])
    assert distance(found.parameters * UNITS, expected) < NEAR


def large_and_small(alpha: float) -> tuple[LinearProblem, Tensor, Tensor]:
    """(problem, its solution, units) of rows [1e8, 0], [0, 1], [1e8, 1] at four nodes, solved in those units."""
    units = torch.tensor([1e8, 1.0], dtype=torch.float64)
    x = torch.tensor([[1.0, 0], [0, 1], [1, 1]], dtype=torch.float64)
    y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 2
    data, network = ft.data.from_tensors([(x * units, each) for each in y]), ft.Network.ring(4)
    q, b = dense_system(data, network, alpha)
    size = units.repeat(4)
    solution = torch.linalg.solve(q / size / size[:, None], b / size).reshape(4, 2)
    return solvers.linear_problem(data, network, alpha), solution, units


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 0.5])
@pytest.mark.parametrize("name", ["chebyshev", "conjugate_gradient", "direct", "fedrelax"])
def test_features_a_hundred_million_times_as_large(name: str, alpha: float) -> None:
    one, expected, units = large_and_small(alpha)
    found = SQUARED[name](one)
    assert found.converged
    assert found.reason == "converged"
    assert distance(found.parameters * units, expected) < 1e-8


@every_solver
@pytest.mark.parametrize("alpha", [0.5, 1e6])
def test_solvers_report_their_stop_without_nan(solve: Callable[..., Solution], alpha: float) -> None:
    one, expected, units = large_and_small(alpha)
    settings = {} if solve is solvers.direct else {"rounds": 2000}
    found = solve(one, **settings)
    assert bool(found.parameters.isfinite().all())
    assert found.optimality == one.optimality(found.parameters)
    wrong = distance(found.parameters * units, expected) if alpha < 1 else 0.0
    assert found.converged == (found.reason == "converged")
    assert wrong < 1e-6 if found.converged else found.reason == "rounds"


@every_solver
def test_a_clock_beside_an_indicator(solve: Callable[..., Solution]) -> None:
    one = solvers.linear_problem(clock_clients([20] * 5), ft.Network.ring(5), 0.1)
    settings = {"rounds": 2000} if solve is solvers.fedgd else {}
    found = solve(one, **settings)
    assert found.converged == (solve is not solvers.fedgd)  # its steps are in the units of the features
    if found.converged:
        expected = torch.tensor([1e-9, 3.0], dtype=torch.float64).expand(5, 2)
        assert torch.allclose(found.parameters, expected, rtol=1e-7, atol=0)


def test_dependent_features_are_warned_of_and_zeros_stay_zero() -> None:
    data = clock_clients([20] * 3).map(
        lambda batch: (batch[0][:, [0, 1, 0, 0]] * torch.tensor([1, 1, 1e3, 0]), batch[1])
    )
    one = solvers.linear_problem(data, ft.Network.ring(3), 0.0)
    with pytest.warns(UserWarning, match="Expected columns of rank 3, but got rank 2 in data set 0 of 3"):
        found = solvers.direct(one)
    share = 1e-9 / (1 + 1000**2)
    expected = torch.tensor([share, 3.0, 1000 * share, 0.0], dtype=torch.float64).expand(3, 4)
    assert torch.allclose(found.parameters, expected, rtol=1e-7, atol=1e-20)


def test_direct_solution_is_exact_to_rounding() -> None:
    data, network, _ = problem()
    for alpha in (1e-6, 1.0, 1e6):
        for dtype in (torch.float64, torch.float32):
            found = solvers.direct(solvers.linear_problem(data, network, alpha, dtype=dtype))
            assert found.converged
            assert found.optimality < 8 * torch.finfo(dtype).eps


def test_a_rate_that_is_too_large_ends_with_the_best_parameters() -> None:
    _, _, one = problem()
    wild = solvers.fedgd(one, rate=1e3)
    assert (wild.reason, wild.converged) == ("breakdown", False)
    assert bool(wild.parameters.isfinite().all())
    seen: dict[int, float] = {}
    found = solvers.fedgd(one, rate=10.0, watch=lambda k, w: seen.update({k: one.optimality(w)}), rounds=60)
    assert found.optimality <= seen[60]


def test_all_rounds_of_conjugate_gradients_end_where_nothing_is_left() -> None:
    _, _, one = problem()
    found = solvers.conjugate_gradient(one, tolerance=0)
    assert found.converged  # exact to rounding, though it was asked for more
    assert found.rounds < 10_000
    still = solvers.conjugate_gradient(LinearProblem(one.network, 0.7, one.statistics._replace(cross=0 * one.cross)))
    assert (float(still.parameters.abs().max()), still.reason, still.rounds) == (0.0, "converged", 0)
