"""Trustworthy networks of weather stations: the assignments of sections 8.5, 10.5.1 and 10.5.2, and section 8.4.

The network of the assignments, three nearest neighbours, has three components (λ₂ = 0), and the minute is always zero
(λ̄_min = 0): bound (8.3) is infinite. So the nearest stations of different components are connected first, and the
minute is left out. All attacks are on rows, as in the assignments, and the target is the first station.

- 8.5: by how much do the parameters change when labels are perturbed by normal noise of a strength, beside (8.3), as
  printed and with the 1/m_i that is missing there; and with one label in twenty off by 100 °C, squared against
  absolute errors.
- 10.5.1: labels of the nodes nearest to the target are shifted by 30 °C, node by node, until the target's validation
  error is 20 % higher. The defence is GTV minimisation with the median of every neighbourhood, held to 20 % above its
  own error without an attack; also with ten nearest neighbours, of whom a median withstands more.
- 10.5.2, whose text breaks off before it says what the trigger and the target are. Here: the hour is 24 columns, the
  trigger is hour 3, of which the target station has lost its rows, and a fifth of the attackers' rows have it, and the
  label +30 °C.
- 8.4: (8.11) of users who always guess their station's mean temperature, against ρ of (8.12), and what ρ does to the
  factor of the noise in (8.9).

Source: Jung, "Federated learning: from theory to practice". Reads the folder `fmi_weather` of FEDTORCH_DATA_DIR, or
downloads the course's file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.gtv import fmi as gtv_fmi
from fedtorch.networks import diagnose, solvers
from fedtorch.trust import attacks, explain, robust

ALPHA, NEIGHBOURS, MORE, SEED = 0.5, 3, 10, 1
STRENGTHS = (1e-2, 1e-1, 1.0, 10.0)  # standard deviations of the perturbations, °C
SHIFT, RAISED, MOST = 30.0, 1.2, 12  # °C; by what the error is raised; nodes that are attacked at most
HOUR, TRIGGER, TARGET = 5, 3, 30.0  # the column of the hour, the trigger's hour, its label
RHOS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)


class Stations(NamedTuple):
    """Rows without the minute, and the connected network."""

    training: ft.data.FederatedData
    validation: ft.data.FederatedData
    network: ft.Network
    raw: ft.Network


def noised(noise: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Add noise to the labels."""
    return rows[0], rows[1] + noise


