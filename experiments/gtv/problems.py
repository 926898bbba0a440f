"""The book's problems 1.3, 1.4 and 7.1, its diagnosis (2.5), bounds (3.31) and (4.14), and how datasets differ (7.3).

- 1.3 and 1.4: the normal equations for arbitrary X, of least norm, beside NumPy's; and the eigenvalues of X'X. The
  book's matrix of ten-minute temperatures at Kustavi Isokari in March 2023 is not in the course's files: what they
  have is April 2023, hourly, of the same station. With 24 hours in a row and 29 days X'X is invertible, but its
  condition number says how little that means.
- 7.1: the probability that a node has a wrong neighbour, by an integral, beside simulation. A node's ten candidates
  have fewer than three nodes of its own sign with a probability that no number of rows changes.
- 2.5: training, validation and reference errors of polynomials, and what the comparison says of them.
- (3.31): how far nodes' models are from their mean, beside the bound. (4.14): gradient steps with errors beside the
  bound as it is printed, which one step from the solution refutes, and as it should be.
- 7.3: nodes of two kinds; how often a node's nearest three by a discrepancy are of its kind. Means of labels, Gaussian
  mixtures, the gradient, an autoencoder's codes of features and labels, label sets and class shares.

Source: Jung, "Federated learning: from theory to practice". Reads the folder `fmi_weather` of FEDTORCH_DATA_DIR.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from scipy.stats import hypergeom, norm
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.gtv.chapter_2 import Check, normal
from fedtorch.networks import diagnose, discrepancy, solvers

DEVICES, CANDIDATES, CHOSEN = 100, 10, 3  # of problem 7.1; a tenth of 99 others, rounded
ROWS = (1, 2, 4, 8, 16, 64)
DEGREES, TRAINING, NOISE = (0, 1, 3, 12), 16, 0.3  # of polynomials; rows; sd
FEW, MIXED = 12, 0.4  # rows of nodes of two kinds; share of rows of any class
FORM = "closed form"


# -- chapter 1 -----------------------------------------------------------------------------------------------------


def isokari() -> tuple[Tensor, Tensor]:
    """Hourly temperatures of the days of April 2023 `(29, 24)`, and the greatest of the day after `(29,)`."""
    frame = pandas.read_csv(ft.data.locate("fmi_weather", "weather_data.csv"))
    frame = frame.sort_values(["Day", "Time [Local time]"], key=lambda column: column.astype(str).str.zfill(5))
    days = frame["Average temperature [°C]"].to_numpy(dtype=float).reshape(30, 24)
    most = frame["Maximum temperature [°C]"].to_numpy(dtype=float).reshape(30, 24).max(1)
    return torch.from_numpy(days[:-1].copy()), torch.from_numpy(most[1:].copy())


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    """The shortest solution of X'Xw = X'y for any X: that of gradient descent from zero, and of `solvers.direct`."""
    data = ft.data.from_tensors([(x, y)])
    return solvers.direct(solvers.linear_problem(data, ft.Network.from_edges([], nodes=1), 0.0)).parameters[0]


def matrices() -> list[Check]:
    """Problems 1.3 and 1.4."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).double()
    y = torch.tensor([7.0, 8.0, 9.0]).double()
    w = least_squares(x, y)
    checks = [Check("1.3 the 3 × 2 matrix", f"ŵ_{i + 1}", float(w[i]), (-6.0, 6.5)[i]) for i in range(2)]
    small = torch.linalg.eigvalsh(x[:2].T @ x[:2])
    root = math.sqrt(15**2 - 4)
    for i, value in enumerate(((30 - 2 * root) / 2, (30 + 2 * root) / 2)):
        checks.append(Check("1.4 the 2 × 2 matrix", f"eigenvalue {i + 1}", float(small[i]), value))
    days, most = isokari()
    solution = least_squares(days, most)
    setting = "1.3 Kustavi Isokari, April 2023, hourly"
    theirs = torch.from_numpy(np.linalg.lstsq(days.numpy(), most.numpy(), rcond=None)[0])
    ours, reference = (float((most - days @ w).square().mean()) for w in (solution, theirs))
    checks.append(Check(setting, "mean squared error (°C²)", ours, reference))
    checks.append(Check(setting, "‖ŵ − NumPy's‖ / ‖ŵ‖", float((solution - theirs).norm() / solution.norm()), 0.0))
    values = torch.linalg.eigvalsh(days.T @ days)
    setting = "1.4 Kustavi Isokari, April 2023, hourly"
    squares = torch.linalg.svdvals(days).square()
    for name, place in (("least", 0), ("largest", -1)):
        checks.append(Check(setting, f"{name} eigenvalue", float(values[place]), float(squares.sort().values[place])))
    checks.append(Check(setting, "condition number", float(values[-1] / values[0])))
    return checks


