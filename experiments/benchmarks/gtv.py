"""Federated learning networks: a round's speed, time and memory against edges, and rounds to the solution.

Ratios are medians over repetitions in which all ways run one after the other in the same process. `--full` goes up to
10⁶ nodes and 10⁷ directed edges in the table and 10⁸ in the plot, which takes some minutes and 15 GB.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure
from fedtorch.models.linear import SufficientStatistics
from fedtorch.networks import solvers
from fedtorch.networks.solvers.admm import admm
from fedtorch.networks.solvers.fedgd import gradient_step
from fedtorch.networks.solvers.primal_dual import primal_dual

FEATURES = 8
NEIGHBOURS = 10
RATE = 1e-3


def random_network(nodes: int) -> ft.Network:
    """A random graph with ten neighbours per node on average: 10n directed edges."""
    pairs = nodes * NEIGHBOURS // 2
    ends = ft.random.randint(ft.random.key(0), nodes, (pairs, 2))
    ends = ends[ends[:, 0] != ends[:, 1]]
    return ft.Network(ends, nodes=nodes)


def random_problem(nodes: int) -> solvers.LinearProblem:
    """Gram matrices of eight features in float32."""
    key = ft.random.key(1)
    x = ft.random.normal(key, (nodes, FEATURES, FEATURES)).div_(FEATURES**0.5)
    gram = torch.bmm(x.mT, x)
    cross = ft.random.normal(ft.random.fold_in(key, 1), (nodes, FEATURES))
    ones = torch.ones(nodes)
    return solvers.LinearProblem(random_network(nodes), 0.5, SufficientStatistics(gram, cross, ones, ones))


def gather_and_scatter(problem: solvers.LinearProblem) -> Callable[[Tensor], Tensor]:
    """A FedGD round as graph libraries pass messages: one per directed edge, added up by `index_add` at its end."""
    low, high = problem.network.edges.unbind(1)
    sender, receiver = torch.cat((low, high)), torch.cat((high, low))
    weight = problem.network.weights.float().repeat(2)[:, None]

    def step(w: Tensor) -> Tensor:
        messages = weight * (w[sender] - w[receiver])
        coupling = torch.zeros_like(w).index_add_(0, receiver, messages)
        gradient = torch.bmm(problem.gram, w[:, :, None])[:, :, 0] - problem.cross - problem.alpha * coupling
        return w - 2 * RATE * gradient

    return step


class Timed(NamedTuple):
    """Medians over interleaved repetitions."""

    seconds: dict[str, float]
    ratios: dict[str, float]  # to the sparse product


def round_times(nodes: int, repeat: int) -> Timed:
    """A FedGD round beside a sparse product, message passing, SciPy and a copy of the same memory."""
    problem = random_problem(nodes)
    w = torch.randn(nodes, FEATURES, generator=torch.Generator().manual_seed(0))
    out, step, passing = torch.empty_like(w), gradient_step(problem, RATE), gather_and_scatter(problem)
    assert torch.allclose(step(w, out), passing(w), atol=1e-4)
    matrix, scipy_matrix = problem.adjacency, problem.network.scipy_adjacency.astype("float32")
    edges, array = 2 * len(problem.network.edges), w.numpy()
    touched = 4 * (nodes * FEATURES * (FEATURES + 4) + edges * (2 + FEATURES))  # Gram, vectors, edges, gathered rows
    source = torch.empty(touched // 8, dtype=torch.float32)  # read and written once each
    target = torch.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "sparse product (torch CSR)": lambda: matrix @ w,
        "FedGD round": lambda: step(w, out),
        "FedGD round, gather and scatter": lambda: passing(w),
        "sparse product (SciPy)": lambda: scipy_matrix @ array,
        "copy of the memory a round touches": lambda: target.copy_(source),
    }
    found = measure.interleaved(ways, repeat)
    first = found["sparse product (torch CSR)"]
    return Timed(measure.medians(found), {name: measure.ratio(times, first) for name, times in found.items()})


def one_size(nodes: int) -> list[common.Row]:
    """A round's seconds and the megabytes beyond the imports on a graph; in a process of its own."""
    before = common.peak_megabytes()
    problem = random_problem(nodes)
    w, step = torch.zeros_like(problem.cross), gradient_step(problem, RATE)
    out = torch.empty_like(w)
    seconds = statistics.median(common.seconds(lambda: step(w, out)) for _ in range(5))
    setting = f"{2 * len(problem.network.edges)} directed edges"
    return [
        common.Row(setting, "s a FedGD round", seconds),
        common.Row(setting, "MB", common.peak_megabytes() - before),
    ]


