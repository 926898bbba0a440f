"""Attacks as a yardstick: what training shows to whom, and what each defence does about it.

- *Labels of a split network* (breast cancer, two parties): the share of labels that a party guesses from the gradients
  it is sent in the first step and on average over all, and that both parties guess from all steps where they put
  together what they sent and know the predicted p; beside the accuracy of the network on held-out rows; plain, with the
  noise ρ of the augmented model drawn by the parties, with noise drawn at the sum, and with private labels
  (`privacy.noised_gradients`).
- *What z leaks as ρ varies*: after training, the server averages what a party sends over T further steps in which
  nothing moves. R² of the hidden contribution g and of a private feature, learnt from half of the rows, beside the
  accuracy.
- *Gradient inversion of FedAvg* (digits): the distance of a row from what the first layer's change tells of it, in
  units of the distance between two rows, against ε of one step of DP-SGD; and of four rows by a search, without noise.
- *Attributes in a GTV network* (weather stations): how well a neighbour tells the latitude of a station by its model of
  the temperature by month, day and hour, learnt from half of the stations, against the coupling α.

δ is 1e-3 for 455 rows. Nothing was tuned; there are no published figures. The last part reads the folder `fmi_weather`
of FEDTORCH_DATA_DIR, or downloads the course's file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common
from experiments.gtv import trust as gtv_trust
from fedtorch import vfl
from fedtorch.networks import solvers
from fedtorch.protocol import Half, together
from fedtorch.trust import attacks, privacy
from fedtorch.vfl import Iteration, ServerNode, mlp, party_half, server_half
from fedtorch.vfl.model import likelihoods

DELTA = 1e-3
RHOS = (0.0, 0.3, 1.0, 3.0, 10.0)
STEPS_SEEN = (1, 10, 100)
EPSILONS = (1.0, 10.0, 100.0, 1000.0, math.inf)
ALPHAS = (0.0, 0.01, 0.1, 1.0, 10.0)
Defence = Callable[[ServerNode, Half], Half]


class Rows(NamedTuple):
    """Aligned rows of two parties, for training and held out."""

    training: vfl.VerticalData
    held_out: vfl.VerticalData


def load(seed: int) -> Rows:
    """Breast cancer, fifteen features each."""
    x, y = ft.data.breast_cancer()
    order = ft.random.permutation(ft.random.key(seed), len(y))
    parts = []
    for rows in (order[: len(y) * 4 // 5], order[len(y) * 4 // 5 :]):
        parts.append(vfl.VerticalData((x[rows, :15], x[rows, 15:]), y[rows].float()))
    return Rows(*parts)


def network(data: vfl.VerticalData, bayes: vfl.HierarchicalBayes | None, seed: int) -> vfl.SplitNetwork:
    """Bottom networks of eight hidden units, summed at the cut layer."""
    bottoms = [mlp(x.shape[1], (8,), 1, activation=nn.Tanh) for x in data.features]
    start = int(ft.random.fold_in(ft.random.key(seed), 0))
    return vfl.SplitNetwork(bottoms, likelihoods.bernoulli(), seed=start, bayes=bayes)


def heard(
    model: vfl.SplitNetwork,
    data: vfl.VerticalData,
    iterations: Sequence[Iteration],
    lr: float,
    defence: Defence | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Train by messages; what the first party sent and was sent, and the sum that was sent, `(T, 1, 1, 1, n)` each."""
    server, parties = model.nodes(data, lambda parameters: torch.optim.Adam(parameters, lr=lr))
    messages: dict[bool, list[list[Tensor]]] = {True: [[], []], False: [[], []]}  # by whether a party has sent them
    half = server_half(server, iterations)
    halves = {0: half if defence is None else defence(server, half)}
    halves |= {party.index: party_half(party, iterations) for party in parties}
    for j in (0, 1):
        overhear = lambda node, message, sent, j=j: messages[sent][j].append(message[0])
        halves[j + 1] = attacks.tapped(halves[j + 1], overhear)
    together(halves)
    values = torch.stack([torch.stack(each) for each in messages[True]])
    return values[0], torch.stack(messages[False][0]), values.sum(0)


def accuracy(model: vfl.SplitNetwork, data: vfl.VerticalData) -> float:
    """That of the predictive mean."""
    guess = model.predict(data.features, draws=100)[0] > 0.5
    return float((guess == (data.response > 0.5)).double().mean())


