"""Fed-Heart-Disease of FLamby: four hospitals, its strategies at its settings, and hierarchical models.

Logistic regression of 13 covariates at four hospitals (486 patients to train, 254 to test, FLamby's own split), each
hospital standardised by its training rows. Pooled and local training are 50 epochs of Adam; the strategies have 15
rounds of 100 steps of SGD with batches of 4, at the rates of `config_heart_disease.json`. A model is tested on each
hospital, and on all test rows standardised together; "mean of hospitals" is what FLamby's bar of a strategy shows.
Published are the accuracies of seeds 42 to 46. Ours begin at the same weights, in float64; the batches differ.

FLamby's FedAdagrad has momentum (`beta=0.9`), and its second moments begin at 0 (`initial=0.0`). What the package's
words do not say: its batches go on over rounds where ours are permuted anew. Its Cyclic hands no weights on: every
hospital trains a model of its own in turn, and Cleveland's is tested. Both are run, this one and the cycle that its
name promises.

Then models that differ by hospital, on the published split and over as many others as `--seeds`, beside FedYogi at
FLamby's settings, the more frequent answer of each hospital, and each hospital alone and one model of all (FedAvg of
full steps) trained to the end. Nothing is tuned: priors are those of `hierarchical.regression`, α is 0.1 and 1.

Source: Ogier du Terrail et al. (2022), "FLamby: datasets and benchmarks for cross-silo federated learning in realistic
healthcare settings"; github.com/owkin/FLamby, `flamby/results/results_benchmark_fed_heart_disease`, commit edacf54d.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from experiments.trials.flamby import compared, drawn
from experiments.trials.flamby_published import AVERAGE, EACH, HOSPITALS, published
from fedtorch.federation.algorithms.ep import settled
from fedtorch.models import gibbs, hierarchical
from fedtorch.models.gibbs import deviations, global_priors

SPLIT, FIRST_SEED, FEATURES, BATCH, STEPS, EPOCHS, ROUNDS = 43, 42, 13, 4, 100, 50, 15
READING = result_pages.Reading(larger=".*")


class Rows(NamedTuple):
    """Rows x `(n, 13)`, y `(n, 1)` of the hospitals, each standardised by its own, and of all together by all."""

    train: ft.data.FederatedData
    test: ft.data.FederatedData
    all_train: ft.data.FederatedData
    all_test: ft.data.FederatedData


class Fitted(NamedTuple):
    """Log-odds of each hospital's rows, a list, and those of all rows standardised together, None where not defined."""

    own: Sequence[Tensor]
    together: Tensor | None


