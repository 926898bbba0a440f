"""The cross-validation of `experiments.vfl.heart`: folds, networks, and how they are trained."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

from experiments import common
from fedtorch import data as ft_data, random, vfl
from fedtorch.data import VerticalTable
from fedtorch.vfl import mlp
from fedtorch.vfl.model import likelihoods

FOLDS, NEIGHBOURS, WIDTH = 10, 2, 8
NAMES = ("split network", "hierarchical Bayes, ρ = 1", "hierarchical Bayes, ρ = 5", "hierarchical Bayes, ρ = 10")
RHOS = (0.0, 1.0, 5.0, 10.0)
PRIOR_SDS = (2**-2.5, 2**-2, 2**-1.5, 2**-1)  # of the weights before the last layer

Optimizer = Callable[[Iterable[nn.Parameter]], Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is computed."""

    repeats: int = 1
    long: int = 1  # repetitions in which the published networks are trained
    steps: int = 50_000  # of these, and at most of the early-stopped ones
    annealed: int = 2000  # of networks with a prior on all weights
    every: int = 100  # steps between validations of the early-stopped versions
    patience: int = 10
    draws: int = 300


class Folds(NamedTuple):
    """Rows of every fold of every repetition, padded by rows of weight zero."""

    train: Tensor  # (F, n) indices
    weight: Tensor  # (F, n)
    test: Tensor  # (F, m)
    test_weight: Tensor  # (F, m)

    def first(self, repeats: int) -> Folds:
        """Those of the first repetitions."""
        return Folds(*(part[: FOLDS * repeats] for part in self))


def folds(rows: int, repeats: int) -> Folds:
    """Random folds, `F = 10 · repeats`."""
    trains, tests = [], []
    for repeat in range(repeats):
        order = random.permutation(random.key(repeat), rows)
        parts = [order[i::FOLDS] for i in range(FOLDS)]
        tests += parts
        trains += [torch.cat(parts[:i] + parts[i + 1 :]) for i in range(FOLDS)]
    return Folds(*_padded(trains), *_padded(tests))


def pairs(fold: Folds) -> tuple[Folds, Tensor]:
    """Folds that leave out the test rows of two others, i and j; and `(P, 2)`, whom each half of their rows informs.

    Rows of i, the first half, are validation rows of fold j, and rows of j those of i: one network serves both.
    """
    trains, tests, informs = [], [], []
    tested = [rows[weight > 0] for rows, weight in zip(fold.test, fold.test_weight)]
    for first in range(0, len(tested), FOLDS):
        for i in range(first, first + FOLDS):
            for j in (first + (i - first + distance) % FOLDS for distance in range(1, 1 + NEIGHBOURS)):
                others = [tested[k] for k in range(first, first + FOLDS) if k not in (i, j)]
                trains.append(torch.cat(others))
                tests += [tested[i], tested[j]]
                informs.append((j, i))
    return Folds(*_padded(trains), *(part.reshape(len(trains), -1) for part in _padded(tests))), torch.tensor(informs)


def _padded(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(len(part) for part in parts)
    index = torch.stack([torch.cat([part, part[:1].expand(longest - len(part))]) for part in parts])
    weight = torch.stack([(torch.arange(longest) < len(part)).float() for part in parts])
    return index, weight


def standardised(table: VerticalTable, fold: Folds) -> tuple[Tensor, Tensor]:
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
    table: VerticalTable, rhos: Sequence[float], count: int, weight_sd: Tensor | None = None, **arguments: Any
) -> vfl.SplitNetwork:
    """Networks of all folds × ρ, which start alike in a fold; ρ = 0 is a plain split network."""
    seeds = random.fold_in(random.key(1), torch.arange(count)).repeat_interleave(len(rhos)).tolist()
    bayes = vfl.HierarchicalBayes(rho=torch.tensor(rhos).repeat(count), weight_sd=weight_sd)
    bottoms = [mlp(len(columns), (WIDTH, WIDTH), 2) for columns in table.parties]
    return vfl.SplitNetwork(bottoms, likelihoods.categorical(2), seed=seeds, bayes=bayes, **arguments)