def label_leak(rows: Rows, steps: int, seed: int) -> list[common.Row]:
    """What a party finds out of the labels under each defence."""
    by_parties = lambda rho: vfl.HierarchicalBayes(rho=rho, auxiliary=vfl.amortised())
    ways: dict[str, tuple[vfl.HierarchicalBayes | None, Defence | None]] = {"plain": (None, None)}
    for rho in (1.0, 5.0):
        ways[f"ρ = {rho:g}, drawn by the parties"] = (by_parties(rho), None)
        ways[f"ρ = {rho:g}, drawn at the sum"] = (vfl.HierarchicalBayes(rho=rho), None)
    for epsilon in (100.0, 25.0, 10.0, 1.0, 0.5):
        noise = privacy.noise_for(epsilon=epsilon, rounds=steps, delta=DELTA)
        ways[f"private labels, ε = {epsilon:g}"] = (None, private_labels(noise, seed))
    found = []
    for name, (bayes, defence) in ways.items():
        model = network(rows.training, bayes, seed)
        _, told, sent = heard(model, rows.training, [Iteration(step=step) for step in range(steps)], 0.02, defence)
        labels = rows.training.response
        guesses = {
            "first step": attacks.guessed_labels(told[:1]),
            f"mean of {steps} steps": attacks.guessed_labels(told),
            f"{steps} steps, by both": attacks.guessed_labels(told * len(labels), sent.sigmoid()),
        }
        for seen, guess in guesses.items():
            right = (guess[0, 0] == labels).double().mean()
            found.append(common.Row(f"labels, {name}", f"labels found, {seen}", float(right)))
        found.append(common.Row(f"labels, {name}", "accuracy", accuracy(model, rows.held_out)))
    return found


def private_labels(noise: float, seed: int) -> Defence:
    """Gradients clipped at 1, which no Bernoulli likelihood exceeds, with noise."""
    return privacy.noised_gradients(clip=1.0, noise=noise, delta=DELTA, entropy=privacy.from_seed(seed))


def explained(guess: Tensor, truth: Tensor) -> float:
    """R²."""
    return 1 - float((guess - truth).square().mean() / truth.var(correction=0))


def leak_of_values(rows: Rows, steps: int, seed: int) -> list[common.Row]:
    """R² of g and of the first party's first feature from means of T values, and the accuracy, for several ρ."""
    found = []
    for rho in RHOS:
        bayes = vfl.HierarchicalBayes(rho=rho, auxiliary=vfl.amortised()) if rho else None
        model = network(rows.training, bayes, seed)
        heard(model, rows.training, [Iteration(step=step) for step in range(steps)], 0.02)
        found.append(common.Row(f"z, ρ = {rho:g}", "accuracy", accuracy(model, rows.held_out)))
        hidden = (
            model.parties[0].propose(rows.training.features[0], ft.random.key(0), 200, noise=False)[0, :, 0].mean(0)
        )
        later = [Iteration(step=steps + step) for step in range(max(STEPS_SEEN))]
        values, _, _ = heard(model, rows.training, later, 1e-12)
        private, half = rows.training.features[0][:, 0].double(), len(hidden) // 2
        for count in STEPS_SEEN:
            mean = values[:count, 0, 0, 0].double().mean(0)[:, None]
            inputs = torch.cat([mean, mean.square()], 1)
            for name, truth in (("g", hidden.double()), ("a private feature", private)):
                guess = attacks.learnt_attribute(inputs[:half], truth[:half])(inputs[half:])
                found.append(
                    common.Row(f"z, ρ = {rho:g}", f"R² of {name}, T = {count}", explained(guess, truth[half:]))
                )
    return found


