"""GTV minimisation as an algorithm: the dense solution in every population, asynchronous, with losses; partial ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.algorithm_cases import CLIENTS, Case
from support.oracles.closed_forms import (
    ROUNDING,
    client_tensors,
    copy_of,
    distance,
    joined,
    linear,
    linear_clients,
    mean_squared_error,
    sgd,
)
from support.oracles.gtv_problems import bare_linear_clients, dense_solution, weighted_network
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.federation.exchanges.exchange import Sent
from fedtorch.networks import solvers
from fedtorch.random.named import numbers

SIZES = [7, 4, 9, 5, 12, 6, 8, 5]
N = len(SIZES)
ALPHA = 0.1
NEAR = 1e-10  # many rounds of a contraction, until rounding stops it
NETWORK = weighted_network(N)
BARE = bare_linear_clients(SIZES)


def bare(seed: int = 0) -> nn.Linear:
    return linear(bias=False, seed=seed)


def relax(alpha: Any = ALPHA, network: ft.Network = NETWORK) -> ft.Algorithm:
    return ft.gtv(ft.least_squares(bare()), network, alpha)


def models(round: ft.Round, algorithm: ft.Algorithm, clients: int = N) -> Tensor:
    """Every node's weights, `(n, d)`."""
    outbox = algorithm.outbox(round.server)
    return torch.stack([client_tensors(round.clients, outbox, k)["weight"][0] for k in range(clients)])


@pytest.mark.parametrize("cohort", [None, 3])
def test_relaxation_reaches_the_dense_solution(cohort: int | None) -> None:
    algorithm, rounds = relax(), 40 if cohort is None else 130
    start = {"weight": torch.full((1, 3), 2.0, dtype=torch.float64)}
    found = ft.run(algorithm, ft.InProcess(BARE), start, cohort=cohort, rounds=rounds).last
    assert distance(models(found, algorithm), dense_solution(BARE, NETWORK, ALPHA)) < NEAR


@pytest.mark.parametrize("start", [0.0, 1.5])
def test_one_gradient_step_is_fedgd(start: float) -> None:
    rate, begin = 0.05, {"weight": torch.full((1, 3), start, dtype=torch.float64)}
    algorithm = ft.gtv(sgd(rate, bare()), NETWORK, ALPHA)
    rounds = ft.Run(algorithm, ft.InProcess(BARE), begin).rounds(6)
    problem = solvers.linear_problem(BARE, NETWORK, ALPHA)
    for done in rounds:
        own = solvers.fedgd(problem, rate=rate, rounds=done.number, tolerance=0, start=begin["weight"].expand(N, 3))
        assert distance(models(done, algorithm), own.parameters) < ROUNDING


def test_one_exact_solution_is_fedrelax() -> None:
    algorithm, problem = relax(), solvers.linear_problem(BARE, NETWORK, ALPHA)
    begin = {"weight": torch.full((1, 3), 1.5, dtype=torch.float64)}
    for done in ft.Run(algorithm, ft.InProcess(BARE), begin).rounds(4):
        own = solvers.fedrelax(problem, rounds=done.number, tolerance=0, start=begin["weight"].expand(N, 3))
        assert distance(models(done, algorithm), own.parameters) < ROUNDING


def test_minibatches_are_fedsgd() -> None:
    """Stochastic steps stay around the solution, closer with a smaller rate."""
    data, network = BARE.select([0, 1, 2, 3]), weighted_network(4)
    best = dense_solution(data, network, ALPHA)

    def error(rate: float) -> float:
        algorithm = ft.gtv(sgd(rate, bare(), batch_size=2), network, ALPHA)
        rounds = ft.Run(algorithm, ft.InProcess(data), seed=1).rounds(180)
        tail = [models(done, algorithm, 4) for done in rounds][-80:]
        return float(torch.stack([(w - best).square().mean() for w in tail]).mean())

    few, many = error(0.03), error(0.12)
    assert NEAR < few < many / 2


