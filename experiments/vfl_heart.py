"""Heart disease over two parties: split networks, plain and hierarchical Bayes (Table 3 of the VFL source).

918 patients, five covariates at one party and six at the other, 10-fold cross-validation; layers of 8, 8 and 2 units at
each party, Adam at 1e-3 with full batches for 50 000 iterations. Numbers are standardised within the training part of a
fold; a dummy stands for every level. Beside the published rows (a split network, and the hierarchical Bayes one with
ρ = 1, 5, 10, where the last layer's weights are random and all others at their mode without a prior):

- early-stopped versions of both, on a tenth of the training rows: 50 000 iterations without are a weak baseline,
- hierarchical Bayes with a normal prior on all other weights too, of variance 1/8 (one over the layers' width), whose
  mode is found: a prior in place of early stopping,
- a logistic regression of all covariates in one place.

Columns are those of the source: accuracy (sd over folds), mean log-likelihood of all test predictions and of the wrong
ones (sd over predictions); and the expected calibration error (ten bins). Differences from the logistic regression are
paired: of each row, averaged over repetitions, with the standard error over the 918 rows. `--seeds` repeats the
cross-validation with other folds and starts; all folds, models and repetitions train as one batch.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import lightning as L
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from experiments import common
from fedtorch import data as ft_data
from fedtorch import random, vfl
from fedtorch.data import VerticalTable
from fedtorch.models import likelihoods
from fedtorch.models.split_nn import mlp

FOLDS, WIDTH = 10, 8
RHOS = (1.0, 5.0, 10.0)
PUBLISHED = {  # accuracy, log-likelihood of all predictions, of the wrong ones
    "split network": (80.73, -2.21, -10.95),
    "hierarchical Bayes, ρ = 1": (86.39, -0.36, -1.99),
    "hierarchical Bayes, ρ = 5": (84.98, -0.59, -3.53),
    "hierarchical Bayes, ρ = 10": (84.10, -0.67, -3.89),
}
METRICS = ("accuracy (%)", "log-likelihood", "log-likelihood, wrong predictions")


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is computed."""

    steps: int = 50_000
    every: int = 100  # steps between validations of the early-stopped versions
    patience: int = 10
    draws: int = 300
    repeats: int = 1


class Fold(NamedTuple):
    """Rows of every fold of every repetition, padded by rows of weight zero."""

    train: Tensor  # (F, n) indices
    weight: Tensor  # (F, n)
    test: Tensor  # (F, m)
    test_weight: Tensor  # (F, m)


def folds(rows: int, repeats: int) -> Fold:
    """Random folds, `F = 10 · repeats`."""
    trains, tests = [], []
    for repeat in range(repeats):
        order = random.permutation(random.key(repeat), rows)
        for i in range(FOLDS):
            tests.append(order[i::FOLDS])
            trains.append(torch.cat([order[j::FOLDS] for j in range(FOLDS) if j != i]))
    return Fold(*_padded(trains), *_padded(tests))


