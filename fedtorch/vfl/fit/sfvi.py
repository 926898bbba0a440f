r"""Structured federated variational inference, run in one autograd graph.

Adam maximises the bound of `fedtorch.vfl.fit.bound` by sampled gradients. `fedtorch.vfl.nodes.iteration` does the same
between nodes, which exchange values and gradients.

Source: Hassan et al., section 4, algorithms 1 and 2.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch import checkpoint, random, tree
from fedtorch.progress import Progress
from fedtorch.vfl.fit.adam import Drift, RestartingAdam
from fedtorch.vfl.fit.bound import ascend, bound, climb
from fedtorch.vfl.fit.captured import CapturedBound
from fedtorch.vfl.fit.guide import Guide, Parameters, draw_noise, draw_theta, initial, iterations
from fedtorch.vfl.fit.run import Iterated, VerticalRun
from fedtorch.vfl.model.checks import prepared
from fedtorch.vfl.model.collapsed import noise_variance
from fedtorch.vfl.model.vertical import VerticalModel
from fedtorch.vfl.rows.data import VerticalData

_START, _PREDICT = 0, 1  # purposes of the key
_TAIL = 8  # share of the last steps; in these a decaying learning rate is almost zero

Schedule = Callable[[int], float]


class VariationalFit(VerticalRun):
    """A fit by variational inference with the methods of `ft.Run`; `sfvi` makes one and does all its steps.

    Args:
        model: `augmented` or `power`.
        guide: the approximation.
        data: aligned rows; tensors with a leading `B` differ over the batch.
        seed: of the noise. With one seed the batch shares its noise, which makes comparisons within it sharper;
            otherwise one seed for each problem.
        steps: iterations in total.
        lr: Adam's learning rate, as a function of the step; a number decays to zero along half a cosine.
        draws: M, Monte Carlo draws per iteration.
        batch_size: rows per iteration, drawn uniformly with replacement; all rows by default.
        size: B.
        every: how many steps each value of `bounds` averages.
        start: initial parameters.
        compile: True captures an iteration's operations once per shape and replays them, on a CUDA device as one graph;
            networks that draw random numbers are not captured.

    Attributes:
        model: the model; networks of its predictors, if any, are the trained ones.

    Raises:
        ValueError: data that do not fit the model, or fewer than one step or draw.

    >>> import torch, fedtorch as ft
    >>> data = ft.vfl.VerticalData((torch.ones(3, 1), torch.ones(3, 2)), torch.tensor([0.0, 1.0, 1.0]))
    >>> model = ft.vfl.augmented(ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(1), ft.vfl.linear(2)], rho=1.0)
    >>> fit = VariationalFit(model, Guide(ft.vfl.noiseless()), data, steps=4, every=2)
    >>> [round.number for round in fit.rounds(4)]
    [1, 2, 3, 4]
    >>> fit.bounds.shape, [part.shape for part in fit.moments()]  # of an intercept and three coefficients
    (torch.Size([2, 1]), [torch.Size([1, 4]), torch.Size([1, 4, 4])])
    >>> [theta.shape for theta in fit.sample(100, seed=1)]
    [torch.Size([1, 100, 1]), torch.Size([1, 100, 1]), torch.Size([1, 100, 2])]
    """

    def __init__(
        self,
        model: VerticalModel,
        guide: Guide,
        data: VerticalData,
        *,
        seed: int | Sequence[int] = 0,
        steps: int,
        lr: float | Schedule = 1e-2,
        draws: int = 1,
        batch_size: int | None = None,
        size: int = 1,
        every: int = 100,
        start: Parameters | None = None,
        compile: bool = False,
    ) -> None:
        if steps < 1 or draws < 1 or (batch_size is not None and batch_size < 1):
            raise ValueError(
                f"Expected positive steps, draws and batch_size, but got {steps}, {draws} and {batch_size}"
            )
        key = random.key(seed)
        if key.ndim and len(key) not in (1, size):
            raise ValueError(f"Expected one seed or one for each of {size} problems, but got {len(key)}")
        settings = {
            "algorithm": "sfvi", "model": model, "guide": guide, "seed": seed, "steps": steps, "lr": lr,
            "draws": draws, "batch_size": batch_size, "size": size, "every": every,
        }  # fmt: skip
        super().__init__([f"party {j}" for j in range(len(model.predictors))], settings)
        self._batch = prepared(model, data)
        if any(True for predictor in model.predictors for _ in predictor.parameters()):
            model = copy.deepcopy(model)  # whose networks are trained
        like = self._batch.features[0]
        self.model, self.guide, self.likelihood = model, guide, model.likelihood
        self.steps, self.every, self.size, self.key = steps, every, size, key.to(like.device)
        begin = start or initial(model, guide, self._rows, size, random.fold_in(self.key, _START), like.dtype)
        self._parameters = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), begin)
        networks = [weight for predictor in model.predictors for weight in predictor.parameters()]
        self._leaves = [*tree.leaves(self._parameters), *networks]
        self._optimizer, self._drift = RestartingAdam(self._leaves), Drift(self._leaves)
        self._placed = dataclasses.replace(model, rho=model.rho.to(like))  # once, not in every iteration
        self._means: list[Tensor] = []
        self._recent = torch.zeros(size, dtype=torch.float64, device=like.device)
        self._captured = CapturedBound(self._placed, guide, self._parameters) if compile else None
        self._schedule, self._share = lr if callable(lr) else cosine(lr, steps), like.new_tensor(1 / draws)
        self._drawn = partial(iterations, model, guide, self.key, like, self._rows, steps, draws, batch_size)
        self._coming = self._drawn()
        self._everybody = torch.arange(len(model.predictors))

    @property
    def _rows(self) -> int:
        return self._batch.y.shape[-1]

    @property
    def parameters(self) -> Parameters:
        """Return the parameters of q."""
        return tree.map(torch.detach, self._parameters)

    @property
    def bounds(self) -> Tensor:
        """Return the mean of the sampled bound over each `every` steps, `(steps // every, B)`."""
        empty = self._recent.new_zeros(0, self.size)
        return torch.stack(self._means) if self._means else empty

    @property
    def drift(self) -> Tensor:
        """Return the largest mean gradient of a parameter over the last steps, in standard errors, `(B,)`."""
        return self._drift.largest(self.size)

    def _iterate(self, number: int) -> Iterated:
        if number >= self.steps:
            raise ValueError(f"Expected at most {self.steps} steps, but got one more; begin a fit with start=")
        rows, noise = next(self._coming)
        batch = self._batch if rows is None else self._batch.take(rows, self.model.row_dims)
        if self._captured is None:
            sampled = bound(self._placed, self.guide, self._parameters, batch, noise)
            ascend(self._optimizer, sampled, self._schedule(number))
        else:
            sampled = self._captured.backward(batch, noise, self._share)
            climb(self._optimizer, self._schedule(number))
        if number >= self.steps - max(self.steps // _TAIL, 1):
            self._drift.add()
        mean = sampled.detach().mean(1)
        self._recent += mean
        if (number + 1) % self.every == 0 or number + 1 == self.steps:
            self._means.append(self._recent / ((number % self.every) + 1))
            self._recent = torch.zeros_like(self._recent)
            if not bool(self._means[-1].isfinite().all()):
                raise FloatingPointError(
                    f"Expected a finite bound, but got {self._means[-1].tolist()} by step {number + 1}"
                )
        return Iterated({"train_loss": -mean.mean()}, self._everybody)

    def _state(self) -> dict[str, Tensor]:
        state = {
            "leaves": self._leaves,
            "optimizer": self._optimizer.state_dict(),
            "drift": [self._drift.count, self._drift.sums, self._drift.squares],
            "means": self._means,
            "recent": self._recent,
        }
        return {name: leaf.detach().clone() for name, leaf in checkpoint.pack(state).items()}

    def _load(self, flat: Mapping[str, Tensor]) -> None:
        state = checkpoint.unpack(flat)
        with torch.no_grad():
            for leaf, value in zip(self._leaves, state["leaves"], strict=True):
                leaf.copy_(value)
        self._optimizer.load_state_dict(state["optimizer"])
        placed = lambda values: [value.to(self._recent.device) for value in values]
        self._drift.count, sums, squares = state["drift"]
        self._drift.sums, self._drift.squares = placed(sums), placed(squares)
        *self._means, self._recent = placed([*state["means"], state["recent"]])

    def load_state_dict(self, flat: Mapping[str, Tensor], *, anyway: bool = False) -> None:
        """Restore the state that `state_dict` returned; see `VerticalRun.load_state_dict`."""
        super().load_state_dict(flat, anyway=anyway)
        self._coming = self._drawn(self.number)

    def converged(self, tolerance: float = 5.0) -> Tensor:
        """Return whether the mean gradients of all parameters are zero up to their noise, `(B,)`.

        A bound that looks flat does not show convergence: gradients of counts, or a noise ρ far above the likelihood's,
        may block the optimiser. This tests the gradients of the last eighth of the steps. If some are not zero, a
        `RuntimeWarning` says what to do.

        Args:
            tolerance: for `drift`, which is about 4 for the largest of some hundreds of parameters at their optimum.
        """
        converged = self.drift <= tolerance
        if not bool(converged.all()):
            share = "" if len(converged) == 1 else f" in {int((~converged).sum())} of {len(converged)} problems"
            largest = float(self.drift.max())
            sizes = f"up to {largest:.3g} times their noise, where {tolerance:g} may be chance"
            sizes = sizes if math.isfinite(largest) else "too few to tell"
            warnings.warn(
                f"Not converged after {self.number} steps{share}: gradients of the last eighth of them are {sizes}; "
                "continue from here with more steps=, ft.vfl.sfvi(…, start=fit.parameters), or take a larger lr=",
                RuntimeWarning,
                stacklevel=2,
            )
        return converged

    @torch.no_grad()
    def predict(
        self,
        features: Sequence[Tensor] | VerticalData,
        *,
        draws: int = 100,
        seed: int = 0,
        noise: bool = True,
    ) -> Tensor:
        """Return the predictive mean of new rows, averaged over draws of the parameters and of the noise.

        Args:
            features: `(n, p)` or `(B, n, p)`, one per party, or the data that have them.
            draws: of the parameters.
            seed: of the draws.
            noise: whether to add the model's noise to the predictor.

        Returns:
            `(B, n)`; of a categorical likelihood probabilities `(B, C, n)`.
        """
        features = features.features if isinstance(features, VerticalData) else features
        key = random.fold_in(random.key(seed), _PREDICT)
        thetas = self._drawn_by(key, draws)
        rows = features[0].shape[-1 - self.model.row_dims[0]]
        unknown = features[0].new_full((rows,), torch.nan)
        total, shared = self.model.predictor(thetas, VerticalData(tuple(features), unknown))
        if noise:
            keys = random.fold_in(key.to(total.device), torch.arange(draws, device=total.device))
            drawn = random.normal(random.fold_in(keys, _PREDICT), total.shape[2:], total.dtype)
            total = total + noise_variance(self.model).sqrt().to(total).reshape(-1, 1, 1, 1) * drawn
        return self.model.likelihood.mean(total, shared).mean(1)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean `(B, D)` and covariance `(B, D, D)` of q over the concatenated coordinates of γ, θ_1, …, θ_J."""
        q, family = self.parameters, self.guide.theta
        if q.joint is not None:
            return q.joint["mean"], family.covariance(q.joint)
        blocks = [node["theta"] for node in (q.server, *q.parties)]
        covariances = [self.guide.family(j).covariance(block) for j, block in enumerate(blocks)]
        whole = torch.stack([torch.block_diag(*(c[b] for c in covariances)) for b in range(len(covariances[0]))])
        return torch.cat([block["mean"] for block in blocks], -1), whole

    def sample(self, draws: int, *, seed: int = 0) -> list[Tensor]:
        """Return draws of γ, θ_1, …, θ_J from q, `(B, draws, d_j)` each."""
        return self._drawn_by(random.key(seed), draws)

    def _drawn_by(self, key: Tensor, draws: int) -> list[Tensor]:
        like = tree.leaves(self.parameters)[0]
        noise = draw_noise(self.model, self.guide, key.reshape(-1).to(like.device), 0, draws, like.dtype)
        with torch.no_grad():
            return draw_theta(self.model, self.guide, self.parameters, noise.theta)[0]

    def weights(self) -> Tensor:
        """Return the learnt weights of the parties' likelihoods, `(B, J)`; they do not rank parties, see `power`.

        Raises:
            ValueError: the model's weights are fixed.
        """
        if "weights" not in self.parameters.server:
            raise ValueError("Expected a power model with learnt weights, but got fixed ones; see concentration=")
        return self.parameters.server["weights"]["logits"].softmax(-1)


