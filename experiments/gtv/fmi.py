"""Temperatures at 207 Finnish weather stations: the coding assignments of sections 5.8 and 7.6 by every method.

Each station is a node with a linear model of its own, coupled to its nearest neighbours (Jung, "Federated learning:
from theory to practice"). The published errors are those of a thousand rounds of FedGD, which is far from done then:
beside them stands the minimiser of the same objective, the one of least norm because the problem is singular
(`results/gtv_fmi.md`). Errors are means over stations of mean squared errors in °C². Reads the folder `fmi_weather` of
FEDTORCH_DATA_DIR, or downloads the course's file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from sklearn.model_selection import train_test_split
from torch import Tensor

import fedtorch as ft
from experiments import common
from fedtorch.networks import clustering, discrepancy, solvers

ACTIVE, DELAY = 0.5, 3  # probability to be active and longest delay of "async"
CLUSTERS, LATITUDE = 5, 65.0  # of the map; where its aspect is right, in degrees


class Settings(NamedTuple):
    """The options of a run."""

    method: str = "fedgd"
    graph: str = "coordinates"
    neighbours: int = 3
    alpha: float = 0.5
    eta: float = 0.1
    iterations: int = 1000
    seed: int = 1
    batch: int = 10  # rows of a FedSGD step

    def title(self) -> str:
        """What the tables call it."""
        if self.method == "proximal":
            return f"proximal averaging (Algorithm 5.3), one model, η = {self.eta}, {self.iterations} iterations"
        rate = f", η = {self.eta}" if self.method in ("fedgd", "fedsgd", "async") else ""
        rate += f", B = {self.batch}" if self.method == "fedsgd" else ""
        steps = "" if self.method == "exact" else f", {self.iterations} iterations"
        return f"{self.method}, {self.graph}, {self.neighbours} neighbours, α = {self.alpha}{rate}{steps}"

    @property
    def optimum(self) -> str:
        """What the tables call the minimiser beside it."""
        if self.method == "proximal":
            return f"optimum of GTV minimisation at α = {self.alpha}, which this is not meant for"
        return "optimum of the same objective"


PUBLISHED = {Settings(): {"training error": 21.065277715408104, "validation error": 21.336245897848386}}


class Split(NamedTuple):
    """Each station's rows in two parts."""

    training: ft.data.FederatedData
    validation: ft.data.FederatedData
    coordinates: Tensor  # (n, 2) latitude and longitude


class Watch:
    """Keeps the training and validation error of every iteration, from second moments: rows are not visited again."""

    def __init__(self, split: Split, network: ft.Network) -> None:
        self.moments = [solvers.linear_problem(data, network, 0.0) for data in (split.training, split.validation)]
        self.errors: tuple[list[float], list[float]] = ([], [])

    def __call__(self, rounds: int, w: Tensor) -> None:
        for problem, kept in zip(self.moments, self.errors):
            kept.append(problem.objective(w) / len(w))


class Result(NamedTuple):
    """What a run found, beside the optimum of its objective."""

    values: dict[str, float]
    optimum: dict[str, float]
    errors: tuple[list[float], list[float]]  # of every iteration
    parameters: Tensor  # (n, 7)
    network: ft.Network
    split: Split


def halves(x: Tensor, y: Tensor, **settings: float) -> list[Tensor]:
    """scikit-learn's `train_test_split`, as the assignments call it: x of both parts, then y of both."""
    return [torch.from_numpy(part) for part in train_test_split(x.numpy(), y.numpy(), **settings)]


def load(seed: int, stations: int | None = None) -> Split:
    """A fifth of a station's rows to validate, drawn as the assignment does; of the first stations, or of all."""
    training, validation = [], []
    for x, y in list(ft.data.fmi_weather(torch.float64))[:stations]:
        x_training, x_validation, y_training, y_validation = halves(x, y, test_size=0.2, random_state=seed)
        training.append((x_training, y_training))
        validation.append((x_validation, y_validation))
    places = ft.data.fmi_coordinates()[:stations]
    return Split(ft.data.from_tensors(training), ft.data.from_tensors(validation), places)


# What stands for a station in the search for its neighbours: its place, or constructions I to III of section 7.6.
GRAPHS: dict[str, Callable[[Split], Tensor]] = {
    "coordinates": lambda split: split.coordinates,
    "mean": lambda split: discrepancy.mean_label(split.training),
    "gmm": lambda split: discrepancy.gaussian_mixture(split.training),
    "gradient": lambda split: discrepancy.pooled_gradient(split.training),
}


