"""The split of a model's tensors into units' own and shared ones, and the initial values of the units' own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

IN_SCALES = ("kernel.weight", "offset")  # parameters in units of their unit's scale
_START_NOISE = 0.3  # standard deviation of the noise before training, in standard deviations of the outputs


class Observed(NamedTuple):
    """Rows of the units themselves, which never leave them."""

    x: Tensor  # (*b, N, d)
    y: Tensor  # (*b, N)
    mask: Tensor  # (*b, N)


class UnitModel(gpytorch.Module):
    """A model whose tensors are shared or a unit's own; `*b` are the units' batch dimensions.

    Attributes:
        kernel: an `OutputKernel`, which names its units' tensors.
        likelihood: its tensors are the units' own.
        own_kernel: None, or the kernel of the units' own processes.
        share_own_kernel: whether its hyperparameters are shared.
        offset: None, or the units' means in units of their scales, `(*b,)`.
        scale: None, or one scale of the outputs of all units.
        batch_shape: of the units.
    """

    kernel: Any
    likelihood: Any
    own_kernel: Any
    share_own_kernel: bool
    offset: nn.Parameter | None
    scale: float | None
    batch_shape: torch.Size

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Return the names of the parameters and buffers that belong to a unit; the other parameters are shared."""
        mine = {f"kernel.{name}" for name in self.kernel.units} | {"offset"}
        # A kernel's buffers are not hyperparameters: columns, random frequencies.
        buffers = [name for name, _ in self.named_buffers() if not name.startswith("own_kernel.")]
        named = [*dict(self.named_parameters()), *buffers]
        constraints = {name for name in named if "constraint" in name or "_prior." in name or "quadrature" in name}
        return tuple(n for n in named if (n in mine or n.startswith(self._unit_parts)) and n not in constraints)

    @property
    def unit_trained(self) -> tuple[str, ...]:
        """Return the names of the parameters of a unit that are trained."""
        named = dict(self.named_parameters())
        return tuple(name for name in self.unit_names if name in named and named[name].requires_grad)

    def unit_vector(self, names: Sequence[str]) -> Tensor:
        """Return units' parameters of these names and the logarithm of their scale as vectors, `(*b, D)`.

        Weights and means are in the units of the outputs, so that units with different scales can be compared. A common
        scale of all units is left out.
        """
        values, start = {**dict(self.named_parameters()), **dict(self.named_buffers())}, self.kernel.scale.ndim
        scale = self.kernel.scale[..., None]
        parts = [scale.log()] if self.scale is None else []
        for name in names:
            value = values[name].detach()
            flat = value[..., None] if value.ndim == start else value.flatten(start)
            parts.append(flat * scale if name in IN_SCALES else flat)
        return torch.cat(parts, -1)

    def no_moments(self) -> Tensor:
        """Return the sum of `unit_prior.moments` over no units, `(D + 1, D + 1)`."""
        dims = self.unit_vector(self.unit_trained).shape[-1]
        return self.kernel.scale.new_zeros(dims + 1, dims + 1)

    def unit_tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the tensors `(*k, ...)` of units with this `unit_vector`, `(*k, D)`; the model has one unit."""
        values, scale, place = dict(self.named_parameters()), self.kernel.scale.expand(vector.shape[:-1]), 0
        if self.scale is None:
            scale, place = vector[..., 0].exp(), 1
        tensors = {"kernel.scale": scale}
        for name in self.unit_trained:
            shape = values[name].shape
            flat = vector[..., place : place + shape.numel()]
            place += shape.numel()
            flat = flat / scale[..., None] if name in IN_SCALES else flat
            tensors[name] = flat.reshape(*vector.shape[:-1], *shape)
        return tensors

    @property
    def _unit_parts(self) -> tuple[str, ...]:
        """Return the prefixes of parts all of whose tensors are the units' own."""
        return ("likelihood.",) if self.share_own_kernel else ("likelihood.", "own_kernel.")

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Return the names of the trainable parameters that all units share."""
        mine = set(self.unit_names)
        return tuple(name for name, p in self.named_parameters() if p.requires_grad and name not in mine)

    def initial_units(self, y: Tensor, mask: Tensor | None = None, *extra: Any) -> dict[str, Tensor]:
        """Return units' initial tensors: scales, noise and offsets estimated from their outputs, the module's values
        otherwise.

        Args:
            y: outputs `(*b, N)`.
            mask: `(*b, N)`, marks rows against padding.
            extra: further fields of the likelihood, `(*b, N)` each.

        Returns:
            by the names of `unit_names`, `(*b, ...)`. Constant outputs and single points get their size as scale.
        """
        mask = full(y, mask)
        values = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        batch, unit_dims = y.shape[:-1], len(self.batch_shape)
        initial = {
            n: values[n].detach().expand((*batch, *values[n].shape[unit_dims:])).clone() for n in self.unit_names
        }
        if not hasattr(self.likelihood, "noise"):
            return initial
        if hasattr(self.likelihood, "measured"):
            mask = mask * self.likelihood.measured(*extra)
        mean, scale = self._size_of(y, mask)
        initial["kernel.scale"] = scale.to(values["kernel.scale"])
        if self.offset is not None:
            initial["offset"] = (mean / scale).to(values["offset"])
        for name in self.unit_names:
            if name.endswith("raw_noise"):
                constraint = self.constraint_for_parameter_name(name)
                noise = (_START_NOISE * scale[..., None]).square().to(values[name])
                raw = constraint.inverse_transform(noise).expand_as(initial[name])
                # If the constraint excludes this noise, the likelihood's initial noise stays.
                initial[name] = torch.where(raw.isfinite(), raw, initial[name])
        return initial

    def _size_of(self, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs' means, 0 without offsets, and scales, `(*b,)` each."""
        count = mask.sum(-1).clamp(min=1)
        mean = (y * mask).sum(-1) / count if self.offset is not None else torch.zeros_like(y[..., 0])
        if self.scale is not None:
            return mean, torch.full_like(mean, self.scale)
        scale = (((y - mean[..., None]) * mask).square().sum(-1) / count).sqrt()
        size = (y * mask).abs().amax(-1)
        return mean, torch.where(scale > 1e-8 * size, scale, torch.where(size > 0, size, torch.ones_like(size)))

    def start(self, y: Tensor, mask: Tensor | None = None, *extra: Any) -> None:
        """Set the units' tensors to `initial_units`, with the same arguments."""
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, value in self.initial_units(y, mask, *extra).items():
            tensors[name].data = value

    def log_prior(self, units: bool) -> Tensor:
        """Return log-density of the priors of the units' parameters `(*b,)`, or of the shared ones `()`."""
        total, of_units = self.kernel.weight.new_zeros(()), set(self.unit_names)
        for name, module, prior, closure, _ in self.named_priors():
            parameter = name.removesuffix("_prior")
            path, _, last = parameter.rpartition(".")
            names = {parameter, f"{path}.raw_{last}".removeprefix(".")}
            mine = name.startswith(self._unit_parts) or not names.isdisjoint(of_units)
            if mine == units:
                value = closure(module)
                density = prior.log_prob(value)
                batch = self.kernel.weight.shape[:-1] if units else torch.Size()
                total = total + density.reshape(*batch, math.prod(density.shape[len(batch) :])).sum(-1)
        return total

    def level(self, y: Tensor) -> Tensor:
        """Return the units' means in the units of y `(*b, N)`, `(*b, 1)`."""
        if self.offset is None:
            return torch.zeros_like(y[..., :1])
        return (self.kernel.scale * self.offset)[..., None]


def full(y: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask in the dtype of y, ones if there is none."""
    return torch.ones_like(y) if mask is None else mask.to(y.dtype)
