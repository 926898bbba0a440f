"""What privacy costs, and what it keeps back: accuracy and membership inference against ε.

On what ships inside scikit-learn, and on draws of the models themselves:

- *example level*: digits at 10 clients, a softmax regression and a network of 64 hidden units, FedAvg with DP-SGD at
  each client (`privacy.example_level`), every round five steps of a tenth of the rows.
- *client level*: digits at 300 clients, FedAvg with clipped changes of one local epoch and noise on their sum
  (`privacy.client_level`), a third of the clients in each round: a softmax regression with fixed and adaptive clip, and
  the network.
- *least squares*: diabetes progression at 4 clients, FedAvg of least squares on sums that are noised once
  (`privacy.sufficient_statistics`) beside DP-SGD on the same clipped rows and targets: R² on held-out rows.
- *process*: a Gaussian process of 30 random Fourier features, 10 clients of 400 rows: FedMGP on noised sums at its
  default hyperparameters (`privacy.private_process`) and, knowing the features, EP on noised sums
  (`privacy.NoisedSums`), which is the posterior of all clients' sums, beside DP-FedAvg, and at client level with 300
  clients of 12 rows.
- *devices*: 30 devices of 240 rows whose coefficients vary around a common mean: HM1 and EP on noised sums, which find
  a model for each, beside DP-FedAvg, which finds one for all, and DP-SGD at each device alone, at equal ε.
- *membership*: the area under the ROC of an attack with shadow models (`attacks.membership`) on 200 digits, for the
  models of the first comparison trained alone. Gradient inversion against ε is in `experiments.privacy.attacks`.

HM1 and EP have no client level: `privacy.client_level` refuses HM1's rows of its own for each client, which nothing
hides one in, and EP's total of matrices, which noise would break.
δ is 1e-4, below one over any number of rows or clients here; ε = ∞ is the same training without clip and noise. Noise
is seeded, so that the table repeats itself: these are simulations, which protect nobody. Nothing was tuned; clips and
learning rates are round numbers, the same for all ε. Test rows have no part in training. There are no published figures
for these settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

import fedtorch as ft
from experiments import common, result_pages
from experiments.privacy import regressions
from fedtorch.trust import attacks, privacy

DELTA = regressions.DELTA
READING = result_pages.Reading(across="(?P<line>.*), (?P<column>ε = .*)")


class Size(NamedTuple):
    """How much is done."""

    epsilons: tuple[float, ...]
    rounds: int
    clients: int  # at client level
    shadows: int
    rows: int  # that are attacked


FULL = Size((0.5, 1.0, 2.0, 8.0, math.inf), 40, 300, 16, 200)
SMOKE = Size((2.0, math.inf), 3, 12, 8, 20)


def module(hidden: int, seed: int) -> nn.Module:
    """A classifier of digits, linear without hidden units."""
    torch.manual_seed(seed)
    if hidden == 0:
        return nn.Linear(64, 10)
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def sgd(lr: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Plain gradient descent."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def accuracy(run: ft.Run, data: ft.data.FederatedData) -> float:
    """That of the clients' models on their own held-out rows."""
    return run.evaluate(data, {"accuracy": ft.metrics.accuracy()})["accuracy"].overall


def example_solver(hidden: int, epsilon: float, releases: int, seed: int) -> ft.LocalSolver:
    """Five steps a round of a tenth of the rows, private at ε after so many steps."""
    settings: dict[str, Any] = {"steps": 5, "loss": F.cross_entropy, "optimizer": sgd(0.5)}
    if math.isinf(epsilon):
        return ft.gradient_descent(module(hidden, seed), batch_size=16, **settings)
    noise = regressions.noise_for(epsilon, sampling_rate=0.1, rounds=releases)
    return privacy.example_level(
        module(hidden, seed), clip=1.0, noise=noise, sampling_rate=0.1, delta=DELTA, entropy=privacy.from_seed(seed),
        ghost=True, **settings,
    )  # fmt: skip


def example_level(hidden: int, epsilon: float, size: Size, seed: int) -> float:
    """Accuracy of FedAvg whose clients train by DP-SGD."""
    data = ft.data.partition(ft.data.digits(), ft.data.iid(), clients=10, seed=seed)
    training, held_out = data.split(0.8, seed=seed)
    local = example_solver(hidden, epsilon, 5 * size.rounds, seed)
    return accuracy(ft.run(ft.fedavg(local), ft.InProcess(training), rounds=size.rounds, seed=seed), held_out)


