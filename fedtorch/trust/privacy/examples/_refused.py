"""Layers and losses with which DP-SGD cannot train, each with its name and a replacement."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode

_STATISTICS = "keeps statistics of the rows, which would be published without noise"


def refuse_layers(module: nn.Module) -> None:
    """Raise ValueError if a layer makes an example's gradient depend on other examples, or changes its own state."""
    for name, part in module.named_modules():
        for fault in _faults(part):
            place = f" (layer {name!r})" if name else ""
            raise ValueError(
                f"Expected a loss that is the mean of its examples' losses, but {type(part).__name__} {fault[0]}{place}"
                f"; {fault[1]}"
            )


def suspects(module: nn.Module) -> list[str]:
    """Return a clause for each layer that mixes examples if the batch comes first, as in most modules."""
    refused = []
    for name, part in module.named_modules():
        setting, advice = "", ""
        if isinstance(part, nn.RNNBase | nn.MultiheadAttention) and not part.batch_first:
            setting, advice = "batch_first=False", "set batch_first=True"
        elif isinstance(part, nn.Softmax | nn.LogSoftmax | nn.Softmin) and part.dim == 0:
            setting, advice = "dim=0", "set dim=-1"
        elif isinstance(part, nn.Flatten) and part.start_dim == 0:
            setting, advice = "start_dim=0", "set start_dim=1"
        if setting:
            refused.append(f"{type(part).__name__} with {setting} (layer {name!r}): {advice}")
    return refused


def _faults(part: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs (fault of a layer, remedy)."""
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        yield "mixes them", "use LayerNorm or GroupNorm instead of BatchNorm"
    if isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats:
        yield f"{_STATISTICS} (track_running_stats=True)", "set track_running_stats=False"
    if isinstance(part, nn.Embedding | nn.EmbeddingBag):
        yield from _embedding_faults(vars(part), part.weight.requires_grad)
    if isinstance(part, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in part._forward_pre_hooks.values()):
        advice = "use torch.nn.utils.parametrizations.weight_norm, or no norm of the weights"
        yield "is part of a spectral norm, whose power iteration changes its buffers in every step", advice


def _embedding_faults(settings: Mapping[str, Any], trained: bool = True) -> Iterator[tuple[str, str]]:
    if settings.get("max_norm") is not None:
        yield f"changes its weights where it looks them up (max_norm={settings['max_norm']})", "leave max_norm out"
    if trained and settings.get("sparse"):
        yield "has sparse gradients (sparse=True), which have no noise", "set sparse=False"
    if trained and settings.get("scale_grad_by_freq"):
        what = "divides gradients by how often a batch has a token (scale_grad_by_freq=True)"
        yield what, "set scale_grad_by_freq=False"


class Faults(TorchFunctionMode):
    """Context that records operations whose settings mix the examples of a batch.

    Attributes:
        found: pairs (fault of an operation, remedy), in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[tuple[str, str], None] = {}

    def named(self) -> list[str]:
        """Return a clause for each recorded fault."""
        return [f"{what}: {advice}" for what, advice in self.operations]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for what, advice in _faults_of_call(func, args, kwargs or {}):
            self.operations[f"{func.__name__} {what}", advice] = None
        return func(*args, **(kwargs or {}))


def _faults_of_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the faults of a call of a function in `torch.nn.functional`; others have no signature to inspect."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return
    bound.apply_defaults()
    settings = bound.arguments
    if settings.get("reduction") == "sum" or settings.get("size_average") is False:
        yield "adds the examples' losses up (reduction='sum')", "take reduction='mean'"
    if function in (nn.functional.cross_entropy, nn.functional.nll_loss) and settings["reduction"] == "mean":
        if settings["weight"] is not None:
            what = "divides by the sum of the batch's class weights (weight=…)"
            yield what, "take the mean of the weighted losses with reduction='none'"
        target = settings["target"]
        if not target.is_floating_point() and bool((target == settings["ignore_index"]).any()):
            what = (
                f"divides by how many of the batch's labels are not ignored (ignore_index={settings['ignore_index']})"
            )
            yield what, "take the mean of the losses with reduction='none', or leave such rows out of the data"
    if function is nn.functional.batch_norm and settings["training"]:
        yield "normalises over the batch", "use layer_norm or group_norm instead"
    if function in (nn.functional.embedding, nn.functional.embedding_bag):
        yield from _embedding_faults(settings, isinstance(settings["weight"], Tensor) and torch.is_grad_enabled())