def fedsgd(settings: Settings, network: ft.Network) -> ft.Algorithm:
    """Algorithm 5.2: every node takes a step on a minibatch of its rows."""
    local = common.linear_descent(7, steps=1, batch_size=settings.batch, lr=settings.eta)
    return ft.gtv(local, network, settings.alpha)


def asynchronous(settings: Settings, network: ft.Network) -> ft.Algorithm:
    """Algorithm 8.1: active nodes take gradient steps with what they have heard, which may be some rounds old."""
    local = ft.least_squares(common.linear_module(7), steps=1, lr=settings.eta)
    return ft.gtv(local, network, settings.alpha) | ft.unreliable_edges(network, delay=DELAY)


def proximal(settings: Settings, network: ft.Network) -> ft.Algorithm:
    """Algorithm 5.3: stations minimise L_i(v) + ‖v − w‖²/η, which is FedProx with μ = 2/η, and count alike."""
    local = ft.least_squares(common.linear_module(7))
    return ft.fedprox(local, 2 / settings.eta, weight=lambda data: torch.ones(len(data.count), dtype=torch.float64))


def rounds_of(
    algorithm: Callable[[Settings, ft.Network], ft.Algorithm], active: float | None = None
) -> Callable[[Settings, Split, ft.Network, Watch], Tensor]:
    """A method that is an algorithm in the round loop."""

    def run(settings: Settings, split: Split, network: ft.Network, watch: Watch) -> Tensor:
        cohort = None if active is None else ft.poisson_cohort(active, len(network))
        done = ft.Run(algorithm(settings, network), ft.InProcess(split.training), cohort=cohort, seed=settings.seed)
        for round in done.rounds(settings.iterations):
            watch(round.number, done.tensors()["weight"][:, 0])
        return done.tensors()["weight"][:, 0]

    return run


def solved_by(solve: Callable[..., solvers.Solution], rate: bool = False) -> Callable[..., Tensor]:
    """A method that is a solver, for as many iterations as there are, or until nothing is left to do."""

    def run(settings: Settings, split: Split, network: ft.Network, watch: Watch) -> Tensor:
        problem = solvers.linear_problem(split.training, network, settings.alpha)
        more = {"rate": settings.eta} if rate else {}
        return solve(problem, rounds=settings.iterations, tolerance=1e-12, watch=watch, **more).parameters

    return run


def exact(settings: Settings, split: Split, network: ft.Network, watch: Watch) -> Tensor:
    """The minimiser of least norm, by a sparse factorisation."""
    w = solvers.direct(solvers.linear_problem(split.training, network, settings.alpha)).parameters
    watch(1, w)
    return w


METHODS: dict[str, Callable[[Settings, Split, ft.Network, Watch], Tensor]] = {
    "exact": exact,
    "fedgd": solved_by(solvers.fedgd, rate=True),
    "fedsgd": rounds_of(fedsgd),
    "fedrelax": solved_by(solvers.fedrelax),
    "chebyshev": solved_by(solvers.chebyshev),
    "pcg": solved_by(solvers.conjugate_gradient),
    "async": rounds_of(asynchronous, ACTIVE),
    "proximal": rounds_of(proximal),
}


def mean_error(data: ft.data.FederatedData, w: Tensor) -> float:
    """The mean over stations of their mean squared errors with parameters `(n, 7)`."""
    return float(torch.stack([(y - x @ w[i]).square().mean() for i, (x, y) in enumerate(data)]).mean())


def values_of(w: Tensor, split: Split, problem: solvers.LinearProblem) -> dict[str, float]:
    """What is reported of parameters."""
    return {
        "training error": mean_error(split.training, w),
        "validation error": mean_error(split.validation, w),
        "objective": problem.objective(w),
        "gradient, relative to zero's": float((problem.cross - problem.product(w)).norm() / problem.cross.norm()),
    }


def run(settings: Settings, stations: int | None = None) -> Result:
    """One method on one network, and the optimum of its objective."""
    split = load(settings.seed, stations)
    network = ft.Network.k_nearest(GRAPHS[settings.graph](split), settings.neighbours)
    problem = solvers.linear_problem(split.training, network, settings.alpha)
    watch = Watch(split, network)
    w = METHODS[settings.method](settings, split, network, watch)
    best = solvers.direct(problem).parameters
    found, optimum = (values_of(parameters, split, problem) for parameters in (w, best))
    return Result(found, optimum, watch.errors, w, network, split)


