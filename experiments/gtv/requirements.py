"""Requirements of trustworthy learning (section 8.2), label replacement (9.3) and the attack by a zero loss (10.2).

- KR1: an alarm for drift watches the error on rows that have just come in; a cluster's parameters change half-way.
  Rounds from the change to the alarm, and false alarms of runs without a change.
- KR3: weather stations whose labels are known to steps of some degrees, or without some features.
- KR5: two kinds of clients, one of them rare; the worst client's error by FedAvg, q-FFL and agnostic learning; and
  augmentation by a sensitive feature (figure 8.1), with the gap between groups.
- KR6: energy of methods for the same objective, by a stated model: operations times JOULES_OPERATION plus bytes times
  JOULES_BYTE. Both factors are assumed, and nothing is measured.
- 9.3: labels of a classifier by randomised response, by ε.
- 10.2: a station without rows copies its neighbourhood's model; how well that predicts a neighbour's rows.

Source: Jung, "Federated learning: from theory to practice". Reads the folder `fmi_weather` of FEDTORCH_DATA_DIR.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.gtv import fmi as gtv_fmi
from experiments.gtv.chapter_2 import normal
from fedtorch.networks import solvers
from fedtorch.trust import fairness, privacy
from fedtorch.trust.drift import DriftAlarm

ALPHA, SEED = 0.5, 1
STEPS = (0.0, 1.0, 5.0, 10.0, 20.0)  # °C, of quantised labels
EPSILONS = (0.5, 1.0, 2.0, 4.0)
QS, GAMMAS = (0.0, 1.0, 5.0), (0.1, 0.5)
JOULES_OPERATION, JOULES_BYTE = 1e-10, 1e-6  # assumed: ten operations a nanojoule, a microjoule a byte by radio
SHIFT, EACH = 20, 5  # rounds before the change; rows of a client a round


def squared(output: Tensor, y: Tensor) -> Tensor:
    """Squared errors by row."""
    return (output[..., 0] - y).square()


def monitoring(seed: int, rounds: int) -> dict[str, float]:
    """KR1: rounds from a change of the parameters to the alarm, and alarms of a run without one."""
    found = {}
    for name, moved in (("with a change", 2.0), ("without one", 0.0)):
        x = normal(seed, 1, 8, EACH * (rounds + 1), 3)
        late = torch.arange(EACH * (rounds + 1)) >= EACH * (SHIFT + 1)
        slope = 1 + moved * late.double()
        y = x.sum(2) * slope + 0.5 * normal(seed, 2, 8, EACH * (rounds + 1))
        data = ft.data.from_tensors(list(zip(x, y)))
        growing = ft.Growing(data, lambda done: torch.full((8,), EACH * (done + 1)), window=20)
        alarm = DriftAlarm(lambda round: None, threshold=4.0, slack=0.25, alarm=lambda text: None)
        run = ft.Run(ft.fedavg(ft.least_squares(common.linear_module(3))), growing, seed=seed)
        for round in run.rounds(rounds):
            alarm.watch(round.number, run.evaluate(growing.newest(round.number), {"error": squared})["error"].overall)
        early = [number for number in alarm.rounds if number < SHIFT]
        found[f"alarms in {rounds} rounds, {name}"] = float(len(alarm.rounds))
        if moved:
            after = [number - SHIFT for number in alarm.rounds if number >= SHIFT]
            found["false alarms before the change"] = float(len(early))
            found["rounds to the alarm"] = float(after[0]) if after else float("nan")
    return found


def error(w: Tensor, data: ft.data.FederatedData) -> float:
    """The mean over stations of the mean squared errors."""
    return gtv_fmi.mean_error(data, w)


def quantised(step: float, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rows whose labels are rounded to a step; 0 leaves them."""
    return rows[0], (rows[1] / step).round() * step if step else rows[1]


