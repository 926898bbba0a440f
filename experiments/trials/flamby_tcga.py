"""Fed-TCGA-BRCA of FLamby: survival of breast cancer in six regions, its strategies, and hierarchical models.

A linear Cox model of 39 covariates (866 patients to train, 222 to test, FLamby's own split). Pooled and local training
are 30 epochs of Adam at 0.1; the strategies have 5 rounds of 100 steps of SGD at the rates of `config_tcga_brca.json`.
All take batches of 8 patients, whose partial likelihood knows no other patients. The covariates are used as they are,
the age in years. A model is tested on each region by its concordance index, and on all test rows together. Published
are the indices of seeds 42 to 46. Ours begin at the same weights, in float64; the batches differ.

FLamby's FedAdagrad, moments and Cyclic are those of `trials.flamby_heart`, which says what they are. Canada has three
pairs to test, Europe 47: their indices are of few values.

Then models that are no strategy of FLamby's, on its split and over as many others as `--seeds` with as many rows and
deaths of each region, ages in decades from 60: one Cox model (FedAvg of full steps; the risk sets are regions, a
stratified likelihood) and each region alone, trained to the end; GTV at α of 0.1 and 1; EP of a hierarchical
exponential model (a Poisson model of the event whose offset is the log of the time), whose intercepts, or intercepts
and ages, differ by region. Nothing is tuned. HM1 and Gibbs are for responses without censoring and are left out.

Source: Ogier du Terrail et al. (2022), "FLamby: datasets and benchmarks for cross-silo federated learning in realistic
healthcare settings"; github.com/owkin/FLamby, `flamby/results/results_benchmark_fed_tcga_brca`, commit edacf54d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from experiments.trials.flamby import compared, drawn
from experiments.trials.flamby_heart import MOMENTS, client, cycle, trained
from experiments.trials.flamby_tcga_published import AVERAGE, EACH, REGIONS, published
from fedtorch.federation.algorithms.ep import settled
from fedtorch.models import hierarchical

FIRST_SEED, FEATURES, BATCH, STEPS, EPOCHS, ROUNDS = 42, 39, 8, 100, 30, 5
DAYS = 365.25  # of a year, the unit of time of the exponential model
READING = result_pages.Reading(larger=".*")


class Rows(NamedTuple):
    """Rows x `(n, 39)`, y `(n, 2)`: the event and the time in days, of the regions."""

    train: ft.data.FederatedData
    test: ft.data.FederatedData


def rows() -> Rows:
    """FLamby's split."""
    return Rows(*(ft.data.fed_tcga_brca(train, dtype=torch.float64) for train in (True, False)))


def resplit(of: Rows, seed: int) -> Rows:
    """As many rows of each region to train and to test, and as many deaths, others by a seed."""
    draws, parts = np.random.default_rng(seed), []
    for train, test in zip(of.train, of.test):
        both = [torch.cat(leaves) for leaves in zip(train, test)]
        chosen: list[list[Tensor]] = [[], []]
        for event in (0, 1):
            places = (both[1][:, 0] == event).nonzero()[:, 0]
            order = places[torch.as_tensor(draws.permutation(len(places)))]
            first = int((train[1][:, 0] == event).sum())
            chosen[0].append(order[:first])
            chosen[1].append(order[first:])
        parts.append([tuple(leaf[torch.cat(places)] for leaf in both) for places in chosen])
    return Rows(*(ft.data.from_tensors([part[i] for part in parts], names=of.train.names) for i in (0, 1)))


def scaled(of: Rows) -> Rows:
    """The age in decades from 60."""
    shift, unit = torch.zeros(FEATURES).double(), torch.ones(FEATURES).double()
    shift[0], unit[0] = 60.0, 10.0
    return Rows(*(data.map(lambda part: ((part[0] - shift) / unit, part[1])) for data in of))


def cox(score: Tensor, target: Tensor) -> Tensor:
    """Minus the log partial likelihood of a batch over its size: score `(n, 1)`, target (event, time) `(n, 2)`."""
    order = target[:, 1].argsort(descending=True, stable=True)
    score, event = score[order, 0], target[order, 0]
    return (event * (score.logcumsumexp(0) - score)).mean()


