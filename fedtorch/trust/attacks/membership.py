r"""Membership inference: whether a row was among the training rows of a model.

Many shadow models are trained on random halves of the rows; they are the clients of one federation, so that all of them
train as one batch. A row's confidence under a model, φ = log p_y − log(1 − p_y), is compared with its distribution
under shadows trained with the row, N(μ₁, σ²), and under those without it, N(μ₀, σ²): the likelihood ratio

.. math:: \log N(\varphi; \mu_1, \sigma^2) - \log N(\varphi; \mu_0, \sigma^2)

measures the evidence for membership. Every shadow is a target in turn, with the others as its shadows: S models give S
attacks.

Source: Carlini et al. (2022), "Membership inference attacks from first principles", Algorithm 1, with one variance for
all models of a row.

>>> import torch
>>> from fedtorch.trust.attacks.membership import confidence
>>> confidence(torch.tensor([[[0.0, 3.0], [0.0, 0.0]]]), torch.tensor([1, 0]))  # log odds of the right class
tensor([[3., 0.]], dtype=torch.float64)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import from_tensors
from fedtorch.federation.algorithm import LocalSolver
from fedtorch.federation.algorithms.separate import separate
from fedtorch.federation.populations.in_process import InProcess
from fedtorch.federation.runs.run import run
from fedtorch.trust.privacy.accounting.auditing import area, roc


class Membership(NamedTuple):
    """Membership attacks on S models about n rows.

    Example:
        >>> import torch
        >>> member = torch.tensor([[True, False], [False, True]])
        >>> found = Membership(torch.tensor([[3.0, -1.0], [1.0, 0.0]]), member)
        >>> found.area()  # of four pairs of a member and another, the member is ahead in three
        0.75
        >>> found.detections(false_alarms=0.0)
        0.5
    """

    scores: Tensor  # (S, n) float64, large for likely members
    member: Tensor  # (S, n) bool, the truth

    def roc(self) -> tuple[Tensor, Tensor]:
        """Return (false alarms, detections) of all attacks together, at every threshold."""
        return roc(self.scores[self.member], self.scores[~self.member])

    def area(self) -> float:
        """Return the area under the ROC: ½ is guessing."""
        return area(self.scores[self.member], self.scores[~self.member])

    def detections(self, false_alarms: float) -> float:
        """Return the fraction of members found when at most this fraction of the others is flagged."""
        alarms, detections = self.roc()
        return float(detections[alarms <= false_alarms].max())


def membership(
    local: LocalSolver, inputs: Tensor, targets: Tensor, *, shadows: int = 32, rounds: int = 1, seed: int = 0
) -> Membership:
    """Attack models that `local` trains, with other such models.

    Args:
        local: trains a classifier; its own budget, if any, is charged for `rounds`.
        inputs: `(n, ...)`.
        targets: `(n,)` classes.
        shadows: number of models S, each trained on a random half of the rows; even, so that half of them have each
            row.
        rounds: rounds of training, separately.
        seed: seed of halves and training.

    Raises:
        ValueError: too few rows or shadows, or an odd number of either.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import attacks
        >>> local = ft.gradient_descent(
        ...     torch.nn.Linear(4, 2, bias=False), steps=1, loss=torch.nn.functional.cross_entropy,
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        >>> found = attacks.membership(local, torch.eye(4), torch.tensor([0, 1, 0, 1]), shadows=8)
        >>> found.scores.shape, found.area()  # each row moves weights of its own: who has seen it is plain
        (torch.Size([8, 4]), 1.0)
    """
    count = len(targets)
    if shadows < 8 or shadows % 2 or count < 4 or count % 2:
        raise ValueError(f"Expected at least 8 shadows and 4 rows, even numbers, but got {shadows} and {count}")
    member = _halves(seed, shadows, count)
    data = from_tensors([(inputs[seen], targets[seen]) for seen in member])
    done = run(separate(local), InProcess(data), rounds=rounds, seed=seed)
    with torch.no_grad():
        outputs = local.predict(done.tensors(), tree.expand(inputs, shadows))
    return Membership(likelihood_ratios(confidence(outputs, targets), member), member)


def confidence(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return φ of every row's class, of logits `(S, n, C)` and classes `(n,)`, float64."""
    logits = outputs.to(torch.float64)
    classes = targets.expand(len(logits), -1)[..., None]
    others = logits.scatter(2, classes, -torch.inf)
    return logits.gather(2, classes)[..., 0] - others.logsumexp(2)


def likelihood_ratios(values: Tensor, member: Tensor) -> Tensor:
    """Return the attack's scores `(S, n)` from the models' confidences and the membership of each row.

    Means and variances for a model's attack are computed from all other models.
    """
    means, squares = [], torch.zeros_like(values)
    for seen in (member, ~member):
        weight = seen.to(values.dtype)
        number, total, power = (
            whole.sum(0) - whole for whole in (weight, weight * values, weight * values.square())
        )  # without the model itself
        means.append(total / number)
        squares = squares + power - number * means[-1].square()
    variance = squares / (len(values) - 1)
    inside, outside = means
    return ((values - outside).square() - (values - inside).square()) / (2 * variance.clamp(min=1e-12))


def _halves(seed: int, shadows: int, count: int) -> Tensor:
    """Return which model is trained on which row `(S, n)`: half of the rows each, in complementary pairs."""
    keys = random.fold_in(random.key(seed), torch.arange(shadows // 2))
    first = random.permutation(keys, count) < count // 2
    return torch.cat([first, ~first])
