"""A vertical iteration's bound and its gradients, captured once per shape and replayed: on a CUDA device as one graph.

Rows and noise are drawn outside of the capture and are inputs of each replay, so that every iteration has its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import functional, tree
from fedtorch.captured import CapturedStep
from fedtorch.vfl.fit.bound import bound
from fedtorch.vfl.fit.guide import Guide, Noise, Parameters
from fedtorch.vfl.model.split_nn import Stacked
from fedtorch.vfl.model.vertical import VerticalModel
from fedtorch.vfl.rows.data import VerticalData


class _Known(torch.autograd.Function):
    """A loss whose gradients have been computed with it; `apply(loss, gradients, *leaves)`."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor | None, ...], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> Any:
        return None, None, *(None if g is None else factors[0] * g for g in ctx.gradients)


class CapturedBound:
    """The bound of a model's iterations and its gradients, captured once per shape.

    Args:
        model: the model.
        guide: the family.
        parameters: of q; their leaves are trained in place.
    """

    def __init__(self, model: VerticalModel, guide: Guide, parameters: Parameters) -> None:
        self.model, self.guide, self.parameters = model, guide, parameters
        parts = [part for part in (*model.predictors, model.top) if isinstance(part, nn.Module)]
        networks = nn.ModuleList(dict.fromkeys(parts))
        names = [name for name, weight in networks.named_parameters() if weight.requires_grad]
        self._swap = functional.Swap(networks, names)
        self._q = len(tree.leaves(parameters))
        self.leaves = [*tree.leaves(parameters), *(dict(networks.named_parameters())[name] for name in names)]
        self._stacks = [module for module in networks.modules() if isinstance(module, Stacked)]
        self._captured = CapturedStep()

    @property
    def eager(self) -> str | None:
        """Return the reason why an iteration cannot be captured; None if it can."""
        draws = [stack.draws for stack in self._stacks if stack.training]
        if any(draws):
            return "the networks draw random numbers"
        return "the networks have not run" if None in draws else None

    @property
    def one_by_one(self) -> str | None:
        """Return the reason why the captured operations cannot be a CUDA graph; None if they can."""
        return self.eager or self._captured.one_by_one

    def backward(self, data: VerticalData, noise: Noise, share: Tensor) -> Tensor:
        """Return the bound of each draw, `(B, M)`; leaves get the gradients of minus its sum, weighted by `share`.

        Args:
            data: aligned rows.
            noise: of the iteration.
            share: () or `(B, 1)`.
        """
        value, gradients = self._evaluated(data, noise, share)
        for leaf, gradient in zip(self.leaves, gradients):
            leaf.grad = gradient
        return value

    def losses(self, data: VerticalData, noise: Noise, share: Tensor) -> tuple[Tensor, Tensor]:
        """Return (minus the bound times `share`, `(B, M)`, the sum of it, differentiable); see `backward`."""
        value, gradients = self._evaluated(data, noise, share)
        losses = -value * share
        return losses, _Known.apply(losses.sum(), gradients, *self.leaves)

    def _evaluated(self, data: VerticalData, noise: Noise, share: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return (the bound, the gradients of minus its sum, weighted by `share`)."""
        arguments = [share, *tree.leaves(data), *noise.theta, *noise.z]
        if self.eager is None:
            keyless = partial(self._step, data, noise._replace(keys=()))
            value, gradients = self._captured(keyless, *self.leaves, *arguments)
        else:
            value, gradients = self._step(data, noise, 0, *self.leaves, *arguments)
        # Contiguous like the leaves, because torch's fused Adam ignores the strides of gradients.
        return value, tuple(None if gradient is None else gradient.contiguous() for gradient in gradients)

    def _step(self, data: VerticalData, noise: Noise, index: int, *flat: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Return (bound, gradients) of the flat list of leaves, share, rows and noise.

        Args:
            data: has the structure of the rows.
            noise: has the structure of the noise.
            index: of the step; it changes nothing here.
            flat: all tensors.
        """
        with torch.enable_grad():
            inputs = [leaf.detach().requires_grad_() for leaf in flat[: len(self.leaves)]]
            share, *rest = flat[len(self.leaves) :]
            arguments = iter(rest)
            rows = VerticalData._make(tree.map(lambda leaf: next(arguments), part) for part in data)
            drawn = noise._replace(theta=tuple(next(arguments) for _ in noise.theta), z=tuple(arguments))
            parameters = tree.refill(self.parameters, inputs[: self._q])
            with self._swap(inputs[self._q :]):
                value = bound(self.model, self.guide, parameters, rows, drawn)
            gradients = torch.autograd.grad(-(value * share).sum(), inputs, allow_unused=True)
        return value.detach(), gradients