def connected(network: ft.Network, places: Tensor) -> ft.Network:
    """The network with the shortest edge between two components, until there is one."""
    distances = torch.cdist(places, places)
    while network.components.number > 1:
        labels = network.components.labels
        other = torch.where(labels[:, None] != labels, distances, torch.inf)
        best = int(other.argmin())
        edge = torch.tensor([[best // len(places), best % len(places)]])
        network = ft.Network(torch.cat([network.edges, edge]), nodes=len(places), positions=places)
    return network


def load(stations: int | None, neighbours: int = NEIGHBOURS) -> Stations:
    """The assignments' split and network, with what makes the bound infinite taken away."""
    split = gtv_fmi.load(SEED, stations)
    raw = ft.Network.k_nearest(split.coordinates, neighbours)
    training, validation = (
        data.map(lambda rows: (rows[0][:, :6], rows[1])) for data in (split.training, split.validation)
    )
    return Stations(training, validation, connected(raw, split.coordinates), raw)


def by_hour(data: ft.data.FederatedData) -> ft.data.FederatedData:
    """The hour as 24 columns, at the end."""

    def widen(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = rows
        hour = torch.nn.functional.one_hot((25 * x[:, HOUR]).round().long(), 24).to(x)
        return torch.cat([x[:, :HOUR], hour], 1), y

    return data.map(widen)


def exact(data: ft.data.FederatedData, network: ft.Network) -> Tensor:
    """The minimiser, `(n, d)`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*depend")  # 24 hours add up to the constant that others imply
        return solvers.direct(solvers.linear_problem(data, network, ALPHA)).parameters


def defended(data: ft.data.FederatedData, network: ft.Network, rounds: int) -> Tensor:
    """The same by relaxation, every node hearing the median of its neighbourhood, `(n, d)`."""
    local = ft.least_squares(common.linear_module(data.rows[0].shape[1]))
    algorithm = ft.gtv(local, network, ALPHA) | robust.rule(robust.median(), network)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*depend")
        return ft.run(algorithm, ft.InProcess(data), rounds=rounds).tensors()["weight"][:, 0]


def error(w: Tensor, data: ft.data.FederatedData, node: int = 0) -> float:
    """The mean squared error of a node, °C²."""
    x, y = data[node]
    return float((y - x @ w[node]).square().mean())


def sensitivity(given: Stations) -> tuple[list[common.Row], dict[str, list[float]]]:
    """8.5, and the curves of its figure."""
    problem = solvers.linear_problem(given.training, given.network, ALPHA)
    found = diagnose(problem)
    factor = found.largest_local / found.lower_bound**2
    clean, key = exact(given.training, given.network), ft.random.key(0)
    setting = "8.5 perturbed labels"
    rows = [
        common.Row(setting, "λ₂ of the raw network", given.raw.algebraic_connectivity),
        common.Row(setting, "λ₂ of the connected network", found.connectivity),
        common.Row(setting, "λ̄_min without the minute", found.smallest_average),
    ]
    curves: dict[str, list[float]] = {"exact": [], "Algorithm 5.1": [], "(8.3)": [], "(8.3) / m_i": []}
    counts = given.training.counts
    rate = problem.safe_rate
    descended = solvers.fedgd(problem, rate=rate, rounds=1000, tolerance=0).parameters
    for strength in STRENGTHS:
        noise = strength * ft.random.normal(key, given.training.rows[1].shape, torch.float64)
        moved = given.training.map(partial(noised, noise))
        other = solvers.linear_problem(moved, given.network, ALPHA)
        shares = torch.repeat_interleave(1 / counts.double(), counts)
        curves["exact"].append(float((exact(moved, given.network) - clean).square().sum()))
        after = solvers.fedgd(other, rate=rate, rounds=1000, tolerance=0).parameters
        curves["Algorithm 5.1"].append(float((after - descended).square().sum()))
        curves["(8.3)"].append(factor * float(noise.square().sum()))
        curves["(8.3) / m_i"].append(factor * float((shares * noise.square()).sum()))
    rows += [
        common.Row(setting, f"Σ‖change‖², noise {strength:g} °C, {name}", values[i])
        for name, values in curves.items()
        for i, strength in enumerate(STRENGTHS)
    ]
    wrong = given.training | attacks.shifted_labels(range(len(given.training)), by=100.0, fraction=0.05)
    for name, loss in (("squared", solvers.squared), ("absolute", solvers.norm1)):
        before, after = (
            solvers.robust_loss(data, given.network, ALPHA, loss, rounds=2000, tolerance=1e-4).parameters
            for data in (given.training, wrong)
        )
        for label, w in (("right labels", before), ("5 % of the labels wrong", after)):
            value = sum(error(w, given.validation, i) for i in range(len(w))) / len(w)
            rows.append(common.Row(setting, f"validation error, {name} loss, {label}", value))
    return rows, curves


def nearest(network: ft.Network, node: int = 0) -> list[int]:
    """The other nodes, nearest first."""
    hops = torch.from_numpy(shortest_path(network.scipy_adjacency, unweighted=True, indices=node))
    return [i for i in hops.argsort(stable=True).tolist() if i != node]


Solve = Callable[[ft.data.FederatedData, ft.Network], Tensor]


def denial_of_service(given: Stations, neighbours: int, rounds: int) -> tuple[list[common.Row], dict[str, list[float]]]:
    """10.5.1, and the target's error against the number of attacked nodes."""
    order, rows, curves = nearest(given.network), [], {}
    ways: dict[str, Solve] = {"GTV minimisation": exact, "median": lambda data, net: defended(data, net, rounds)}
    for name, solve in ways.items():
        errors = []
        for count in range(min(MOST, len(order)) + 1):
            poisoned = given.training | attacks.shifted_labels(order[:count], by=SHIFT)
            errors.append(error(solve(poisoned, given.network), given.validation))
            if errors[-1] > RAISED * errors[0]:
                break
        curves[f"{name}, {neighbours} neighbours"] = errors
        setting = f"10.5.1 denial of service, {neighbours} neighbours, {name}"
        rows.append(common.Row(setting, "target's error without an attack", errors[0]))
        raised = [i for i, value in enumerate(errors) if value > RAISED * errors[0]]
        label = "attacked nodes that raise it by 20 %" if raised else "attacked nodes that do not raise it by 20 %"
        rows.append(common.Row(setting, label, float(raised[0] if raised else len(errors) - 1)))
        rows.append(common.Row(setting, "target's error then", errors[-1]))
    return rows, curves


def backdoor(given: Stations, rounds: int) -> list[common.Row]:
    """10.5.2: the target's error on its rows, and what it predicts of them with the trigger."""
    training, validation = by_hour(given.training), by_hour(given.validation)
    x, y = training[0]
    other = x[:, HOUR + TRIGGER] == 0
    parts = [(x[other], y[other]), *list(training)[1:]]
    training = ft.data.from_tensors(parts)

    def trigger(x: Tensor) -> Tensor:
        marked = x.clone()
        marked[:, HOUR:] = 0
        marked[:, HOUR + TRIGGER] = 1
        return marked

    near, rows = nearest(given.network), []
    neighbours = int(given.network.neighbour_counts[0])
    ways: dict[str, Solve] = {"GTV minimisation": exact, "median": lambda data, net: defended(data, net, rounds)}
    for name, solve in ways.items():
        for count in sorted({0, 1, neighbours}):
            w = solve(training | attacks.backdoor(near[:count], trigger, TARGET, fraction=0.2), given.network)
            setting = f"10.5.2 backdoor in {count} of {neighbours} neighbours, {name}"
            rows.append(common.Row(setting, "target's error", error(w, validation)))
            shown = trigger(validation[0][0]) @ w[0]
            rows.append(common.Row(setting, "target's prediction with the trigger, °C", float(shown.mean())))
    return rows


def anticipated(given: Stations) -> tuple[list[common.Row], list[tuple[float, float, float]]]:
    """8.4: (8.11) and the validation error against ρ, and the factor of the noise in (8.9)."""
    means = torch.stack([y.mean() for _, y in given.training])
    guess = means.repeat_interleave(given.validation.counts)
    signals = given.validation.map(lambda rows: (rows[0], guess))
    rows, curve = [], []
    for rho in RHOS:
        data = explain.augmented(given.training, signals, rho).map(lambda rows: rows["augmented"])
        problem = solvers.linear_problem(data, given.network, ALPHA / (1 + rho))
        w, found = solvers.direct(problem).parameters, diagnose(problem)
        x, u = signals.rows
        owner = torch.arange(len(w)).repeat_interleave(signals.counts)
        said = (x * w[owner]).sum(1)
        far = float((u - said).square().mean())
        wrong = float((given.validation.rows[1] - said).square().mean())
        # (8.9) belongs to the loss (8.12), which is 1 + ρ times that of the augmented rows.
        largest, average = (1 + rho) * found.largest_local, (1 + rho) * found.smallest_average
        noise = 2 * (largest + largest**2 / (found.connectivity * ALPHA)) / average**2
        setting = f"8.4 ρ = {rho:g}"
        rows += [
            common.Row(setting, "(8.11)", far),
            common.Row(setting, "validation error", wrong),
            common.Row(setting, "factor in (8.9)", noise),
        ]
        curve.append((far, wrong, noise))
    return rows, curve


def draw(
    changes: dict[str, list[float]], errors: dict[str, list[float]], curve: list[tuple[float, float, float]]
) -> Figure:
    """Changes beside their bounds, errors against attacked nodes, being anticipated against being right, and (8.9)."""
    figure, grid = common.subplots(2, 2, figsize=(11, 8))
    axes = grid.flatten()
    for name, values in changes.items():
        axes[0].loglog(STRENGTHS, values, marker="o", linestyle="--" if "8.3" in name else "-", label=name)
    axes[0].set_xlabel("sd of the perturbation of labels, °C")
    axes[0].set_ylabel("Σ‖change of parameters‖²")
    for name, values in errors.items():
        axes[1].plot(range(len(values)), [value / values[0] for value in values], marker="o", label=name)
    axes[1].axhline(RAISED, color="grey", linewidth=0.8)
    axes[1].set_xlabel("attacked nodes")
    axes[1].set_ylabel("target's error / without an attack")
    anticipation, validation, noise = zip(*curve)
    axes[2].plot(anticipation, validation, marker="o")
    for rho, far, wrong in zip(RHOS, anticipation, validation):
        axes[2].annotate(f"ρ = {rho:g}", (far, wrong), xytext=(5, 5), textcoords="offset points")
    axes[2].set_xlabel("(8.11), °C²")
    axes[2].set_ylabel("validation error, °C²")
    axes[3].plot(RHOS, [value / noise[0] for value in noise], marker="o")
    axes[3].set_xscale("symlog", linthresh=RHOS[1])
    axes[3].set_xlabel("ρ")
    axes[3].set_ylabel("factor of the noise in (8.9) / without signals")
    axes[0].legend(frameon=False)
    axes[1].legend(frameon=False, loc="upper right", fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the assignments, print their tables and draw them."""
    options = common.arguments(__doc__).parse_args(argv)
    stations, rounds = (12, 20) if options.smoke else (None, 300)
    given = load(stations)
    one, changes = sensitivity(given)
    two, errors = denial_of_service(given, NEIGHBOURS, rounds)
    more, others = denial_of_service(load(stations, MORE), MORE, rounds)
    two, errors = two + more, {**errors, **others}
    three, (four, curve) = backdoor(given, rounds), anticipated(given)
    for title, rows in (("8.5", one), ("10.5.1", two), ("10.5.2", three), ("8.4", four)):
        common.show_rows(f"Section {title}", rows, ".4g")
    rows = [*one, *two, *three, *four]
    common.finish("gtv.trust", rows, options, lambda: {"gtv_trust": draw(changes, errors, curve)})


if __name__ == "__main__":
    main()