def _padded(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(len(part) for part in parts)
    index = torch.stack([torch.cat([part, part[:1].expand(longest - len(part))]) for part in parts])
    weight = torch.stack([(torch.arange(longest) < len(part)).float() for part in parts])
    return index, weight


def standardised(table: VerticalTable, fold: Fold) -> tuple[Tensor, Tensor]:
    """Features of training and test rows, `(F, n, d)` and `(F, m, d)`, on the scale of each fold's training rows."""
    columns = list(table.continuous)
    train, test = table.x[fold.train], table.x[fold.test]
    weight = fold.weight.unsqueeze(-1)
    mean = (train[..., columns] * weight).sum(1, True) / weight.sum(1, True)
    variance = ((train[..., columns] - mean).square() * weight).sum(1, True) / weight.sum(1, True)
    for part in (train, test):
        part[..., columns] = (part[..., columns] - mean) / variance.sqrt()
    return train, test


def vertical(table: VerticalTable, x: Tensor, rows: Tensor, weight: Tensor, copies: int) -> vfl.VerticalData:
    """Aligned rows of both parties, every fold `copies` times."""
    each = lambda value: value.repeat_interleave(copies, 0)
    parts = ft_data.split_features(each(x), table.parties)
    return vfl.VerticalData(tuple(parts), each(table.y[rows].float()), weight=each(weight))


def network(
    table: VerticalTable, rhos: Sequence[float], count: int, weight_sd: float | None = None
) -> vfl.SplitNetwork:
    """Networks of all folds × ρ, which start alike in a fold; ρ = 0 is a plain split network."""
    keys = random.fold_in(random.key(1), torch.arange(count)).repeat_interleave(len(rhos))
    bayes = vfl.HierarchicalBayes(rho=torch.tensor(rhos).repeat(count), weight_sd=weight_sd)
    bottoms = [mlp(len(columns), (WIDTH, WIDTH), 2) for columns in table.parties]
    return vfl.SplitNetwork(bottoms, likelihoods.categorical(2), keys=keys, bayes=bayes, names=["first", "second"])


def trained(
    model: vfl.SplitNetwork, rows: vfl.VerticalData, size: Size, validation: vfl.VerticalData | None = None
) -> vfl.SplitNetwork:
    """The network after Lightning's `Trainer`, with early stopping where there are validation rows."""
    callbacks = [] if validation is None else [vfl.StackedEarlyStopping(size.patience)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer = L.Trainer(
            max_steps=size.steps, max_epochs=-1, accelerator="auto", devices=1, logger=False, callbacks=callbacks,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            num_sanity_val_steps=0,
        )  # fmt: skip
        steps = min(size.every, size.steps)
        trainer.fit(
            model, vfl.VerticalLoader(rows, steps=steps), None if validation is None else vfl.VerticalLoader(validation)
        )
    return model.cpu()


def chances(model: vfl.SplitNetwork, rows: vfl.VerticalData, models: int, draws: int) -> Tensor:
    """Predicted probability of disease, `(models, F, m)`."""
    return model.predict(rows.features, draws=draws)[:, 1].unflatten(0, (-1, models)).transpose(0, 1)


def logistic(table: VerticalTable, fold: Fold, train: Tensor, test: Tensor) -> Tensor:
    """Of a logistic regression of all covariates, `(F, m)`."""
    from sklearn.linear_model import LogisticRegression

    found = []
    for x, rows, weight, new in zip(train, fold.train, fold.weight, test):
        fit = LogisticRegression(max_iter=1000).fit(x.numpy(), table.y[rows].numpy(), sample_weight=weight.numpy())
        found.append(torch.from_numpy(fit.predict_proba(new.numpy())[:, 1]).float())
    return torch.stack(found)


def predictions(table: VerticalTable, size: Size) -> tuple[dict[str, Tensor], Fold]:
    """Predicted probabilities of every model on all test rows, `(F, m)` each."""
    fold = folds(len(table.y), size.repeats)
    train, test = standardised(table, fold)
    count = len(fold.train)
    found = {"logistic regression, all covariates": logistic(table, fold, train, test)}

    def add(names: Sequence[str], model: vfl.SplitNetwork, early: bool) -> None:
        copies = len(names)
        rows = vertical(table, train, fold.train, fold.weight, copies)
        validation = None
        if early:  # rows are in random order: the first tenth
            held = (torch.arange(train.shape[1]) < train.shape[1] // 10).float()
            validation = rows._replace(weight=rows.weight * held)
            rows = rows._replace(weight=rows.weight * (1 - held))
        trained(model, rows, size, validation)
        new = vertical(table, test, fold.test, fold.test_weight, copies)
        found.update(zip(names, chances(model, new, copies, size.draws)))

    published = list(PUBLISHED)
    add(published, network(table, (0.0, *RHOS), count), False)
    stopped = [f"{name}, early stopping" for name in published[:2]]
    add(stopped, network(table, (0.0, RHOS[0]), count), True)
    whole = [f"{name}, prior on all weights" for name in published[1:]]
    add(whole, network(table, RHOS, count, weight_sd=WIDTH**-0.5), False)
    return found, fold


def log_likelihood(chance: Tensor, label: Tensor) -> Tensor:
    """Of Bernoulli labels; a network that is certain and wrong in float32 has the smallest normal number."""
    return torch.where(label == 1, chance, 1 - chance).clamp_min(torch.finfo(torch.float32).tiny).log()


def calibration(chance: Tensor, label: Tensor, bins: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """Mean prediction, share of disease and rows of each bin of equal width, `(bins,)` each."""
    which = (chance * bins).long().clamp(0, bins - 1)
    rows = which.bincount(minlength=bins)
    mean = lambda value: torch.zeros(bins).scatter_add_(0, which, value.float()) / rows.clamp_min(1)
    return mean(chance), mean(label), rows


class Score(NamedTuple):
    """Of one model: metrics, their published kind of spread, and row by row for paired differences."""

    values: dict[str, float]
    spread: dict[str, float]
    by_row: dict[str, Tensor]  # (918,) averaged over repetitions


def score(chance: Tensor, table: VerticalTable, fold: Fold) -> Score:
    """The columns of the table."""
    used, label = fold.test_weight > 0, table.y[fold.test]
    right = ((chance > 0.5).long() == label).float()
    own = log_likelihood(chance, label)
    per_fold = (right * used).sum(1) / used.sum(1)
    wrong = own[used & (right == 0)]
    predicted, share, rows = calibration(chance[used], label[used])
    error = float(((predicted - share).abs() * rows).sum() / rows.sum())
    repeats = len(fold.test) // FOLDS
    by_row = lambda value: torch.zeros(len(table.y)).scatter_add_(0, fold.test[used], value[used]) / repeats
    return Score(
        dict(zip((*METRICS, "calibration error"), (100 * float(right[used].mean()), float(own[used].mean()),
                                                   float(wrong.mean()), error))),
        dict(zip(METRICS, (100 * float(per_fold.std()), float(own[used].std()), float(wrong.std())))),
        {METRICS[0]: 100 * by_row(right), METRICS[1]: by_row(own)},
    )  # fmt: skip


def draw(found: dict[str, Tensor], table: VerticalTable, fold: Fold, folder: Path) -> Path:
    """Reliability of the predictions: the share of disease against the predicted probability."""
    names = [name for name in found if "ρ = 5" not in name and "ρ = 10" not in name]
    figure, axes = plt.subplots(1, len(names), figsize=(2.9 * len(names), 3.3), sharey=True, layout="constrained")
    used = fold.test_weight > 0
    for axis, name in zip(axes, names):
        mean, share, rows = calibration(found[name][used], table.y[fold.test][used])
        seen = rows > 0
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        axis.plot(mean[seen].tolist(), share[seen].tolist(), "o-", color="C0", markersize=4)
        axis.bar([bin / 10 + 0.05 for bin in range(10)], (rows / rows.sum()).tolist(), 0.09, color="C1", alpha=0.4)
        axis.set(title=name.replace(", ", ",\n"), xlabel="predicted probability", xlim=(0, 1), ylim=(0, 1))
        axis.title.set_fontsize(9)
    axes[0].set_ylabel("share of disease (bars: of rows)")
    return common.save(figure, folder, "vfl_heart")


def main(argv: Sequence[str] | None = None) -> None:
    """Cross-validates all models, prints the table and the paired differences."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=50_000, help="iterations (default 50000)")
    options = parser.parse_args(argv)
    size = Size(20, 10, 2, 5) if options.smoke else Size(steps=options.steps, repeats=options.seeds)
    table = ft_data.heart_failure()
    found, fold = predictions(table, size)
    scores = {name: score(chance, table, fold) for name, chance in found.items()}
    reference = next(iter(scores.values()))
    rows, lines, differences = [], [], []
    for name, own in scores.items():
        published = dict(zip(METRICS, PUBLISHED.get(name, (None,) * 3)))
        cells = [name]
        for metric, value in own.values.items():
            rows.append(common.Row(name, metric, value, own.spread.get(metric), published.get(metric)))
            at = published.get(metric)
            cells.append(f"{value:.3f}" + (f" ± {own.spread[metric]:.2f}" if metric in own.spread else ""))
            cells.append("–" if at is None else f"{at:.2f}")
        lines.append(cells[:-1])
        if own is reference:
            continue
        paired = [name]
        for metric, value in own.by_row.items():
            gap = value - reference.by_row[metric]
            error = float(gap.std() / len(gap) ** 0.5)
            rows.append(common.Row(name, f"{metric} − logistic regression's", float(gap.mean()), error))
            paired.append(f"{float(gap.mean()):+.4f} ± {error:.4f}")
        differences.append(paired)
    heads = [cell for metric in METRICS for cell in (metric, "published")]
    common.show(f"{size.repeats} × {FOLDS}-fold, {size.steps} steps", ["", *heads, "calibration error"], lines)
    common.show("Paired differences from the logistic regression (se over rows)", ["", *METRICS[:2]], differences)
    common.write("vfl_heart", rows, options.json)
    if options.out is not None:
        common.show_path(draw(found, table, fold, options.out))


if __name__ == "__main__":
    main()
