"""Hooks that a user has registered on the gradients of parameters, for the gradients of stacked clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

Hook = Callable[[Tensor], Tensor | None]


class ParameterHooks:
    """The hooks of `Tensor.register_hook` on trained parameters, called with each client's gradient.

    Args:
        module: has them.
        names: of the trained parameters, in the order of their gradients.

    Raises:
        TypeError: a parameter has a hook that runs after its gradient is accumulated, which no client's step does.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        parameters = dict(module.named_parameters())
        after = [name for name, p in parameters.items() if getattr(p, "_post_accumulate_grad_hooks", None)]
        if after:
            raise TypeError(
                f"Expected parameters without register_post_accumulate_grad_hook, but {', '.join(after)} of "
                f"{type(module).__name__} have one, which would step before the others' terms are added; use "
                "register_hook, or ft.lightning_fit"
            )
        each = [parameters[name]._backward_hooks if name in parameters else None for name in names]
        self._hooks: dict[int, list[Hook]] = {i: list(hooks.values()) for i, hooks in enumerate(each) if hooks}

    def alone(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return one client's gradients after the hooks."""
        if not self._hooks:
            return gradients
        done: list[Any] = list(gradients)
        for i, hooks in self._hooks.items():
            for hook in hooks if done[i] is not None else ():
                changed = hook(done[i])
                done[i] = done[i] if changed is None else changed
        return done

    def stacked(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients `(K, ...)` after the hooks, which see one client's after another."""
        if not self._hooks:
            return gradients
        done = list(gradients)
        for i in self._hooks:
            whole = done[i]
            if whole is not None:
                rows = (self.alone([None] * i + [row])[i] for row in whole.unbind())
                done[i] = torch.stack([row for row in rows if row is not None])
        return done


def backward_hooks(module: nn.Module) -> list[str]:
    """Return the names of the parts of a module with hooks on their backward passes, which `vmap` does not call right.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
        >>> handle = net[0].register_full_backward_hook(lambda part, inputs, outputs: None)
        >>> backward_hooks(net)
        ['0 (Linear)']
    """
    everywhere = bool(torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
    return [
        f"{name or 'itself'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if everywhere or part._backward_hooks or part._backward_pre_hooks
    ]