def some_features(kept: list[int], rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rows with some of their features."""
    return rows[0][:, kept], rows[1]


def governance(stations: int | None) -> list[common.Row]:
    """KR3: validation errors, on labels as they are, of optima with quantised labels and with fewer features."""
    split = gtv_fmi.load(SEED, stations)
    network = ft.Network.k_nearest(split.coordinates, 3)
    rows = []
    for step in STEPS:
        coarse = split.training.map(partial(quantised, step))
        w = solvers.direct(solvers.linear_problem(coarse, network, ALPHA)).parameters
        rows.append(
            common.Row(f"KR3 labels in steps of {step:g} °C", "validation error (°C²)", error(w, split.validation))
        )
    for name, kept in (("all features", range(7)), ("place alone", (0, 1)), ("time alone", (2, 3, 4, 5, 6))):
        parts = [data.map(partial(some_features, list(kept))) for data in (split.training, split.validation)]
        w = solvers.direct(solvers.linear_problem(parts[0], network, ALPHA)).parameters
        rows.append(common.Row(f"KR3 {name}", "validation error (°C²)", error(w, parts[1])))
    return rows


def fair(seed: int, rounds: int) -> list[dict[str, dict[str, float]]]:
    """KR5: ten clients, of which two have other parameters: errors by method."""
    x, noise = normal(seed, 3, 10, 40, 3), 0.3 * normal(seed, 4, 10, 40)
    y = torch.stack([x[k].sum(1) * (1 if k < 8 else -1) + noise[k] for k in range(10)])
    data = ft.data.from_tensors(list(zip(x, y)))
    local = common.linear_descent(3, steps=1, lr=0.02)
    ways = {"FedAvg": ft.fedavg(local)}
    ways |= {f"q-FFL, q = {q:g}": fairness.q_ffl(local, squared, q, lr=0.02) for q in QS if q}
    ways |= {f"agnostic, γ = {gamma:g}": fairness.agnostic(local, squared, gamma) for gamma in GAMMAS}
    out = {}
    for name, algorithm in ways.items():
        score = ft.run(algorithm, ft.InProcess(data), rounds=rounds).evaluate(data, {"error": squared})["error"]
        out[f"KR5 {name}"] = {"mean error": score.mean(), "worst client's error": score.worst(False)}
    group = x[..., 0] > 0
    bias = torch.where(group, 1.0, 0.0).double()
    features = torch.stack([bias, x[..., 1], torch.ones_like(bias)], -1)
    paid = x[..., 1] + bias + 0.1 * noise
    given = ft.data.from_tensors(list(zip(features, paid)))
    for name, part in (("as it is", given), ("augmented (figure 8.1)", fairness.swapped(given, 0, [0.0, 1.0]))):
        run = ft.run(ft.fedavg(ft.least_squares(common.linear_module(3))), ft.InProcess(part), rounds=1)
        w = run.server["weight"][0]
        out[f"KR5 training rows {name}"] = {"what a change of the group changes": float(w[0].abs())}
    return [out]


def energy(stations: int | None) -> list[common.Row]:
    """KR6: joules until the objective is 5 % above its minimum, of 20 000 rounds at most."""
    split = gtv_fmi.load(SEED, stations)
    network = ft.Network.k_nearest(split.coordinates, 3)
    problem = solvers.linear_problem(split.training, network, ALPHA)
    n, d = problem.cross.shape
    best = problem.objective(solvers.direct(problem).parameters)
    rows = []
    most = 500 if stations else 20_000
    operations = {"FedGD": n * 2 * d * d, "FedRelax": n * (2 * d**2), "conjugate gradients": n * (2 * d * d + 10 * d)}
    solve: dict[str, Callable[..., solvers.Solution]] = {
        "FedGD": partial(solvers.fedgd, rate=problem.safe_rate),
        "FedRelax": solvers.fedrelax,
        "conjugate gradients": solvers.conjugate_gradient,
    }
    for name, method in solve.items():
        reached: list[int] = []

        def watch(round: int, w: Tensor, reached: list[int] = reached) -> bool:
            done = problem.objective(w) < 1.05 * best
            if done:
                reached.append(round)
            return done

        found = method(problem, rounds=most, tolerance=1e-14, watch=watch)
        setting = f"KR6 {name}, to 5 % above the optimum"
        if not reached:
            rows.append(common.Row(setting, "rounds that were not enough", float(found.rounds)))
            continue
        computed = JOULES_OPERATION * operations[name] * found.rounds
        used = computed + JOULES_BYTE * found.bytes
        rows.append(common.Row(setting, "rounds", float(found.rounds)))
        rows.append(common.Row(setting, "bytes", float(found.bytes)))
        rows.append(common.Row(setting, "joules by the assumed model", used))
        rows.append(common.Row(setting, "share of computation in them", computed / used))
    return rows


def replaced(seed: int) -> dict[str, float]:
    """9.3: the accuracy of a linear classifier on true labels, by ε, of randomised labels."""
    x, other = (normal(seed, 5 + part, 2000, 4) for part in (0, 1))
    lift = torch.tensor([1.0, 0.5, 0.0, 0.0]).double()
    kinds = [(torch.arange(2000) % 2) for _ in range(2)]
    x, other = (rows + (2 * y[:, None] - 1) * lift for rows, y in zip((x, other), kinds))

    def accuracy(features: Tensor, labels: Tensor) -> float:
        wide = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        w = torch.linalg.lstsq(wide, 2 * labels.double()[:, None] - 1).solution
        said = (torch.cat([other, torch.ones_like(other[:, :1])], 1) @ w)[:, 0] > 0
        return float((said == (kinds[1] > 0)).double().mean())

    found = {"accuracy, labels as they are": accuracy(x, kinds[0])}
    for epsilon in EPSILONS:
        entropy = privacy.from_seed(seed)
        told = privacy.randomised_response(kinds[0], 2, epsilon, entropy)
        found[f"accuracy, labels randomised, ε = {epsilon:g}"] = accuracy(x, told)
    return found


def without_rows(data: ft.data.FederatedData, node: int) -> ft.data.FederatedData:
    """The data with the local loss of a node zero, as it has no rows."""
    rows = [(x[:0], y[:0]) if i == node else (x, y) for i, (x, y) in enumerate(data)]
    counts = torch.tensor([len(y) for _, y in rows])
    return ft.data.FederatedData(tuple(torch.cat(part) for part in zip(*rows)), counts, allow_empty=True)


def zero_loss(stations: int | None) -> list[common.Row]:
    """10.2: the attacker's copy on a neighbour's validation rows, beside that neighbour's model and a distant one."""
    split = gtv_fmi.load(SEED, stations)
    network = ft.Network.k_nearest(split.coordinates, 3)
    rows = []
    for alpha in (0.05, 0.5, 5.0):
        sums: list[list[float]] = [[], [], []]
        for attacker in range(0, len(network), max(1, len(network) // 10)):
            victim = next(j for i, j in (network.edges.tolist() + network.edges.flip(1).tolist()) if i == attacker)
            problem = solvers.linear_problem(without_rows(split.training, attacker), network, alpha, unlabelled=True)
            w = solvers.direct(problem).parameters
            far = int((split.coordinates - split.coordinates[attacker]).square().sum(1).argmax())
            x, y = split.validation[victim]
            for values, node in zip(sums, (victim, attacker, far)):
                values.append(float((y - x @ w[node]).square().mean()))
        for name, values in zip(("the victim's own model", "the attacker's copy", "a distant station's model"), sums):
            metric = f"error on the victim's rows, {name} (°C²)"
            rows.append(common.Row(f"10.2 a station without rows, α = {alpha:g}", metric, sum(values) / len(values)))
    return rows


def draw(table: list[common.Row]) -> Figure:
    """Errors by the step of labels, and the accuracy by ε."""
    figure, (left, right) = common.subplots(1, 2, figsize=(10, 3.8))
    errors = [row.ours for row in table if row.setting.startswith("KR3 labels")]
    left.plot(STEPS, errors, "o-")
    left.set_xlabel("step of the labels, °C")
    left.set_ylabel("validation error, °C²")
    values = [row.ours for row in table if row.metric.startswith("accuracy, labels randomised")]
    right.plot(EPSILONS, values, "o-")
    right.set_xlabel("ε of a label")
    right.set_ylabel("accuracy")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the requirements ask for."""
    options = common.arguments(__doc__).parse_args(argv)
    stations, rounds = (20, 30) if options.smoke else (None, 60)
    seeds = range(options.seeds)
    rows = [
        *common.over_seeds("KR1 drift", [monitoring(seed, rounds) for seed in seeds]),
        *governance(stations),
        *energy(stations),
        *common.over_seeds("9.3 2000 rows of two classes", [replaced(seed) for seed in seeds]),
        *zero_loss(stations),
    ]
    found = [fair(seed, 100 if options.smoke else 300)[0] for seed in seeds]
    for setting in found[0]:
        rows += common.over_seeds(setting, [each[setting] for each in found])
    common.show_rows("Requirements, label replacement, the attack by a zero loss", rows, ".4g")
    common.finish("gtv.requirements", rows, options, lambda: {"gtv_requirements": draw(rows)})


if __name__ == "__main__":
    main()