def against_edges(sizes: Sequence[int]) -> tuple[list[common.Row], list[tuple[int, float, float]]]:
    """`one_size` for several graphs: its rows, and (directed edges, seconds, megabytes) of each."""
    each = [measure.in_own_process("experiments.benchmarks.gtv", "--one-size", str(nodes)) for nodes in sizes]
    growth = [(int(time.setting.split()[0]), time.ours, memory.ours) for time, memory in each]
    return [row for rows in each for row in rows], growth


def notebook(clients: Sequence[tuple[Tensor, Tensor]], network: ft.Network, alpha: float, rounds: int) -> list[Tensor]:
    """The assignment's FedGD as one writes it first: a loop over nodes, in it one over neighbours."""
    adjacency = network.adjacency().to_dense()
    w = [torch.zeros(x.shape[1], dtype=x.dtype) for x, _ in clients]
    for _ in range(rounds):
        new = []
        for i, (x, y) in enumerate(clients):
            step = 2 / len(y) * x.T @ (y - x @ w[i])
            for j in range(len(clients)):
                if adjacency[i, j] > 0:
                    step = step + 2 * alpha * adjacency[i, j] * (w[j] - w[i])
            new.append(w[i] + 0.1 * step)
        w = new
    return w


def stations(count: int) -> tuple[list[tuple[Tensor, Tensor]], ft.Network]:
    """Clients of the size of the weather assignment's: 207 stations, 76 rows, 7 features, 3 nearest neighbours."""
    key = ft.random.key(2)
    x = ft.random.normal(key, (count, 76, 7), torch.float64) / 3
    y = x.sum(-1) + ft.random.normal(ft.random.fold_in(key, 1), (count, 76), torch.float64)
    points = ft.random.uniform(ft.random.fold_in(key, 2), (count, 2), torch.float64)
    return list(zip(x, y)), ft.Network.k_nearest(points, 3)


def against_notebook(count: int, rounds: int, repeat: int) -> tuple[float, float]:
    """(seconds of the loop, times faster) of FedGD, data to parameters."""
    clients, network = stations(count)
    data = ft.data.from_tensors(clients)

    def ours() -> solvers.Solution:
        return solvers.fedgd(solvers.linear_problem(data, network, 0.5), rate=0.1, rounds=rounds, tolerance=0)

    assert torch.allclose(ours().parameters, torch.stack(notebook(clients, network, 0.5, rounds)))
    ways = {"loop": lambda: notebook(clients, network, 0.5, rounds), "ours": ours}
    times = measure.interleaved(ways, repeat, warm=0)  # both have just run
    return statistics.median(times["loop"]), measure.ratio(times["loop"], times["ours"])


def rounds_to(nodes: int, error: float, limit: int, seed: int) -> dict[str, tuple[int, int, str]]:
    """(rounds, sums, scope) until the relative error of the stacked parameters; the limit if it is not reached."""
    key = ft.random.key(seed)
    points = ft.random.normal(key, (nodes, 2), torch.float64)
    x = ft.random.normal(ft.random.fold_in(key, 1), (nodes * 10, 4), torch.float64)
    truth = ft.random.normal(ft.random.fold_in(key, 2), (nodes, 4), torch.float64).repeat_interleave(10, 0)
    y = (x * truth).sum(1) + 0.3 * ft.random.normal(ft.random.fold_in(key, 3), (nodes * 10,), torch.float64)
    data = ft.data.FederatedData((x, y), torch.full((nodes,), 10))
    problem = solvers.linear_problem(data, ft.Network.k_nearest(points, 3), 100.0)
    best = solvers.direct(problem).parameters
    goal = error * best.norm()
    ways: dict[str, Callable[..., solvers.Solution]] = {
        "FedGD": solvers.fedgd,
        "FedRelax": solvers.fedrelax,
        "ADMM": admm,
        "primal-dual": lambda one, **settings: primal_dual(one, solvers.squared, **settings),
        "Chebyshev": solvers.chebyshev,
        "conjugate gradients": solvers.conjugate_gradient,
    }
    found: dict[str, tuple[int, int, str]] = {}
    for name, solve in ways.items():
        done = solve(problem, tolerance=0, rounds=limit, watch=lambda _, w: (w - best).norm() < goal)
        found[name] = (done.rounds, done.sums, done.scope)
    return found