def annealed(steps: int) -> Optimizer:
    """Adam at 1e-2, along a cosine to 0 after `steps`."""

    def make(parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
        optimizer = torch.optim.Adam(parameters, lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return make


def trained(
    model: vfl.SplitNetwork, rows: vfl.VerticalData, steps: int, size: Size, validation: vfl.VerticalData | None = None
) -> vfl.SplitNetwork:
    """The network after Lightning's `Trainer`, with early stopping where there are validation rows."""
    callbacks: list[L.Callback] = [] if validation is None else [vfl.StackedEarlyStopping(size.patience)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer = L.Trainer(
            max_steps=steps, max_epochs=-1, accelerator="auto", devices=1, logger=False, callbacks=callbacks,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            num_sanity_val_steps=0,
        )  # fmt: skip
        loader = vfl.VerticalLoader(rows, steps=min(size.every, steps))
        trainer.fit(model, loader, None if validation is None else vfl.VerticalLoader(validation))
    return model.cpu()


def chances(table: VerticalTable, fold: Folds, rhos: Sequence[float], size: Size, *, stopped: bool = False) -> Tensor:
    """Probability of disease of the test rows by a network of each ρ, `(len(rhos), F, m)`, trained as published."""
    x, new = standardised(table, fold)
    rows, validation = vertical(table, x, fold.train, fold.weight, len(rhos)), None
    if stopped:
        assert rows.weight is not None
        held = (torch.arange(x.shape[1]) % 10 == 0).float()
        validation = rows._replace(weight=rows.weight * held)
        rows = rows._replace(weight=rows.weight * (1 - held))
    model = trained(network(table, rhos, len(x)), rows, size.steps, size, validation)
    return predicted(model, vertical(table, new, fold.test, fold.test_weight, len(rhos)), len(rhos), size.draws)


def with_priors(table: VerticalTable, fold: Folds, sds: Tensor, size: Size, draws: int) -> Tensor:
    """The same by networks of ρ = 1 with priors of these standard deviations, `(F, M)`, on all weights; `(M, F, m)`."""
    x, new = standardised(table, fold)
    copies, optimizer = sds.shape[1], annealed(size.annealed)
    model = network(table, (1.0,) * copies, len(x), sds.flatten(), optimizer=optimizer)
    trained(model, vertical(table, x, fold.train, fold.weight, copies), size.annealed, size)
    return predicted(model, vertical(table, new, fold.test, fold.test_weight, copies), copies, draws)


def chosen(table: VerticalTable, fold: Folds, size: Size) -> Tensor:
    """The standard deviation of every fold's prior, `(F, 1)`, by validation within its training rows."""
    within, informs = pairs(fold)
    sds = torch.tensor(PRIOR_SDS)
    chance = with_priors(table, within, sds.expand(len(within.train), -1), size, size.draws // 3)
    own = (log_likelihood(chance, table.y[within.test]) * within.test_weight).unflatten(-1, (2, -1)).sum(-1)
    scores = torch.zeros(len(sds), len(fold.train)).index_add_(1, informs.flatten(), own.flatten(1))
    return sds[scores.argmax(0)].unsqueeze(1)


def predicted(model: vfl.SplitNetwork, rows: vfl.VerticalData, models: int, draws: int) -> Tensor:
    """Predicted probability of disease, `(models, F, m)`."""
    return model.predict(rows.features, draws=draws)[:, 1].unflatten(0, (-1, models)).transpose(0, 1)


def logistic(table: VerticalTable, fold: Folds) -> Tensor:
    """Of a logistic regression of all covariates, `(F, m)`."""
    from sklearn.linear_model import LogisticRegression

    found, (train, test) = [], standardised(table, fold)
    for x, rows, weight, new in zip(train, fold.train, fold.weight, test):
        fit = LogisticRegression(max_iter=1000).fit(x.numpy(), table.y[rows].numpy(), sample_weight=weight.numpy())
        found.append(torch.from_numpy(fit.predict_proba(new.numpy())[:, 1]).float())
    return torch.stack(found)


def predictions(table: VerticalTable, size: Size) -> tuple[dict[str, Tensor], Folds]:
    """Predicted probabilities of every model on all test rows, `(F, m)` each; fewer folds of the published ones."""
    fold = folds(len(table.y), size.repeats)
    found = {"logistic regression, all covariates": logistic(table, fold)}
    if size.long:
        found.update(zip(NAMES, chances(table, fold.first(size.long), RHOS, size)))
    stopped = [f"{name}, early stopping" for name in NAMES[:2]]
    found.update(zip(stopped, chances(table, fold, RHOS[:2], size, stopped=True)))
    sds = chosen(table, fold, size)
    counts = {round(sd, 3): int((sds == sd).sum()) for sd in PRIOR_SDS}
    common.show("Chosen prior sds", ["", *map(str, counts)], [["folds", *map(str, counts.values())]])
    found[f"{NAMES[1]}, prior on all weights"] = with_priors(table, fold, sds, size, size.draws)[0]
    return found, fold


def log_likelihood(chance: Tensor, label: Tensor) -> Tensor:
    """Of Bernoulli labels; a network that is certain and wrong in float32 has the smallest normal number."""
    return torch.where(label == 1, chance, 1 - chance).clamp_min(torch.finfo(torch.float32).tiny).log()
