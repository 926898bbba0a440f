"""VertiBench: columns split over parties by importance and by correlation, and what vertical models make of it.

Four parties, on scikit-learn's digits, breast cancer and wine. By importance, shares of the columns are drawn from a
Dirichlet distribution of parameter α (each party has one column at least), so that at α = 0.1 one party has nearly all
and at 100 all have as many. By correlation, every party has as many columns and a permutation of them is sought whose
score Icor, correlation between parties less that within (the sd of the singular values of each block of the rank
correlations), lies a share β of the way from the least to the largest one. The rules are those of the package
`vertibench` 0.1.2, the first with the same draws; permutations are improved by 400 swaps here, there by a genetic
search.

Networks have VertiBench's hyperparameters: at each party hidden layers of 100 and 100 units, at the server one of 200
units of all that they send, Adam at 1e-3 with weight decay 1e-5, halved every ten of fifty epochs, batches of 128.
Beside the split network: the same of all columns in one place (one party), the same of the largest party alone, one
whose parties send every number in two bits (VertiBench's C-VFL compresses, too), and a Bayesian linear model of all
columns (SFVI, without noise on what parties send). Three quarters of the rows train.

Published are figures of other data sets (covtype, letter, gisette, …), which are not at hand, nor was the paper: only
a pattern can be compared, as the public reviews of the paper tell it of its Figure 5. The accuracy of split networks
hardly depends on α and β, and of four kinds of algorithms only the compressed one responds. "range" is the largest
less the smallest mean over α (or β), beside it the standard error of a difference of two of the means.

Source: Wu, Hou, He (2024), "VertiBench: advancing feature distribution diversity in vertical federated learning
benchmarks", ICLR; github.com/Xtra-Computing/VertiBench, `HyperParameters.md`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from sklearn import datasets
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from fedtorch import vfl
from fedtorch.vfl.model import likelihoods

PARTIES, HIDDEN, SERVER, BATCH, EPOCHS = 4, 100, 200, 128, 50
ALPHAS, BETAS = (0.1, 1.0, 10.0, 100.0), (0.0, 0.3, 0.6, 1.0)
DATA: dict[str, Callable[..., Any]] = {
    "digits": datasets.load_digits,
    "breast cancer": datasets.load_breast_cancer,
    "wine": datasets.load_wine,
}
SPLIT, BITS, LINEAR = "split network", "split network, two bits", "Bayesian linear model"
WHOLE, ALONE = "all columns in one place", "largest party alone"
READING = result_pages.Reading(larger="accuracy", across=r"(?P<line>.*) at (?P<column>[αβ] = .*)")


def by_importance(width: int, alpha: float, seed: int, parties: int = PARTIES) -> list[list[int]]:
    """The columns of each party, whose shares are Dirichlet(α), drawn as `vertibench` does."""
    draws = np.random.RandomState(seed)
    shares: list[float] = []
    for left in range(parties - 1, 0, -1):  # a stick is broken, so that small α give numbers
        shares.append((1 - sum(shares)) * draws.beta(alpha, sum([alpha] * left)))
    shares.append(1 - sum(shares))
    if sum(shares) < 1 - 1e-6:
        shares[draws.randint(parties)] = 1.0
    first = [int(column) for column in draws.choice(width, size=parties, replace=False)]
    owner = draws.choice(parties, size=width, p=shares)
    return [[first[j], *(c for c in range(width) if owner[c] == j and c not in first)] for j in range(parties)]


def _spread(values: np.ndarray) -> float:
    """The sd of singular values on the scale of their number; 0 of one."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def icor(correlation: np.ndarray, parties: Sequence[Sequence[int]]) -> float:
    """Correlation between parties less that within them."""
    count = len(parties)
    block = lambda i, j: correlation[np.ix_(parties[i], parties[j])]
    spread = lambda values: _spread(np.linalg.svd(values, compute_uv=False))
    each = {(i, j): spread(block(i, j)) for i in range(count) for j in range(i + 1)}
    of = lambda i, j: each[max(i, j), min(i, j)]
    return float(np.mean([of(i, j) - of(i, i) for i in range(count) for j in range(count) if i != j]))