def draw(found: Sequence[tuple[int, float, float]]) -> Figure:
    """Seconds and memory against edges on logarithmic axes, with lines of slope one."""
    figure, panels = common.subplots(1, 2, figsize=(8, 3.4))
    edges = [e for e, _, _ in found]
    for axes, values, label in zip(
        panels,
        ([s for _, s, _ in found], [m for _, _, m in found]),
        ("seconds of a FedGD round", "MB beyond the imports"),
    ):
        axes.loglog(edges, values, marker="o", color="C0")
        axes.loglog(edges, [values[-1] * e / edges[-1] for e in edges], color="grey", linestyle=":", label="linear")
        axes.set_xlabel("directed edges")
        axes.set_ylabel(label)
        axes.legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables and draw the plot."""
    parser = common.arguments(__doc__)
    parser.add_argument("--full", action="store_true", help="the sizes of the targets: minutes, 15 GB")
    parser.add_argument("--one-size", type=int, metavar="NODES", help="one graph only")
    options = parser.parse_args(argv)
    if options.one_size is not None:
        common.write("benchmarks.gtv", one_size(options.one_size), options.json)
        return
    nodes, repeat = (1_000_000, 7) if options.full else (2000, 2) if options.smoke else (100_000, 5)
    sizes = [3000] if options.smoke else [1000, 10_000, 100_000]
    sizes += [1_000_000, 10_000_000] if options.full else []
    rows, lines = [], []
    timed = round_times(nodes, repeat)
    for name, seconds in timed.seconds.items():
        rows.append(common.Row(f"{nodes} nodes, {name}", "s", seconds))
        rows.append(common.Row(f"{nodes} nodes, {name}", "times the sparse product", timed.ratios[name]))
        lines.append([name, f"{1e3 * seconds:.2f}", f"{timed.ratios[name]:.2f}"])
    title = f"{nodes} nodes, {NEIGHBOURS * nodes} directed edges, d = {FEATURES}, float32 ({common.machine()})"
    common.show(title, ["", "ms", "times the sparse product (FedGD: target 1.5)"], lines)
    of_sizes, growth = against_edges(sizes)
    rows += of_sizes
    common.show(
        "Time and memory against edges, each size in a process of its own",
        ["directed edges", "ms a round", "ns an edge", "MB"],
        [[f"{e}", f"{1e3 * s:.3g}", f"{1e9 * s / e:.3g}", f"{m:.0f}"] for e, s, m in growth],
    )
    count, iterations = (20, 20) if options.smoke else (207, 1000 if options.full else 50)
    loop, faster = against_notebook(count, iterations, 1)
    setting = f"{count} stations, {iterations} iterations"
    of_loop = [
        common.Row(setting, "s, loop over nodes", loop),
        common.Row(setting, "times faster (target 50)", faster),
    ]
    rows += of_loop
    common.show_rows(f"FedGD, {setting}", of_loop, ".3g")
    points, limit = (60, 150) if options.smoke else (1000, 30_000 if options.full else 500)
    reached = rounds_to(points, 1e-8, limit, seed=0)
    metric = f"rounds to 1e-8, stopped at {limit}"
    rows += [common.Row(f"{points} nodes, {name}", metric, found[0]) for name, found in reached.items()]
    common.show(
        f"Rounds to a relative error of 1e-8, at most {limit}: {points} points, 3 neighbours, d = 4, α = 100",
        ["", "rounds", "sums over the network", "scope"],
        [[name, f"{found[0]}", f"{found[1]}", found[2]] for name, found in reached.items()],
    )
    common.finish("benchmarks.gtv", rows, options, lambda: {"gtv_edges": draw(growth)})


if __name__ == "__main__":
    main()
