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


def divided_buffers(module: nn.Module, policy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (the buffers that are averaged like parameters, those that each client keeps).

    Args:
        module: whose buffers.
        policy: "refuse" stacks none, "local" keeps all, "average" averages all that have a mean, counts and flags
            as float64; complex ones and bounds at infinity stay with the client.

    Raises:
        ValueError: the policy is none of these.
    """
    if policy not in ("refuse", "local", "average"):
        raise ValueError(f"Expected buffers='refuse', 'local' or 'average', but got {policy!r}")
    every = {} if policy == "refuse" else functional.buffers(module)
    real = lambda b: b if b.is_floating_point() else b.to(torch.float64)
    means = lambda b: policy == "average" and not b.is_complex() and bool(b.isfinite().all())
    averaged = {name: real(b) for name, b in every.items() if means(b)}
    return averaged, {name: b for name, b in every.items() if name not in averaged}


def counts(module: nn.Module, averaged: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Return the dtypes of those averaged buffers that hold counts or flags."""
    return {n: b.dtype for n, b in module.named_buffers() if n in averaged and not b.is_floating_point()}


def refuse_changed_buffers(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Raise ValueError if buffers of `module` are not what they were `before`; NaN is the same as NaN."""
    after = dict(module.named_buffers())
    changed = [name for name, old in before.items() if name not in after or _differ(old, after[name])]
    if changed:
        raise ValueError(
            f"Training changes the buffers {', '.join(changed)} of {type(module).__name__}, and averaging them "
            "silently would be wrong; choose buffers='local' (each client keeps its own) or buffers='average'"
        )


def perturbed(tensor: Tensor, number: int = 0) -> Tensor:
    """Return a tensor a little away from where it is, in direction `number`; signs are kept."""
    places = torch.arange(1, tensor.numel() + 1, device=tensor.device, dtype=torch.float64)
    wave = (0.1 * torch.sin(places + 7 * number)).reshape(tensor.shape).to(tensor.dtype)
    return torch.where(tensor == 0, wave, tensor * (1 + wave))


def ever_trained(parts: Mapping[str, Tensor]) -> Tensor:
    """Return 1 for clients whose optimisers have had a gradient of a parameter and 0 for others, `(K,)`."""
    return torch.stack([part.reshape(len(part), -1).any(1) for part in parts.values()]).any(0).long().cpu()


def joined(groups: Sequence[Tensor], done: Sequence[Local]) -> Local:
    """Return the solutions of groups of clients as those of one block."""
    whole = tree.concatenate(_same_info(done))
    return tree.take(whole, torch.cat(list(groups)).argsort().to(whole.lr_sum.device))


def _same_info(parts: Sequence[Local]) -> list[Local]:
    """Return the solutions of groups of clients, NaN for what only others have told."""
    names = dict.fromkeys(name for local in parts for name in local.info)
    return [local._replace(info={n: local.info.get(n, local.lr_sum * torch.nan) for n in names}) for local in parts]


def _differ(old: Tensor, new: Tensor) -> bool:
    new = new.to(old.device)
    return old.shape != new.shape or not bool(((old == new) | ((old != old) & (new != new))).all())
