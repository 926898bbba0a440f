"""The state that a client of `gradient_descent` or `lightning_fit` keeps between rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import functional, tree
from fedtorch.federation.algorithm import Local
from fedtorch.optimisers import State


class LocalState(NamedTuple):
    """The state that a client keeps between rounds; leaves `(K, ...)`."""

    optimizer: State  # empty if reset
    buffers: dict[str, Tensor]  # the client's own buffers
    steps: Tensor | None  # (K,) steps taken so far, None if reset


class AveragedBuffers:
    """The buffers that a server averages, as finite numbers that have a mean.

    Counts and flags travel in float64. A buffer with NaN or infinite entries at the start, such as the bounds of a
    range observer, travels as `functional.finite_parts`, which separate NaN, Inf and numbers.

    Args:
        buffers: of a module before training, by name.

    Attributes:
        start: initial values, as they travel.
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._own = {name: buffer.dtype for name, buffer in buffers.items()}
        self._parted = {name for name, buffer in buffers.items() if not bool(buffer.isfinite().all())}
        self.start = self.sent(buffers)

    def sent(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the averaged buffers among tensors `(...)` or `(K, ...)` of a module in their travelling form."""
        return {name: self._sent(name, tensors[name]) for name in self._own}

    def _sent(self, name: str, buffer: Tensor) -> Tensor:
        if name in self._parted:
            return functional.finite_parts(buffer)
        return buffer if buffer.is_floating_point() or buffer.is_complex() else buffer.to(torch.float64)

    def tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters and averaged buffers as the module has them: the inverse of `sent` among others."""
        return {**parameters, **{name: self._received(name, parameters[name]) for name in self._own}}

    def _received(self, name: str, buffer: Tensor) -> Tensor:
        dtype = self._own[name]
        if name in self._parted:
            numbers = functional.from_finite_parts(buffer)
            return (torch.view_as_complex(numbers) if dtype.is_complex else numbers).to(dtype)
        real = dtype.is_floating_point or dtype.is_complex
        return buffer.to(dtype) if real else functional.counted(buffer, dtype)


def divided_buffers(module: nn.Module, policy: str) -> tuple[AveragedBuffers, dict[str, Tensor]]:
    """Return (averaged buffers, buffers that stay at each client).

    Args:
        module: has the buffers.
        policy: "refuse" stacks none, "local" keeps all, "average" averages all.

    Raises:
        ValueError: the policy is none of these.
    """
    if policy not in ("refuse", "local", "average"):
        raise ValueError(f"Expected buffers='refuse', 'local' or 'average', but got {policy!r}")
    every = {} if policy == "refuse" else functional.buffers(module)
    return (AveragedBuffers(every), {}) if policy == "average" else (AveragedBuffers({}), every)


def refuse_changed_buffers(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Raise ValueError if buffers of `module` have changed since `before`; equal NaNs count as unchanged."""
    after = dict(module.named_buffers())
    changed = [name for name, old in before.items() if name not in after or _differ(old, after[name])]
    if changed:
        raise ValueError(
            f"Training changes the buffers {', '.join(changed)} of {type(module).__name__}, and averaging them "
            "silently would be wrong; choose buffers='local' (each client keeps its own) or buffers='average'"
        )


def perturbed(tensor: Tensor, number: int = 0) -> Tensor:
    """Return a tensor slightly perturbed in direction `number`, with the same signs."""
    places = torch.arange(1, tensor.numel() + 1, device=tensor.device, dtype=torch.float64)
    wave = (0.1 * torch.sin(places + 7 * number)).reshape(tensor.shape).to(tensor.dtype)
    return torch.where(tensor == 0, wave, tensor * (1 + wave))


def ever_trained(parts: Mapping[str, Tensor]) -> Tensor:
    """Return for each client whether its optimiser has had a gradient, `(K,)` bool."""
    return torch.stack([part.reshape(len(part), -1).any(1) for part in parts.values()]).any(0)


def joined(groups: Sequence[Tensor], done: Sequence[Local]) -> Local:
    """Join the solutions of groups of clients into those of one block."""
    whole = tree.concatenate(_same_info(done))
    return tree.take(whole, torch.cat(list(groups)).argsort().to(whole.lr_sum.device))


def _same_info(parts: Sequence[Local]) -> list[Local]:
    """Join the diagnostics of groups of clients, with NaN for values that a group does not have."""
    names = dict.fromkeys(name for local in parts for name in local.info)
    return [local._replace(info={n: local.info.get(n, local.lr_sum * torch.nan) for n in names}) for local in parts]


def _differ(old: Tensor, new: Tensor) -> bool:
    new = new.to(old.device)
    return old.shape != new.shape or not bool(((old == new) | ((old != old) & (new != new))).all())