def digits_network() -> nn.Module:
    """The model that clients of `inversion_of_digits` train."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def told_of(x: Tensor, y: Tensor, epsilon: float, seed: int) -> dict[str, Tensor]:
    """The change that a client of these rows sends after one gradient step."""
    settings: dict[str, Any] = {
        "steps": 1,
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda p: torch.optim.SGD(p, lr=1.0),
    }
    if math.isinf(epsilon):
        local = ft.gradient_descent(digits_network(), **settings)
    else:
        local = privacy.example_level(
            digits_network(), clip=1.0, noise=privacy.noise_for(epsilon=epsilon, delta=DELTA), delta=DELTA,
            sampling_rate=1.0,
            entropy=privacy.from_seed(seed), ghost=True, **settings,
        )  # fmt: skip
    run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors([(x, y)])), rounds=1, seed=seed)
    return {name: run.server[name] - start.detach() for name, start in digits_network().named_parameters()}


def inversion_of_digits(count: int, seed: int) -> list[common.Row]:
    """How far off inverted rows are, in units of the distance between two rows."""
    x, y = ft.data.digits()
    x = x.double()
    apart = float(torch.pdist(x[: 10 * count]).median())
    found = []
    for epsilon in EPSILONS:
        off = []
        for row in range(count):
            change = told_of(x[row : row + 1], y[row : row + 1], epsilon, 1000 * seed + row)
            guess = attacks.linear_inputs(change["0.weight"], change["0.bias"]).nanmedian(0).values
            off.append(float((guess - x[row]).norm()) / apart)
        found.append(
            common.row(f"inversion, one row, ε = {epsilon:g}", "distance", [float(torch.tensor(off).median())])
        )
    together_rows, labels = x[:4], y[:4]
    change = told_of(together_rows, labels, math.inf, seed)
    inverted = attacks.gradient_inversion(
        digits_network(), change, nn.functional.cross_entropy, shape=(4, 64), targets=labels, restarts=2, seed=seed
    )
    farthest = torch.cdist(together_rows, inverted.inputs).min(1).values.max()
    return [*found, common.Row("inversion, four rows, ε = inf", "distance", float(farthest / apart))]


def neighbours(stations: int | None, seed: int) -> list[common.Row]:
    """R² of the latitude by models of the temperature, and their validation error, against α."""
    given = gtv_trust.load(stations)
    by_time = lambda rows: (torch.cat([rows[0][:, 3:6], torch.ones_like(rows[0][:, :1])], 1), rows[1])
    training, validation = given.training.map(by_time), given.validation.map(by_time)
    latitude = torch.stack([x[0, 0] for x, _ in given.training]).double() * 100
    order = ft.random.permutation(ft.random.key(seed), len(latitude))
    known, others = order[: len(order) // 2], order[len(order) // 2 :]
    found = []
    for alpha in ALPHAS:
        problem = solvers.linear_problem(training, given.network, alpha)
        w = solvers.direct(problem).parameters
        guess = attacks.learnt_attribute(w[known], latitude[known], ridge=1e-2)(w[others])
        x, y = validation.rows
        owner = torch.arange(len(w)).repeat_interleave(validation.counts)
        error = float(((x * w[owner]).sum(1) - y).square().mean())
        found.append(common.Row(f"GTV, α = {alpha:g}", "R² of the latitude", explained(guess, latitude[others])))
        found.append(common.Row(f"GTV, α = {alpha:g}", "validation error, °C²", error))
    return found


def draw(rows: Sequence[common.Row]) -> Figure:
    """Labels found under each defence, leak and accuracy against ρ, inversion against ε, attributes against α."""
    figure, axes = common.subplots(1, 4, figsize=(18, 4))
    value = {(row.setting, row.metric): row.ours for row in rows}
    names = list(dict.fromkeys(row.setting[8:] for row in rows if row.setting.startswith("labels")))
    seen = list(dict.fromkeys(row.metric for row in rows if row.setting.startswith("labels")))
    for place, metric in enumerate(seen):
        axes[0].barh([i + 0.25 * (place - 1) for i in range(len(names))],
                     [value[f"labels, {name}", metric] for name in names], height=0.25, label=metric)  # fmt: skip
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set(title="Labels of a split network", xlim=(0, 1))
    for count, style in zip(STEPS_SEEN, (":", "--", "-")):
        for name, colour in (("g", "C0"), ("a private feature", "C1")):
            axes[1].plot([f"{rho:g}" for rho in RHOS],
                         [value[f"z, ρ = {rho:g}", f"R² of {name}, T = {count}"] for rho in RHOS], style, color=colour,
                         label=f"R² of {name}, mean of {count}")  # fmt: skip
    axes[1].plot([f"{rho:g}" for rho in RHOS], [value[f"z, ρ = {rho:g}", "accuracy"] for rho in RHOS], color="k",
                 label="accuracy")  # fmt: skip
    axes[1].set(title="What z tells", xlabel="ρ")
    inverted = [value[f"inversion, one row, ε = {epsilon:g}", "distance"] for epsilon in EPSILONS]
    ticks = ["∞" if math.isinf(epsilon) else f"{epsilon:g}" for epsilon in EPSILONS]
    axes[2].semilogy(ticks, [max(each, 1e-9) for each in inverted], marker="o")
    axes[2].axhline(1.0, color="0.7")
    axes[2].set(title="Gradient inversion", xlabel="ε", ylabel="distance / that of two rows")
    axes[3].plot([f"{alpha:g}" for alpha in ALPHAS],
                 [value[f"GTV, α = {alpha:g}", "R² of the latitude"] for alpha in ALPHAS], marker="o")  # fmt: skip
    axes[3].set(title="Latitude by a neighbour", xlabel="α", ylabel="R²")
    for axis in axes[:2]:
        axis.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the attacks, print their tables and draw them."""
    options = common.arguments(__doc__).parse_args(argv)
    steps, count, stations = (5, 2, 16) if options.smoke else (200, 20, None)
    runs = []
    for seed in range(1, options.seeds + 1):
        rows = load(seed)
        runs.append([
            *label_leak(rows, steps, seed), *leak_of_values(rows, steps, seed), *inversion_of_digits(count, seed),
            *neighbours(stations, seed),
        ])  # fmt: skip
    found = [common.row(each[0].setting, each[0].metric, [row.ours for row in each]) for each in zip(*runs)]
    for part in ("labels", "z", "inversion", "GTV"):
        common.show_rows(part, [row for row in found if row.setting.startswith(part + ",")])
    common.finish("privacy.attacks", found, options, lambda: {"privacy_attacks": draw(found)})


if __name__ == "__main__":
    main()