def test_several_local_steps_have_the_same_fixed_point() -> None:
    """A node's own problem, the coupling in it, is stationary at the solution however many steps it takes."""
    algorithm = ft.gtv(sgd(0.1, bare(), steps=4), NETWORK, ALPHA)
    found = ft.run(algorithm, ft.InProcess(BARE), rounds=100).last
    assert distance(models(found, algorithm), dense_solution(BARE, NETWORK, ALPHA)) < NEAR


def test_a_network_keeps_its_sums_whoever_answers() -> None:
    algorithm, lost = relax(), ft.lost_messages(before=0.2, after=0.3)
    for done in ft.Run(algorithm, ft.InProcess(BARE), cohort=5, faults=lost).rounds(12):
        told = done.clients.table.read(slice(0, N)).parameters["weight"]
        assert distance(done.server.total["weight"][:, 0], NETWORK.adjacency().to_dense() @ told[:, 0]) < ROUNDING


@pytest.mark.parametrize("faults", [ft.dropouts(0.4), ft.lost_messages(after=0.4)], ids=["failures", "lost"])
def test_it_converges_though_nodes_fail(faults: ft.Faults) -> None:
    algorithm = relax()
    found = ft.run(algorithm, ft.InProcess(BARE), cohort=6, faults=faults, rounds=90).last
    assert distance(models(found, algorithm), dense_solution(BARE, NETWORK, ALPHA)) < NEAR


def test_a_node_that_never_answers_counts_with_its_start() -> None:
    """The others minimise as if its parameters were fixed."""
    start = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
    algorithm, silent = relax(), ft.Faults(before=lambda keys, ids: ids == 2)
    found = models(ft.run(algorithm, ft.InProcess(BARE), {"weight": start}, faults=silent, rounds=60).last, algorithm)
    assert torch.equal(found[2], start[0])
    problem = solvers.linear_problem(BARE, NETWORK, ALPHA)
    gradient = problem.product(found) - problem.cross
    gradient[2] = 0
    assert distance(gradient, torch.zeros_like(gradient)) < NEAR


def test_the_order_of_the_nodes_does_not_matter() -> None:
    order = torch.tensor([3, 5, 0, 1, 7, 4, 2, 6])
    moved = ft.Network(order.argsort()[NETWORK.edges], NETWORK.weights, nodes=N)
    one, two = relax(), relax(network=moved)
    first = models(ft.run(one, ft.InProcess(BARE), rounds=5).last, one)
    second = models(ft.run(two, ft.InProcess(BARE.select(order)), rounds=5).last, two)
    assert distance(second, first[order]) < ROUNDING


def test_no_coupling_is_separate_training_and_strong_coupling_one_model() -> None:
    local = sgd(0.05, bare(), steps=3)
    alone, loose = ft.separate(local), ft.gtv(local, NETWORK, 0.0)
    expected = models(ft.run(alone, ft.InProcess(BARE), rounds=4).last, alone)
    assert distance(models(ft.run(loose, ft.InProcess(BARE), rounds=4).last, loose), expected) < ROUNDING
    tight = relax(3.0)
    found = models(ft.run(tight, ft.InProcess(BARE), rounds=250).last, tight)
    assert distance(found, dense_solution(BARE, NETWORK, 3.0)) < 1e-6  # it contracts by 6 % a round


def test_parts_of_the_parameters_have_strengths_of_their_own() -> None:
    """Equation (6.5): an independent system with a strength per parameter."""
    data = linear_clients(SIZES)
    algorithm = ft.gtv(ft.least_squares(linear()), NETWORK, {"weight": 0.4, "*": 0.2})
    found = ft.run(algorithm, ft.InProcess(data), rounds=200).last
    strengths = torch.tensor([0.6, 0.6, 0.6, 0.2], dtype=torch.float64)  # patterns add up
    designs = [(torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1), y) for x, y in data]
    blocks = torch.block_diag(*[x.T @ x / len(x) for x, _ in designs])
    right = torch.cat([x.T @ y / len(x) for x, y in designs])
    matrix = blocks + torch.kron(NETWORK.laplacian().to_dense(), strengths.diag())
    expected = torch.linalg.solve(matrix, right).reshape(N, 4)
    outbox = algorithm.outbox(found.server)
    got = torch.stack([joined(client_tensors(found.clients, outbox, k))[:, 0] for k in range(N)])
    assert distance(got, expected) < NEAR