def client_level(hidden: int, adaptive: bool, epsilon: float, size: Size, seed: int) -> float:
    """Accuracy of FedAvg whose server noises the sum of clipped changes."""
    data = ft.data.partition(ft.data.digits(), ft.data.iid(), clients=size.clients, seed=seed)
    training, held_out = data.split(0.7, seed=seed)
    local = ft.gradient_descent(module(hidden, seed), epochs=1, batch_size=4, loss=F.cross_entropy, optimizer=sgd(0.5))
    algorithm, cohort = ft.fedavg(local), size.clients // 3
    if math.isinf(epsilon):
        run = ft.run(algorithm, ft.InProcess(training), rounds=size.rounds, cohort=cohort, seed=seed)
        return accuracy(run, held_out)
    noise = regressions.noise_for(epsilon, sampling_rate=1 / 3, rounds=size.rounds)
    clip = privacy.AdaptiveClip(start=1.0) if adaptive else 0.5
    private = privacy.client_level(clip, noise, delta=DELTA, sampling_rate=1 / 3, entropy=privacy.from_seed(seed))
    return accuracy(ft.run(algorithm | private, ft.InProcess(training), rounds=size.rounds, seed=seed), held_out)


def attacked(hidden: int, epsilon: float, size: Size, seed: int) -> float:
    """The area under the ROC of membership inference."""
    x, y = ft.data.digits()
    local = example_solver(hidden, epsilon, 5 * size.rounds, seed)
    found = attacks.membership(
        local, x[: size.rows], y[: size.rows], shadows=size.shadows, rounds=size.rounds, seed=seed
    )
    return found.area()


Measure = Callable[[float, Size, int], float]


def _over_rounds(score: Callable[[float, int, int], float], epsilon: float, size: Size, seed: int) -> float:
    """Return a regression's score after the rounds of a size."""
    return score(epsilon, size.rounds, seed)


def _regressions() -> dict[str, tuple[str, Measure]]:
    """R² of every way of each regression."""
    found: dict[str, tuple[str, Measure]] = {}
    for name, measure, ways in (
        ("least squares", regressions.least_squares, ("noise once", "DP-FedAvg")),
        ("process", regressions.gaussian_process, ("FedMGP", "EP", "DP-FedAvg", "client level")),
        ("devices", regressions.of_devices, ("HM1", "EP", "DP-FedAvg", "each alone")),
    ):
        for way in ways:
            found[f"{name}, {way}"] = (
                f"R², {name}",
                partial(_over_rounds, partial(measure, way)),
            )
    return found


COMPARISONS: dict[str, tuple[str, Measure]] = {
    "example level, linear": ("accuracy", partial(example_level, 0)),
    "example level, network": ("accuracy", partial(example_level, 64)),
    "client level, fixed clip": ("accuracy", partial(client_level, 0, False)),
    "client level, adaptive clip": ("accuracy", partial(client_level, 0, True)),
    "client level, network": ("accuracy", partial(client_level, 64, False)),
    **_regressions(),
    "membership, linear": ("area under ROC", partial(attacked, 0)),
    "membership, network": ("area under ROC", partial(attacked, 64)),
}


def draw(rows: Sequence[common.Row], epsilons: Sequence[float]) -> Figure:
    """A panel per metric, a line per way; ε = ∞ at the right."""
    metrics = list(dict.fromkeys(row.metric for row in rows))
    figure, axes = common.subplots(1, len(metrics), figsize=(3.6 * len(metrics), 3.6))
    places = range(len(epsilons))
    for axis, metric in zip(axes, metrics):
        for name, (own, _) in COMPARISONS.items():
            if own == metric:
                values = [row.ours for row in rows if row.setting.startswith(f"{name}, ε")]
                axis.plot(places, values, marker="o", label=name)
        axis.set_xticks(places, [label(epsilon) for epsilon in epsilons])
        axis.set_xlabel("ε")
        axis.set_ylabel(metric)
        axis.set_ylim(bottom=max(axis.get_ylim()[0], -0.2))
        axis.legend(frameon=False, fontsize=8)
    return figure


def label(epsilon: float) -> str:
    """An ε in a table."""
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparisons, print a table and draw it."""
    options = common.arguments(__doc__).parse_args(argv)
    size = SMOKE if options.smoke else FULL
    rows, lines = [], []
    for name, (metric, measure) in COMPARISONS.items():
        found = []
        for epsilon in size.epsilons:
            values = [measure(epsilon, size, seed) for seed in range(options.seeds)]
            rows.append(common.row(f"{name}, ε = {label(epsilon)}", metric, values))
            found.append(common.number(rows[-1].ours, rows[-1].sd))
        lines.append([f"{name}: {metric}", *found])
    title = f"Against ε, δ = {DELTA:g}, {size.rounds} rounds ({common.machine()})"
    common.show(title, ["", *(f"ε = {label(epsilon)}" for epsilon in size.epsilons)], lines)
    common.finish("privacy.accuracy", rows, options, lambda: {"privacy_accuracy": draw(rows, size.epsilons)})


if __name__ == "__main__":
    main()