def cosine(rate: float, steps: int, floor: float = 0.0) -> Schedule:
    """Return a learning rate that falls from `rate` to `floor · rate` along half a cosine.

    >>> rate = cosine(0.1, steps=4)
    >>> [round(rate(step), 3) for step in range(5)]
    [0.1, 0.085, 0.05, 0.015, 0.0]
    """
    return lambda step: rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0))))


def sfvi(
    model: VerticalModel, guide: Guide, data: VerticalData, *, progress: bool = True, **settings: Any
) -> VariationalFit:
    """Maximise the bound by Adam, for a batch of independent problems at once; return the completed `VariationalFit`.

    Args:
        model: `augmented` or `power`.
        guide: the approximation.
        data: aligned rows; tensors with a leading `B` differ over the batch.
        progress: whether a fit that takes longer than two seconds shows its progress; see `fedtorch.progress`.
        settings: of `VariationalFit`, among them `steps`.

    Check `converged` of the fit: a bound that looks flat does not show convergence.

    Raises:
        ValueError: as `VariationalFit` does.
        FloatingPointError: the bound is not finite.
    """
    fit = VariationalFit(model, guide, data, **settings)
    with Progress("SFVI", fit.steps, unit="step", shown=progress) as shown:
        for _ in fit.rounds(fit.steps):
            shown.update(tell=partial(_last_bound, fit))
    return fit


def _last_bound(fit: VariationalFit) -> dict[str, str]:
    """Return the last mean bound over the batch, for the progress line."""
    return {"bound": f"{float(fit.bounds[-1].mean()):.5g}"} if len(fit.bounds) else {}