class Deep(nn.Module):
    """A body that is shared in part, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = linear(3, 4, seed=1), linear(4, 1, seed=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def test_deep_networks_couple_in_part_and_personal_parts_are_never_sent() -> None:
    """At rest the objective, written out over all nodes, has no gradient."""
    data, strengths = linear_clients(SIZES), {"body.*": 0.5, "head.bias": 0.1}
    algorithm = ft.gtv(sgd(0.1, Deep(), steps=1), NETWORK, strengths)
    assert sorted(ft.Run(algorithm, ft.InProcess(data)).server.total) == [
        "body.bias",
        "body.weight",
        "head.bias",
    ]
    run = ft.run(algorithm, ft.InProcess(data), rounds=100)
    before = run.tensors()
    nodes = [tree.map(lambda leaf, k=k: leaf[k].clone().requires_grad_(), before) for k in range(N)]
    module = Deep()
    total = sum(
        mean_squared_error(torch.func.functional_call(module, own, (x,)), y) for own, (x, y) in zip(nodes, data)
    )
    for (i, j), weight in zip(NETWORK.edges.tolist(), NETWORK.weights.tolist()):
        for name in nodes[0]:
            alpha = 0.5 if name.startswith("body") else 0.1 if name == "head.bias" else 0.0
            total = total + alpha * weight * (nodes[i][name] - nodes[j][name]).square().sum()
    gradients = torch.autograd.grad(total, [leaf for own in nodes for leaf in own.values()])
    names = list(nodes[0]) * N
    run.step()
    after = run.tensors()
    for place, (name, gradient) in enumerate(zip(names, gradients)):
        k = place // len(nodes[0])
        expected = nodes[k][name].detach() - 0.1 * gradient
        assert distance(after[name][k], expected) < ROUNDING


def test_traffic_is_counted_over_edges() -> None:
    algorithm = ft.gtv(ft.least_squares(linear()), NETWORK, {"weight": 1.0})
    message = ft.wire.size(Sent(None, ft.Sum({"weight": torch.zeros(1, 3, dtype=torch.float64)})))
    done = ft.Run(algorithm, ft.InProcess(linear_clients(SIZES))).step()
    assert (done.bytes_up, done.bytes_down) == (2 * len(NETWORK.edges) * message, 0)
    done = ft.Run(algorithm, ft.InProcess(linear_clients(SIZES)), cohort=lambda key, round: torch.tensor([1, 4])).step()
    assert done.bytes_up == int(NETWORK.neighbour_counts[[1, 4]].sum()) * message


@pytest.mark.parametrize(
    ("loss", "delay", "cohort"), [(0.5, 0, 5), pytest.param(0.0, 2, None, marks=pytest.mark.slow), (0.2, 2, 6)]
)
def test_messages_lost_and_late_on_single_edges_do_no_harm(loss: float, delay: int, cohort: int | None) -> None:
    algorithm = relax(0.1) | ft.unreliable_edges(NETWORK, loss=loss, delay=delay)
    start = {"weight": torch.full((1, 3), 1.0, dtype=torch.float64)}
    for done in ft.Run(algorithm, ft.InProcess(BARE, 3), start, cohort=cohort, seed=4).rounds(120):  # noqa: B007
        pass
    assert distance(models(done, algorithm), dense_solution(BARE, NETWORK, 0.1)) < NEAR


def test_a_sum_is_always_that_of_the_last_values_heard() -> None:
    algorithm = relax() | ft.unreliable_edges(NETWORK, loss=0.4, delay=2)
    low, high = NETWORK.edges.unbind(1)
    receiver, weight = torch.cat((high, low)), NETWORK.weights.repeat(2)
    numbers = torch.zeros(2 * len(NETWORK.edges), dtype=torch.int64)
    out_of_step = False
    for done in ft.Run(algorithm, ft.InProcess(BARE), cohort=5).rounds(25):
        edges = done.server
        heard = torch.zeros(N, 3, dtype=torch.float64)
        heard.index_add_(0, receiver, weight[:, None] * edges.last["weight"][:, 0])
        assert distance(edges.algorithm.total["weight"][:, 0], heard) < ROUNDING
        assert bool((edges.sequence >= numbers).all())
        numbers = edges.sequence
        sent = done.clients.table.read(slice(0, N)).parameters["weight"][:, 0]
        out_of_step |= distance(heard, NETWORK.adjacency().to_dense() @ sent) > 1e-3
    assert out_of_step  # messages were really lost and late


def test_lossy_edges_are_a_plain_simulation_of_letters() -> None:
    """Nodes with a box for each neighbour, letters that fly, and who is active: all else is the test's own loop."""
    loss, delay, n, at = 0.3, 2, torch.tensor(SIZES), NETWORK.adjacency().to_dense()
    algorithm = relax() | ft.unreliable_edges(NETWORK, loss=loss, delay=delay)
    start = torch.full((3,), 1.0, dtype=torch.float64)
    w, written = start.repeat(N, 1), [0] * N
    box = {(i, j): (0, start) for i in range(N) for j in at[i].nonzero()[:, 0].tolist()}
    names, flying, late, lost = numbers(NETWORK.names), [], 0, 0
    run = ft.Run(algorithm, ft.InProcess(BARE), {"weight": start[None]}, cohort=5, seed=6)
    for done in run.rounds(20):
        key, before = done.server.keys[(done.number - 1) % (delay + 1)], dict(box)
        for i in done.ids.tolist():
            x, y = BARE[i]
            near = [j for k, j in box if k == i]
            pull = sum(at[i, j] * before[i, j][1] for j in near)
            own = x.T @ x / n[i] + ALPHA * at[i].sum() * torch.eye(3).double()
            w[i], written[i] = torch.linalg.solve(own, x.T @ y.flatten() / n[i] + ALPHA * pull), written[i] + 1
            for j in near:
                drawn = [random.fold_in(random.fold_in(random.fold_in(key, p), names[i]), names[j]) for p in (0, 1)]
                gone, waits = bool(random.bernoulli(drawn[0], loss)), int(random.randint(drawn[1], delay + 1))
                late, lost = late + (waits > 0), lost + gone
                flying += [] if gone else [(done.number + waits, written[i], i, j, w[i].clone())]
        for _, number, i, j, value in (letter for letter in flying if letter[0] == done.number):
            if number > box[j, i][0]:
                box[j, i] = number, value
        assert distance(models(done, algorithm), w) < ROUNDING
    assert min(late, lost) > 50