def searched(
    correlation: np.ndarray, loss: Callable[[float], float], draws: np.random.RandomState, swaps: int
) -> tuple[list[list[int]], float]:
    """A permutation that makes a loss of Icor small, by swaps of two columns, and its Icor."""
    order = draws.permutation(len(correlation))
    parts = lambda: [part.tolist() for part in np.array_split(order, PARTIES)]
    best = icor(correlation, parts())
    for _ in range(swaps):
        i, j = draws.randint(len(order), size=2)
        order[[i, j]] = order[[j, i]]
        score = icor(correlation, parts())
        if loss(score) <= loss(best):
            best = score
        else:
            order[[i, j]] = order[[j, i]]
    return parts(), best


def by_correlation(x: np.ndarray, beta: float, seed: int, swaps: int = 400) -> list[list[int]]:
    """The columns of each party, as many each, whose Icor is β of the way from the least to the largest."""
    draws = np.random.RandomState(seed)
    correlation = np.nan_to_num(np.asarray(spearmanr(x)[0]))
    least, most = (searched(correlation, loss, draws, swaps)[1] for loss in (lambda score: score, lambda score: -score))
    target = beta * most + (1 - beta) * least
    return searched(correlation, lambda score: abs(score - target), draws, swaps)[0]


class Rows(NamedTuple):
    """Standardised rows of training and test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int


def rows(name: str, seed: int, few: bool = False) -> Rows:
    """The rows of a data set, standardised by the training rows; columns that do not vary are left out."""
    x, y = DATA[name](return_X_y=True)
    x, y = (x[:120], y[:120]) if few else (x, y)
    train, test = train_test_split(np.arange(len(y)), test_size=0.25, random_state=seed, stratify=None if few else y)
    x = x[:, x[train].std(0) > 0]
    x = (x - x[train].mean(0)) / x[train].std(0)
    part = lambda of: (torch.tensor(x[of], dtype=torch.float32), torch.tensor(y[of], dtype=torch.float32))
    return Rows(part(train), part(test), int(y.max()) + 1)


class TwoBits(nn.Module):
    """A network whose numbers are sent in two bits: four levels in [0, 1], with the gradient of what is rounded."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """What is sent of rows."""
        value = self.network(x).sigmoid()
        return value + ((3 * value).round() / 3 - value).detach()


def vertical(part: tuple[Tensor, Tensor], parties: Sequence[Sequence[int]]) -> vfl.VerticalData:
    """Aligned rows of parties with these columns."""
    return vfl.VerticalData(tuple(part[0][:, list(columns)] for columns in parties), part[1])


def halving(weights: Any) -> Any:
    """Adam and its schedule, by epochs."""
    optimizer = torch.optim.Adam(weights, lr=1e-3, weight_decay=1e-5)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)}


def network(of: Rows, parties: Sequence[Sequence[int]], seed: int, epochs: int, bits: bool = False) -> float:
    """The accuracy of a split network on test rows."""
    bottoms: list[nn.Module] = [vfl.mlp(len(columns), [HIDDEN], HIDDEN) for columns in parties]
    top = nn.Sequential(nn.ReLU(), vfl.mlp(HIDDEN * len(parties), [SERVER], of.classes))
    model = vfl.SplitNetwork(
        [TwoBits(bottom) for bottom in bottoms] if bits else bottoms,
        likelihoods.categorical(of.classes),
        seed=int(ft.random.fold_in(ft.random.key(seed), 0)),
        combine=vfl.concatenated,
        top=top,
        widths=[HIDDEN] * len(parties),
        optimizer=halving,
    )
    quiet: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    with common.quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(validation_step|num_workers).*")
        trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", **quiet)
        trainer.fit(model, vfl.VerticalLoader(vertical(of.train, parties), batch_size=BATCH))
    model.eval()
    prediction = model.predict(vertical(of.test, parties).features)[0].argmax(0)
    return float((prediction == of.test[1]).double().mean())


def linear(of: Rows, parties: Sequence[Sequence[int]], seed: int, steps: int) -> float:
    """The accuracy of a linear model whose coefficients have N(0, 1) priors and a posterior at each party."""
    predictors = [vfl.linear(len(columns), outputs=of.classes) for columns in parties]
    model = vfl.augmented(likelihoods.categorical(of.classes), predictors, rho=1.0)
    guide = vfl.Guide(vfl.noiseless(), vfl.diagonal())
    data = vertical(of.train, parties)
    fit = vfl.sfvi(model, guide, data, seed=seed, steps=steps, lr=0.05, progress=False)
    prediction = fit.predict(vertical(of.test, parties).features, draws=50, noise=False)[0].argmax(0)
    return float((prediction == of.test[1]).double().mean())


def scored(of: Rows, parties: Sequence[Sequence[int]], seed: int, smoke: bool) -> dict[str, float]:
    """Accuracies by model."""
    epochs, steps = (1, 5) if smoke else (EPOCHS, 300)
    largest = max(parties, key=len)
    return {
        SPLIT: network(of, parties, seed, epochs),
        BITS: network(of, parties, seed, epochs, bits=True),
        ALONE: network(of, [largest], seed, epochs),
        LINEAR: linear(of, parties, seed, steps),
    }


def spans(runs: dict[str, dict[str, list[float]]], name: str, which: str) -> list[common.Row]:
    """The largest less the smallest mean over α or β by model, with the standard error of a difference."""
    made = []
    for model in (SPLIT, BITS, ALONE, LINEAR):
        each = [values[model] for setting, values in runs.items() if setting.startswith(which)]
        means, errors = [float(np.mean(v)) for v in each], [common.standard_error(v) or 0.0 for v in each]
        metric = f"range of accuracy over {which}"
        error = math.sqrt(2) * float(np.sqrt(np.mean(np.square(errors))))
        made.append(common.Row(f"{name}, {model}", metric, max(means) - min(means)))
        made.append(common.Row(f"{name}, {model}", f"standard error of a difference over {which}", error))
    return made


def draw(found: dict[str, dict[str, dict[str, list[float]]]]) -> Figure:
    """Accuracy by α and by β, a row for each data set."""
    figure, axes = common.subplots(len(found), 2, figsize=(9, 2.7 * len(found)), sharey="row", squeeze=False)
    for (name, runs), pair in zip(found.items(), axes):
        for which, axis in zip("αβ", pair):
            settings = [setting for setting in runs if setting.startswith(which)]
            for model in (SPLIT, BITS, ALONE, LINEAR):
                values = [runs[setting][model] for setting in settings]
                errors = [common.standard_error(v) or 0.0 for v in values]
                axis.errorbar(range(len(settings)), [np.mean(v) for v in values], errors, marker="o", label=model)
            axis.axhline(
                float(np.mean([v for s in settings for v in runs[s][WHOLE]])), color="0.6", ls="--", label=WHOLE
            )
            axis.set_xticks(range(len(settings)), settings)
            axis.set_title(name)
        pair[0].set_ylabel("test accuracy")
    axes[0, 1].legend(frameon=False, fontsize=8)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Split, train and score; print accuracies and how far they depend on the split."""
    parser = common.arguments(__doc__)
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=DATA, help="data sets (default all)")
    options = parser.parse_args(argv)
    names = ["wine"] if options.smoke else options.data
    alphas, betas = ((0.1,), (1.0,)) if options.smoke else (ALPHAS, BETAS)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in names:
        runs = found.setdefault(name, {})
        for seed in range(options.seeds):
            of = rows(name, seed, options.smoke)
            width = of.train[0].shape[1]
            whole = network(of, [range(width)], seed, 1 if options.smoke else EPOCHS)
            splits = {f"α = {alpha:g}": by_importance(width, alpha, seed) for alpha in alphas}
            of_correlation = partial(by_correlation, of.train[0].numpy(), seed=seed, swaps=20 if options.smoke else 400)
            splits |= {f"β = {beta:g}": of_correlation(beta) for beta in betas}
            for setting, parties in splits.items():
                for model, value in {**scored(of, parties, seed, options.smoke), WHOLE: whole}.items():
                    runs.setdefault(setting, {}).setdefault(model, []).append(value)
    made = []
    for name, runs in found.items():
        for setting, models in runs.items():
            made += [
                common.row(f"{name}, {model} at {setting}", "accuracy", values) for model, values in models.items()
            ]
        for which in "αβ":
            made += spans(runs, name, which)
    common.show_rows("VertiBench's splits", made)
    common.finish("trials.vertibench", made, options, lambda: {"trials_vertibench": draw(found)})


if __name__ == "__main__":
    main()