def draw_errors(result: Result, method: str) -> Figure:
    """The errors over the iterations, and those of the optimum."""
    figure, axes = common.subplots(figsize=(6.4, 4.0))
    for i, (name, values) in enumerate(zip(("training error", "validation error"), result.errors)):
        iterations, marker = range(1, len(values) + 1), "o" if len(values) == 1 else ""
        axes.plot(iterations, values, color=f"C{i}", marker=marker, label=f"{method}, {name}")
        axes.axhline(result.optimum[name], color=f"C{i}", linestyle="--", linewidth=1, label=f"optimum, {name}")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("iteration")
    axes.set_ylabel("mean squared error (°C²)")
    axes.legend(frameon=False)
    return figure


def draw_maps(result: Result) -> dict[str, Figure]:
    """Finland with the network, by one parameter of the stations and by clusters of all of them."""
    network, places = result.network, result.split.coordinates[:, [1, 0]]
    on_map = ft.Network(network.edges, network.weights, len(network), positions=places)
    groups = clustering.k_means(result.parameters, min(CLUSTERS, len(places)), seed=0)
    figures = {
        "gtv_fmi_parameter": ft.plots.network(on_map, result.parameters[:, 0], label="weight of latitude/100 (°C)"),
        "gtv_fmi_clusters": ft.plots.network(on_map, clusters=groups),
    }
    return {name: as_map(figure) for name, figure in figures.items()}


def as_map(figure: Figure) -> Figure:
    """With degrees at the axes, and kilometres to the east as long as those to the north."""
    axes = figure.axes[0]
    figure.set_size_inches(5.0, 6.6)
    axes.set_axis_on()
    axes.set_aspect(1 / math.cos(math.radians(LATITUDE)), adjustable="box")
    axes.set_xlabel("longitude (°E)")
    axes.set_ylabel("latitude (°N)")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run one method, print it beside the optimum and what is published, and draw maps and curves."""
    warnings.filterwarnings(
        "ignore", message="Expected columns of rank"
    )  # the year of a station is constant; neighbours decide
    default = Settings()
    parser = common.arguments(__doc__)
    parser.add_argument("--method", choices=METHODS, default=default.method)
    parser.add_argument("--graph", choices=GRAPHS, default=default.graph, help="what makes stations neighbours")
    parser.add_argument(
        "--neighbours", type=int, default=default.neighbours, metavar="K", help="that a station chooses"
    )
    parser.add_argument("--alpha", type=float, default=default.alpha, help="strength of the coupling")
    parser.add_argument(
        "--eta", type=float, default=default.eta, help="learning rate of fedgd, fedsgd, async, proximal"
    )
    parser.add_argument("--batch", type=int, default=default.batch, metavar="B", help="rows of a step of fedsgd")
    parser.add_argument("--iterations", type=int, default=default.iterations, metavar="N")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the split, as published 1, and of draws")
    options = parser.parse_args(argv)
    stations = 20 if options.smoke else None
    settings = Settings(*(getattr(options, name) for name in Settings._fields))
    if options.smoke:
        settings = settings._replace(iterations=min(30, settings.iterations))
    runs = [run(settings._replace(seed=settings.seed + i), stations) for i in range(options.seeds)]
    known = PUBLISHED.get(settings, {}) if stations is None and options.seeds == 1 else {}
    rows, lines = [], []
    for title, published, tables in (
        (settings.title(), known, [result.values for result in runs]),
        (settings.optimum, {}, [result.optimum for result in runs]),
    ):
        found = common.over_seeds(title, tables, published)
        rows += found
        lines += [
            [title, row.metric, f"{row.ours:.12g}", common.number(row.sd, form=".2g"), f"{row.published or ''}"]
            for row in found
        ]
    heading = f"{len(runs[0].network)} stations, {len(runs[0].network.edges)} edges, errors in °C²"
    common.show(heading, ["", "", "ours", "sd", "published"], lines)
    draws = lambda: {**draw_maps(runs[0]), "gtv_fmi_errors": draw_errors(runs[0], settings.method)}
    common.finish("gtv.fmi", rows, options, draws)


if __name__ == "__main__":
    main()