# -- problem 7.1 ---------------------------------------------------------------------------------------------------


def wrong_neighbour(rows: int, devices: int = DEVICES, same: int | None = None) -> float:
    """The probability that one node has a wrong neighbour, half of the devices being of each sign.

    Of its candidates K are of its own sign, hypergeometric. Given the node's mean z ~ N(1, 1/m), distances to those
    are |N(1 − z, 1/m)| with distribution F, and to the others |N(−1 − z, 1/m)| with G. All is well if K ≥ 3 and the
    third of the K is nearer than the nearest of the 10 − K: ∫ K!/(2!(K − 3)!) F²(1 − F)^(K−3) (1 − G)^(10−K) dF.
    """
    sd = rows**-0.5
    points, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()
    z = 1 + sd * points[:, None]
    steps = np.linspace(0, 1, 2001)[1:-1]
    far = sd * 10 + 2.5
    d = far * steps[None, :] ** 2
    step = np.gradient(d, axis=1)

    def folded(centre: np.ndarray) -> np.ndarray:
        return norm.cdf((d - centre) / sd) - norm.cdf((-d - centre) / sd)

    near, others = folded(1 - z), 1 - folded(-1 - z)
    density = (norm.pdf((d - 1 + z) / sd) + norm.pdf((d + 1 - z) / sd)) / sd
    well = 0.0
    for k in range(CHOSEN, CANDIDATES + 1):
        chance = hypergeom.pmf(k, devices - 1, devices // 2 - 1, CANDIDATES)
        third = math.comb(k, CHOSEN) * CHOSEN * near ** (CHOSEN - 1) * (1 - near) ** (k - CHOSEN) * density
        well += chance * float(weights @ (third * others ** (CANDIDATES - k) * step).sum(1))
    return 1 - well


def too_few(devices: int = DEVICES) -> float:
    """The probability of fewer than three candidates of the own sign, which is left with any number of rows."""
    return float(hypergeom.cdf(CHOSEN - 1, devices - 1, devices // 2 - 1, CANDIDATES))


def neighbourhoods(seed: int, rows: int, draws: int) -> tuple[float, float]:
    """By simulation: the share of nodes with a wrong neighbour, and of networks with such a node."""
    generator = np.random.default_rng([seed, rows])
    c = np.repeat([1.0, -1.0], DEVICES // 2)
    nodes, networks = 0.0, 0
    for _ in range(draws):
        z = c + generator.normal(size=DEVICES) / rows**0.5
        order = generator.random((DEVICES, DEVICES))
        np.fill_diagonal(order, 2.0)
        candidates = order.argpartition(CANDIDATES, axis=1)[:, :CANDIDATES]
        apart = np.abs(z[:, None] - z[candidates])
        nearest = np.take_along_axis(candidates, apart.argsort(1)[:, :CHOSEN], 1)
        wrong = (c[nearest] != c[:, None]).any(1)
        nodes += wrong.mean()
        networks += wrong.any()
    return nodes / draws, networks / draws


def ranking(seed: int, draws: int) -> list[Check]:
    """Problem 7.1 by number of rows; nodes of a network are not independent, so that 1 − (1 − p)¹⁰⁰ is no answer."""
    checks = []
    for rows in ROWS:
        node, network = neighbourhoods(seed, rows, draws)
        p, setting = wrong_neighbour(rows), f"7.1 a hundred devices, {rows} row{'s' if rows > 1 else ''} each"
        checks.append(Check(setting, "P(a node has a wrong neighbour)", node, p))
        checks.append(Check(setting, "P(some node has one)", network))
        checks.append(
            Check(setting, "P(some node has one), were nodes independent: 1 − (1 − p)¹⁰⁰", 1 - (1 - p) ** DEVICES)
        )
    checks.append(Check("7.1 a hundred devices, without end of rows", "P(a node has a wrong neighbour)", too_few()))
    return checks


# -- diagnosis, bounds ---------------------------------------------------------------------------------------------


def polynomials(seed: int) -> tuple[list[Check], list[str]]:
    """2.5: errors of polynomials of rising degree, the reference being the noise, and what is said of them."""
    checks, said = [], []
    for degree in DEGREES:
        parts = []
        for part, rows in enumerate((TRAINING, 400)):
            t = 2 * ft.random.uniform(ft.random.fold_in(ft.random.key(seed), part), (rows,), torch.float64) - 1
            x = torch.stack([torch.cos(k * torch.arccos(t)) for k in range(degree + 1)], 1)
            y = (3 * t).sin() + NOISE * normal(seed, 2 + part, rows)
            parts.append(ft.data.from_tensors([(x, y)]))
        run = ft.run(ft.pooled(ft.least_squares(common.linear_module(degree + 1))), ft.InProcess(parts[0]), rounds=1)
        found = run.diagnosis(parts[1], torch.nn.functional.mse_loss, reference=NOISE**2)
        setting = f"2.5 polynomials of degree {degree}, {TRAINING} rows"
        for name in ("training", "validation", "reference"):
            checks.append(Check(setting, f"{name} error", getattr(found, name)))
        said.append(f"degree {degree}: {found}")
    return checks, said


def nodes_with_rows(seed: int, nodes: int, features: int = 3) -> tuple[ft.data.FederatedData, Tensor, Tensor]:
    """Rows that share their true parameters; these, and Σ‖ε_i‖²/m_i."""
    truth, rows = normal(seed, 10, features), []
    noise = normal(seed, 11, nodes, 20)
    x = normal(seed, 12, nodes, 20, features)
    for i in range(nodes):
        rows.append((x[i], x[i] @ truth + noise[i]))
    return ft.data.from_tensors(rows), truth, noise.square().mean(1).sum()


def deviations(seed: int, nodes: int) -> list[Check]:
    """(3.31) by α."""
    data, _, noise = nodes_with_rows(seed, nodes)
    checks = []
    for alpha in (0.1, 1.0, 10.0, 100.0):
        problem = solvers.linear_problem(data, ft.Network.ring(nodes), alpha)
        w = solvers.direct(problem).parameters
        apart = float((w - w.mean(0)).square().sum())
        bound = diagnose(problem).deviation_bound(float(noise))
        checks.append(Check(f"(3.31) ring of {nodes} nodes, α = {alpha:g}", "Σ‖w_i − mean‖² / bound", apart / bound))
    return checks


def perturbed_steps(seed: int, nodes: int, steps: int) -> tuple[list[Check], dict[str, list[float]]]:
    """(4.14): steps with errors, beside both bounds; the largest ratio to each."""
    data, _, _ = nodes_with_rows(seed, nodes)
    problem = solvers.linear_problem(data, ft.Network.ring(nodes), 1.0)
    found = diagnose(problem)
    best, rate = solvers.direct(problem).parameters, found.learning_rate
    curves: dict[str, list[float]] = {}
    checks = []
    for name, start in (("from zero", torch.zeros_like(best)), ("from the solution", best.clone())):
        w, distances, sizes = start, [float((start - best).norm())], []
        for step in range(steps):
            error = 0.05 * normal(seed, 100 + step, *best.shape)
            w = w - 2 * rate * (problem.product(w) - problem.cross) + error
            sizes.append(float(error.norm()))
            distances.append(float((w - best).norm()))
        right = [distances[0]]
        for size in sizes:
            right.append(found.contraction * right[-1] + size)
        printed = [found.contraction**k * distances[0] for k in range(steps + 1)]
        for k in range(1, steps + 1):
            printed[k] += sum(found.contraction**j * sizes[k - j] for j in range(1, k + 1))
        setting = f"(4.14) {steps} steps with errors, {name}"
        for label, limit in (("as corrected", right), ("as printed", printed)):
            ratio = max(d / b for d, b in zip(distances[1:], limit[1:]))
            checks.append(Check(setting, f"largest distance / bound, {label}", ratio))
            curves[f"bound {label}, {name}"] = limit
        curves[f"steps {name}"] = distances
    return checks, curves


# -- datasets that differ ------------------------------------------------------------------------------------------


def two_kinds(seed: int, nodes: int) -> tuple[ft.data.FederatedData, Tensor, Tensor]:
    """Nodes whose classes are mostly among 0 to 4 or 5 to 9, features N(class's centre, 1); kinds and class shares."""
    key = ft.random.key(seed)
    centres = 2 * normal(seed, 20, 10, 4)
    kinds, rows = torch.arange(nodes) % 2, []
    for i in range(nodes):
        here = ft.random.fold_in(key, 1000 + i)
        u = ft.random.uniform(here, (3, FEW), torch.float64)
        own = (u[0] * 5).long() + 5 * kinds[i]
        label = torch.where(u[1] < MIXED, (u[2] * 10).long(), own)
        x = centres[label] + normal(seed, 2000 + i, FEW, 4)
        rows.append((x, label))
    shares = torch.stack([torch.bincount(y, minlength=10).double() / len(y) for _, y in rows])
    return ft.data.from_tensors(rows), kinds, shares


def label_sets(data: ft.data.FederatedData) -> Tensor:
    """1 − the share of two nodes' rows whose labels both nodes have, `(n, n)`: the dissimilarity of label sets."""
    counts = torch.stack([torch.bincount(y, minlength=10).double() for _, y in data])
    there = (counts > 0).double()
    common_rows = counts @ there.T
    return 1 - (common_rows + common_rows.T) / (counts.sum(1)[:, None] + counts.sum(1))


def similarity(seed: int, nodes: int) -> list[Check]:
    """How often the three nearest by a discrepancy are of the same kind; half of them by chance."""
    data, kinds, shares = two_kinds(seed, nodes)
    numbers = data.map(lambda rows: (rows[0], rows[1].double()))
    ways: dict[str, Callable[[], Tensor]] = {
        "mean label": lambda: discrepancy.distances(discrepancy.mean_label(numbers)),
        "Gaussian mixture of features": lambda: discrepancy.distances(discrepancy.gaussian_mixture(numbers)),
        "gradient of a pooled linear model": lambda: discrepancy.distances(discrepancy.pooled_gradient(numbers)),
        "autoencoder's codes": lambda: discrepancy.distances(
            discrepancy.autoencoder_code(data, seed=int(ft.random.fold_in(ft.random.key(seed), 3)), code=2, hidden=8)
        ),
        "label sets": lambda: label_sets(data),
        "class shares": lambda: discrepancy.distances(shares),
    }
    checks = []
    for name, way in ways.items():
        apart = way() + torch.diag(torch.full((nodes,), torch.inf).double())
        nearest = apart.argsort(1)[:, :CHOSEN]
        same = float((kinds[nearest] == kinds[:, None]).double().mean())
        checks.append(Check(f"7.3 {nodes} nodes of two kinds", f"neighbours of the same kind, {name}", same))
    return checks


def draw(curves: dict[str, list[float]], draws: int) -> Figure:
    """Problem 7.1, and (4.14)."""
    figure, (left, right) = common.subplots(1, 2, figsize=(10.5, 3.8))
    left.plot(ROWS, [wrong_neighbour(rows) for rows in ROWS], label="by the integral")
    left.plot(ROWS, [neighbourhoods(0, rows, draws)[0] for rows in ROWS], "o", label="simulated")
    left.axhline(too_few(), color="0.5", linestyle=":", label="fewer than three of its own among the candidates")
    left.set_xscale("log", base=2)
    left.set_ylim(bottom=0)
    left.set_xlabel("rows of a device")
    left.set_ylabel("P(a node has a wrong neighbour)")
    left.legend(frameon=False, fontsize="small")
    for name, values in curves.items():
        if "solution" in name:
            right.plot(values, "--" if "bound" in name else "-", label=name)
    right.set_xlabel("step")
    right.set_ylabel("distance to the solution")
    right.legend(frameon=False, fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Do the problems, and print ours beside closed forms."""
    options = common.arguments(__doc__).parse_args(argv)
    draws, nodes, steps = (50, 12, 10) if options.smoke else (4000, 40, 60)
    runs: list[list[Check]] = []
    curves: dict[str, list[float]] = {}
    said: list[str] = []
    for seed in range(options.seeds):
        errors, words = polynomials(seed)
        perturbed, lines = perturbed_steps(seed, nodes, steps)
        runs.append(
            [
                *matrices(),
                *ranking(seed, draws),
                *errors,
                *deviations(seed, nodes),
                *perturbed,
                *similarity(seed, nodes),
            ]
        )
        curves, said = curves or lines, said or words
    rows, table = [], []
    for each in zip(*runs):
        setting, metric = each[0].setting, each[0].metric
        ours = common.row(setting, metric, [check.ours for check in each])
        form = float(np.mean([check.form for check in each]))
        known = not math.isnan(form)
        rows += [ours, common.Row(setting, f"{metric}, {FORM}", form)] if known else [ours]
        table.append([setting, metric, f"{ours.ours:.6g}", f"{form:.6g}" if known else ""])
    common.show("Problems of chapters 1 to 7", ["", "", "ours", FORM], table)
    common.show("What the diagnosis says", [""], [[line] for line in said])
    common.finish("gtv.problems", rows, options, lambda: {"gtv_problems": draw(curves, draws)})


if __name__ == "__main__":
    main()