def test_edges_that_lose_nothing_change_nothing() -> None:
    plain, watched = relax(), relax() | ft.unreliable_edges(NETWORK)
    rounds = [list(ft.Run(a, ft.InProcess(BARE, 3), cohort=4, seed=2).rounds(6)) for a in (plain, watched)]
    for one, two in zip(*rounds):
        assert distance(models(one, plain), models(two, watched)) < ROUNDING
    message = ft.wire.size(ft.Mean({"weight": torch.zeros(1, 3, dtype=torch.float64)}, torch.tensor(1)))
    assert rounds[1][0].bytes_up == int(NETWORK.neighbour_counts[rounds[1][0].ids].sum()) * message


def test_lossy_edges_in_blocks_and_with_messages_twice() -> None:
    algorithm = relax() | ft.unreliable_edges(NETWORK, loss=0.3, delay=1)
    runs = [
        ft.run(algorithm, ft.InProcess(BARE, chunk), cohort=5, faults=faults, rounds=8).last
        for chunk, faults in ((None, None), (1, None), (None, ft.duplicated(0.7)))
    ]
    for other in runs[1:]:
        assert distance(models(other, algorithm), models(runs[0], algorithm)) < ROUNDING


def test_losses_are_as_frequent_as_they_should_be() -> None:
    network = weighted_network(60, p=0.8)
    data = bare_linear_clients([2] * 60)
    algorithm = ft.gtv(ft.least_squares(bare()), network, 0.1) | ft.unreliable_edges(network, loss=0.25)
    done = ft.Run(algorithm, ft.InProcess(data)).step()
    heard, edges = int((done.server.sequence == 1).sum()), 2 * len(network.edges)
    assert abs(heard / edges - 0.75) < 4 * (0.25 * 0.75 / edges) ** 0.5  # four standard errors
    assert not torch.equal(done.server.sequence[: edges // 2], done.server.sequence[edges // 2 :])  # each way its own


def test_runs_of_a_graph_go_on_from_a_checkpoint() -> None:
    algorithm = relax() | ft.unreliable_edges(NETWORK, loss=0.3, delay=2)
    whole = ft.run(algorithm, ft.InProcess(BARE), cohort=5, rounds=9).last
    half = ft.run(algorithm, ft.InProcess(BARE), cohort=5, rounds=4)
    resumed = ft.Run(algorithm, ft.InProcess(BARE), cohort=5)
    resumed.load_state_dict(copy_of(half.state_dict()))
    assert len(list(resumed.rounds(9))) == 5
    assert torch.equal(models(resumed, algorithm), models(whole, algorithm))


def test_nodes_without_rows_follow_their_neighbours() -> None:
    x, y = bare_linear_clients([4, 3, 5]).rows
    data = ft.data.FederatedData((x, y), torch.tensor([4, 0, 3, 5]), allow_empty=True)
    network = weighted_network(4)
    algorithm = relax(network=network)
    found = models(ft.run(algorithm, ft.InProcess(data), rounds=100).last, algorithm, 4)
    assert distance(found, dense_solution(data, network, ALPHA)) < NEAR


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected alpha of at least 0, but got -1\.0"):
        relax(-1.0)
    with pytest.raises(ValueError, match=r"Expected a pattern that matches one of .* but got 'nothing'"):
        relax({"nothing": 1.0})
    with pytest.raises(ValueError, match="as many nodes as there are clients, 8, but got 5 nodes"):
        ft.Run(relax(network=weighted_network(5)), ft.InProcess(BARE)).step()
    with pytest.raises(ValueError, match="Expected inputs"):
        ft.Run(ft.gtv(ft.least_squares(linear(5)), NETWORK, 1.0), ft.InProcess(BARE)).step()
    norm = nn.Sequential(linear(3, 2), nn.BatchNorm1d(2, dtype=torch.float64), linear(2, 1))
    with pytest.raises(ValueError, match="Expected trainable parameters to couple, but got buffers"):
        ft.gtv(sgd(0.1, norm, buffers="average"), NETWORK, 1.0)
    with pytest.raises(ValueError, match=r"Expected a probability of loss of at least 0 and below 1, but got 1\.0"):
        ft.unreliable_edges(NETWORK, loss=1.0)
    with pytest.raises(ValueError, match="Expected a delay of at least 0 rounds, but got -1"):
        ft.unreliable_edges(NETWORK, delay=-1)
    with pytest.raises(ValueError, match="Expected an algorithm with `told`"):
        ft.fedavg(ft.least_squares(bare())) | ft.unreliable_edges(NETWORK)


def test_a_key_draws_the_active_sets() -> None:
    """Algorithm 8.1 with independent coins for every node."""
    algorithm = relax()
    active = ft.poisson_cohort(0.3, N)
    found = ft.run(algorithm, ft.InProcess(BARE), cohort=active, seed=3, rounds=150).last
    assert distance(models(found, algorithm), dense_solution(BARE, NETWORK, ALPHA)) < NEAR
    assert int(active(random.key(0), 0).numel()) <= N


CASES: dict[str, Case] = {
    "gtv": Case(
        lambda: ft.gtv(sgd(0.05, steps=2, batch_size=3), ft.Network.ring(CLIENTS), {"weight": 0.5, "bias": 0.2})
    )
}