def linear(seed: int) -> nn.Linear:
    """The weights that FLamby begins with, PyTorch's for this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(FEATURES, 1).double()


def descent(seed: int, lr: float) -> ft.LocalSolver:
    """FLamby's steps of a round, from a seed's weights."""
    sgd = partial(torch.optim.SGD, lr=lr)
    return ft.gradient_descent(linear(seed), steps=STEPS, batch_size=BATCH, loss=cox, optimizer=sgd)


STRATEGIES: dict[str, Callable[[int], ft.Algorithm]] = {
    "FedAvg": lambda seed: ft.fedavg(descent(seed, 0.1)),
    "FedProx": lambda seed: ft.fedprox(descent(seed, 0.1), 0.1),
    "SCAFFOLD": lambda seed: ft.scaffold(descent(seed, 0.01)),
    "FedAdam": lambda seed: ft.fedadam(descent(seed, 0.01), lr=0.1, bias_correction=False, **MOMENTS),
    "FedYogi": lambda seed: ft.fedyogi(descent(seed, 0.01), lr=0.1, **MOMENTS),
    "FedAdagrad": lambda seed: ft.fedadagrad(descent(seed, 0.01), lr=1.0, beta=0.9, eps=1e-8, initial=0.0),
}
Risks = Sequence[Tensor]  # of each region's rows


def one_model(parameters: Mapping[str, Tensor], of: Rows) -> Risks:
    """One model for all regions."""
    return [x @ parameters["weight"].mT + parameters["bias"] for x, _ in of.test]


def own_models(parameters: Mapping[str, Tensor], of: Rows) -> Risks:
    """A model for each region, `(6, ...)`."""
    return [x @ weight.mT + bias for (x, _), weight, bias in zip(of.test, parameters["weight"], parameters["bias"])]


def concordance(risk: Tensor, target: Tensor) -> float:
    """Harrell's index of some rows."""
    index = ft.metrics.concordance_index()
    mask = torch.ones(1, len(target), dtype=torch.bool)
    return float(index.compute(index.update(risk.reshape(1, -1), target[None], mask)))


def indices(risks: Risks, of: Rows, together: bool) -> dict[str, float]:
    """The index by test, and its mean over regions."""
    each = [concordance(risk, y) for risk, (_, y) in zip(risks, of.test)]
    scores = dict(zip(REGIONS, each))
    if together:
        scores["all rows"] = concordance(torch.cat([risk.reshape(-1) for risk in risks]), of.test.pool().rows[1])
    return {**scores, AVERAGE: float(np.mean(each))}


def published_methods(of: Rows, seed: int, smoke: bool = False) -> dict[str, dict[str, float]]:
    """All that FLamby publishes, at its settings, from the weights of a seed."""
    rounds, epochs = (2, 1) if smoke else (ROUNDS, EPOCHS)
    adam = partial(torch.optim.Adam, lr=0.1)
    alone = ft.gradient_descent(linear(seed), epochs=epochs, batch_size=BATCH, loss=cox, optimizer=adam)
    test = lambda parameters: indices(one_model(parameters, of), of, True)
    pooled = trained(ft.pooled(alone), of.train.pool(), seed, 1)
    scores = {"pooled": test(client(pooled.tensors(), 0))}
    own = trained(ft.separate(alone), of.train, seed, 1).tensors()
    scores |= {f"{name} alone": test(client(own, k)) for k, name in enumerate(REGIONS)}
    scores[EACH] = indices(own_models(own, of), of, False)
    order = cycle(seed, rounds, len(REGIONS))
    turns = lambda key, round: torch.tensor(order[round : round + 1])
    for name, build in (("Cyclic", ft.separate), ("Cyclic that hands weights on", ft.fedavg)):
        run = trained(build(descent(seed, 0.01)), of.train, seed, rounds, cohort=turns)
        scores[name] = test(client(run.tensors(), 0))
    for name, made in STRATEGIES.items():
        scores[name] = test(client(trained(made(seed), of.train, seed, rounds).tensors(), 0))
    return scores