def split(labels: np.ndarray, state: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of training and test rows, ascending, as FLamby draws them: stratified where both labels are frequent."""
    _, counts = np.unique(labels, return_counts=True)
    stratify = labels if len(counts) > 1 and counts.min() > 2 else None
    train, test = train_test_split(
        np.arange(len(labels)), train_size=0.66, test_size=1 - 0.66, random_state=state, stratify=stratify
    )
    return np.sort(train), np.sort(test)


def standardised(x: Tensor, by: Tensor) -> Tensor:
    """As FLamby does, in float32."""
    return ((x - by.mean(0)) / (by.std(0) + 1e-9)).double()


def rows(state: int = SPLIT) -> Rows:
    """The rows of a split; FLamby's is 43."""
    data = ft.data.heart_disease()
    parts = [(x, y[:, None].double(), *split(y.numpy(), state)) for x, y in data]

    def of(which: int, together: bool) -> ft.data.FederatedData:
        everywhere = torch.cat([x[train] for x, _, train, _ in parts])
        each = [
            (standardised(part[0][part[which]], everywhere if together else part[0][part[2]]), part[1][part[which]])
            for part in parts
        ]
        return ft.data.from_tensors(each, names=data.names)

    return Rows(of(2, False), of(3, False), of(2, True).pool(), of(3, True).pool())


def linear(seed: int) -> nn.Linear:
    """The weights that FLamby begins with, PyTorch's for this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(FEATURES, 1).double()


def descent(seed: int, lr: float) -> ft.LocalSolver:
    """FLamby's steps of a round, from a seed's weights."""
    return ft.gradient_descent(
        linear(seed),
        steps=STEPS,
        batch_size=BATCH,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=partial(torch.optim.SGD, lr=lr),
    )


MOMENTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "initial": 0.0}
STRATEGIES: dict[str, Callable[[int], ft.Algorithm]] = {
    "FedAvg": lambda seed: ft.fedavg(descent(seed, 0.001)),
    "FedProx": lambda seed: ft.fedprox(descent(seed, 0.001), 0.01),
    "SCAFFOLD": lambda seed: ft.scaffold(descent(seed, 0.001)),
    "FedAdam": lambda seed: ft.fedadam(descent(seed, 0.01), lr=0.01, bias_correction=False, **MOMENTS),
    "FedYogi": lambda seed: ft.fedyogi(descent(seed, 0.003162), lr=0.01, **MOMENTS),
    "FedAdagrad": lambda seed: ft.fedadagrad(descent(seed, 0.003162), lr=0.316228, beta=0.9, eps=1e-8, initial=0.0),
    "FedAdagrad without momentum": lambda seed: ft.fedadagrad(
        descent(seed, 0.003162), lr=0.316228, eps=1e-8, initial=0.0
    ),
}


def one_model(parameters: Mapping[str, Tensor], of: Rows) -> Fitted:
    """One model for all hospitals and tests."""
    weight, bias = parameters["weight"], parameters["bias"]
    return Fitted([x @ weight.mT + bias for x, _ in of.test], of.all_test.rows[0] @ weight.mT + bias)


def own_models(parameters: Mapping[str, Tensor], of: Rows) -> Fitted:
    """A model for each hospital, `(4, ...)`."""
    each = zip(of.test, parameters["weight"], parameters["bias"])
    return Fitted([x @ weight.mT + bias for (x, _), weight, bias in each], None)


def client(parameters: Mapping[str, Tensor], k: int) -> dict[str, Tensor]:
    """Those of one hospital."""
    return {name: leaf[k] for name, leaf in parameters.items()}


def share(odds: Tensor, y: Tensor) -> float:
    """The share of right answers."""
    return int(((odds > 0) == (y > 0)).sum()) / len(y)


def accuracies(fitted: Fitted, of: Rows) -> dict[str, float]:
    """The share of right answers by test, and its mean over hospitals."""
    right = [share(z, y) for z, (_, y) in zip(fitted.own, of.test)]
    scores = dict(zip(HOSPITALS, right))
    if fitted.together is not None:
        scores["all rows"] = share(fitted.together, of.all_test.rows[1])
    return {**scores, AVERAGE: float(np.mean(right))}


def cycle(seed: int, rounds: int, clients: int = len(HOSPITALS)) -> list[int]:
    """Whose turn it is: a permutation after another, as FLamby draws them."""
    draws = np.random.default_rng(seed)
    return [int(k) for _ in range(rounds) for k in draws.permutation(clients)][:rounds]


def trained(algorithm: ft.Algorithm, data: ft.data.FederatedData, seed: int, rounds: int, **settings: Any) -> ft.Run:
    """A run without a bar."""
    return ft.run(algorithm, ft.InProcess(data), rounds=rounds, seed=seed, progress=False, **settings)


def cyclic(build: Callable[[ft.LocalSolver], ft.Algorithm], of: Rows, seed: int, rounds: int) -> Fitted:
    """Cleveland's model after hospitals have taken turns: each on a model of its own, or on the one before."""
    order = cycle(seed, rounds)
    run = trained(
        build(descent(seed, 0.01)),
        of.train,
        seed,
        rounds,
        cohort=lambda key, round: torch.tensor(order[round : round + 1]),
    )
    return one_model(client(run.tensors(), 0), of)


def published_methods(of: Rows, seed: int, smoke: bool = False) -> dict[str, Fitted]:
    """All that FLamby publishes, at its settings, from the weights of a seed."""
    rounds, epochs = (2, 1) if smoke else (ROUNDS, EPOCHS)
    alone = ft.gradient_descent(
        linear(seed),
        epochs=epochs,
        batch_size=BATCH,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=partial(torch.optim.Adam, lr=0.001),
    )
    fitted = {"pooled": one_model(client(trained(ft.pooled(alone), of.all_train, seed, 1).tensors(), 0), of)}
    own = trained(ft.separate(alone), of.train, seed, 1).tensors()
    fitted |= {f"{name} alone": one_model(client(own, k), of) for k, name in enumerate(HOSPITALS)}
    fitted[EACH] = own_models(own, of)
    fitted["Cyclic"] = cyclic(ft.separate, of, seed, rounds)
    fitted["Cyclic that hands weights on"] = cyclic(ft.fedavg, of, seed, rounds)
    for name, build in STRATEGIES.items():
        fitted[name] = one_model(client(trained(build(seed), of.train, seed, rounds).tensors(), 0), of)
    return fitted


def with_ones(data: ft.data.FederatedData) -> ft.data.FederatedData:
    """A constant column in front of x, and y `(n,)`."""
    return data.map(lambda part: (F.pad(part[0], (1, 0), value=1.0), part[1][:, 0]))


def majority(of: Rows) -> Fitted:
    """The more frequent answer of each hospital's training rows, whoever the patient is."""
    return Fitted([(y.mean() - 0.5).expand(len(tested), 1) for (_, y), (_, tested) in zip(of.train, of.test)], None)


def to_the_end(algorithm: Callable[[ft.LocalSolver], ft.Algorithm], of: Rows, seed: int, rounds: int) -> Fitted:
    """Rounds of ten full steps, with the ridge penalty ½ · 0.01 ‖w‖² in each hospital's mean loss."""
    local = ft.gradient_descent(
        linear(seed),
        steps=10,
        loss=F.binary_cross_entropy_with_logits,
        optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    )
    return own_models(trained(algorithm(local), of.train, seed, rounds).tensors(), of)


def hm1(of: Rows, seed: int, rounds: int) -> Fitted:
    """HM1 of answers ±1. Switzerland has no cholesterol, a column of zeros, of which `least_squares` would warn."""
    train = of.train.map(lambda part: (part[0], 2 * part[1][:, 0] - 1))
    local = ft.least_squares(ft.LinearHead(FEATURES, dtype=torch.float64), steps=20)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Expected columns of rank 13")
        each = trained(ft.matrix_normal(local), train, seed, rounds).tensors()["coefficients"]
    return own_models({"weight": each[:, None, :-1], "bias": each[:, None, -1]}, of)


def predicted(run: ft.Run, test: ft.data.FederatedData) -> Fitted:
    """Posterior probabilities of illness less a half, which have the sign of log-odds."""
    estimate = torch.tensor(ft.inference.predict(run, test)["estimate"]) - 0.5
    return Fitted([part[:, None] for part in estimate.split(test.counts.tolist())], None)


def ep(of: Rows, seed: int, rounds: int, random: Sequence[int] | None) -> Fitted:
    """A hierarchical logistic model with the priors of `hierarchical.regression`."""
    hierarchy = hierarchical.normal(
        1 + FEATURES,
        random=random,
        sd=torch.tensor([5.0] + [2.5] * FEATURES),
        variance=hierarchical.hyperpriors.log_normal(-2.0, 2.0),
    )
    model = hierarchical.generalised.logistic(hierarchy)
    return predicted(trained(ft.ep(model), with_ones(of.train), seed, rounds, until=settled()), with_ones(of.test))


def by_gibbs(of: Rows, seed: int, rounds: int) -> Fitted:
    """The same with all coefficients random, drawn: half-Cauchy scales and free intercepts."""
    kernel = gibbs.logistic.logistic_regression(deviation=deviations.normal())
    algorithm = ft.gibbs(kernel, gibbs.sparse.hierarchy(global_priors.gaussian(2.5)), sweeps=5, chains=2)
    train = of.train.map(lambda part: (part[0], part[1][:, 0]))
    sampler = ft.Sampler(burn_in=rounds // 4, sites=True)
    start = torch.zeros(FEATURES, dtype=torch.float64)
    run = ft.run(algorithm, ft.InProcess(train), start, rounds=rounds, seed=seed, record=sampler, progress=False)
    return predicted(run, of.test.map(lambda part: (part[0], part[1][:, 0])))


def coupled(local: ft.LocalSolver, alpha: float, of_all: bool) -> ft.Algorithm:
    """GTV between every two hospitals, of all weights or all but the intercept."""
    return ft.gtv(local, ft.Network.complete(len(HOSPITALS)), alpha if of_all else {"weight": alpha})


YOGI, INTERCEPT = "FedYogi, FLamby's settings", "EP, intercepts differ"


def own_methods(of: Rows, number: int, smoke: bool = False) -> dict[str, Fitted]:
    """Models that differ by hospital, and what they are measured against."""
    seed, rounds, few = FIRST_SEED + number, 20 if smoke else 300, 5 if smoke else 60
    yogi = trained(STRATEGIES["FedYogi"](seed), of.train, seed, 2 if smoke else ROUNDS)
    fitted = {
        "the more frequent answer of each hospital": majority(of),
        YOGI: one_model(client(yogi.tensors(), 0), of)._replace(together=None),
        "FedAvg, to the end": to_the_end(ft.fedavg, of, seed, rounds),
        "each hospital alone, to the end": to_the_end(ft.separate, of, seed, rounds),
    }
    for alpha in (0.1, 1.0):
        for of_all, what in ((True, "all weights"), (False, "all but intercepts")):
            build = partial(coupled, alpha=alpha, of_all=of_all)
            fitted[f"GTV of {what}, α = {alpha:g}"] = to_the_end(build, of, seed, rounds)
    fitted["HM1"] = hm1(of, seed, few)
    fitted[INTERCEPT] = ep(of, seed, 60, [0])
    fitted["Gibbs, all coefficients differ"] = by_gibbs(of, seed, few)
    return fitted


def scored(methods: Sequence[tuple[Rows, Mapping[str, Fitted]]]) -> dict[str, list[dict[str, float]]]:
    """Accuracies by method, over seeds or splits."""
    return {name: [accuracies(fitted[name], of) for of, fitted in methods] for name in methods[0][1]}


def draw(rows: Sequence[common.Row]) -> dict[str, Figure]:
    """The accuracy by method, FLamby's beside ours."""
    return drawn(rows, AVERAGE, "flamby_heart", "accuracy")


def main(argv: Sequence[str] | None = None) -> None:
    """Run FLamby's methods from its seeds, then models that differ by hospital on its split and on others."""
    options = common.arguments(__doc__).parse_args(argv)
    given = rows()
    theirs = [(given, published_methods(given, FIRST_SEED + i, options.smoke)) for i in range(options.seeds)]
    own = scored([(given, own_methods(given, 0, options.smoke))])
    others = [rows(SPLIT + 1 + i) for i in range(0 if options.smoke else options.seeds)]
    splits = scored([(of, own_methods(of, i)) for i, of in enumerate(others)]) if others else {}
    made = compared(scored(theirs), own, splits, published, INTERCEPT, (YOGI, "each hospital alone, to the end"))
    common.show_rows("Fed-Heart-Disease of FLamby", made)
    common.finish("trials.flamby_heart", made, options, lambda: draw(made))


if __name__ == "__main__":
    main()