def to_the_end(algorithm: Callable[[ft.LocalSolver], ft.Algorithm], of: Rows, seed: int, rounds: int) -> Risks:
    """Rounds of ten full steps, with the ridge penalty ½ · 0.01 ‖w‖² in each region's mean loss."""
    sgd = partial(torch.optim.SGD, lr=0.1, weight_decay=0.01)
    local = ft.gradient_descent(linear(seed), steps=10, loss=cox, optimizer=sgd)
    return own_models(trained(algorithm(local), of.train, seed, rounds).tensors(), of)


def exponential(data: ft.data.FederatedData) -> ft.data.FederatedData:
    """Rows of the Poisson model: a constant in front of x, the event, and the log of the years as offset."""

    def made(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x, y = part
        return F.pad(x, (1, 0), value=1.0), y[:, 0], {"offset": (y[:, 1] / DAYS).clamp(min=1 / DAYS).log()}

    return data.map(made)


def ep(of: Rows, seed: int, rounds: int, random: Sequence[int]) -> Risks:
    """The hierarchical exponential model, with the priors of `hierarchical.regression`; risks are log rates."""
    scale = torch.tensor([5.0] + [2.5] * FEATURES)
    variance = hierarchical.hyperpriors.log_normal(-2.0, 2.0)
    hierarchy = hierarchical.normal(1 + FEATURES, random=random, sd=scale, variance=variance)
    model = hierarchical.generalised.poisson(hierarchy)
    run = trained(ft.ep(model), exponential(of.train), seed, rounds, until=settled())
    test = exponential(of.test).map(lambda part: (part[0], part[1], {"offset": torch.zeros_like(part[1])}))
    rate = torch.tensor(ft.inference.predict(run, test)["estimate"].to_numpy())
    return rate.split(test.counts.tolist())


ADAM, INTERCEPT = "FedAdam, FLamby's settings", "EP, intercepts differ"


def own_methods(given: Rows, number: int, smoke: bool = False) -> dict[str, dict[str, float]]:
    """Models that are no strategy of FLamby's, and what they are measured against."""
    seed, rounds, of = FIRST_SEED + number, 20 if smoke else 300, scaled(given)
    adam = trained(STRATEGIES["FedAdam"](seed), given.train, seed, 2 if smoke else ROUNDS)
    risks: dict[str, Risks] = {ADAM: one_model(client(adam.tensors(), 0), given)}
    risks["FedAvg, to the end"] = to_the_end(ft.fedavg, of, seed, rounds)
    risks["each region alone, to the end"] = to_the_end(ft.separate, of, seed, rounds)
    for alpha in (0.1, 1.0):
        build = partial(ft.gtv, network=ft.Network.complete(len(REGIONS)), alpha=alpha)
        risks[f"GTV, α = {alpha:g}"] = to_the_end(build, of, seed, rounds)
    risks[INTERCEPT] = ep(of, seed, 60, [0])
    if not smoke:
        risks["EP, intercepts and ages differ"] = ep(of, seed, 60, [0, 1])
    return {name: indices(each, of, name != "each region alone, to the end") for name, each in risks.items()}


def by_method(runs: Sequence[Mapping[str, dict[str, float]]]) -> dict[str, list[dict[str, float]]]:
    """Indices by method, over seeds or splits."""
    return {name: [run[name] for run in runs] for name in runs[0]}


def draw(rows: Sequence[common.Row]) -> dict[str, Figure]:
    """The concordance by method, FLamby's beside ours."""
    return drawn(rows, AVERAGE, "flamby_tcga", "concordance")


def main(argv: Sequence[str] | None = None) -> None:
    """Run FLamby's methods from its seeds, then models that are not its own on its split and on others."""
    options = common.arguments(__doc__).parse_args(argv)
    given = rows()
    theirs = by_method([published_methods(given, FIRST_SEED + i, options.smoke) for i in range(options.seeds)])
    own = by_method([own_methods(given, 0, options.smoke)])
    others = [own_methods(resplit(given, i), i) for i in range(0 if options.smoke else options.seeds)]
    splits = by_method(others) if others else {}
    made = compared(theirs, own, splits, published, INTERCEPT, (ADAM, "FedAvg, to the end"))
    common.show_rows("Fed-TCGA-BRCA of FLamby", made)
    common.finish("trials.flamby_tcga", made, options, lambda: draw(made))


if __name__ == "__main__":
    main()
