"""Recognise modules whose training step is the loss of one linear model, whatever they are made of.

Such a module's code is a straight line (`straight_line`), so that what it does once it does always. It is called once,
on drawn rows and coefficients: if it calls one loss of `fedtorch.kernels`, and else only reshapes and multiplies, its
result is a polynomial within that loss, and one that equals the linear model's at drawn numbers equals it everywhere.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedtorch import functional, random
from fedtorch.federation.solvers.least_squares import LinearForm, linear_form
from fedtorch.federation.solvers.linear.straight_line import StraightLine, straight_line
from fedtorch.federation.solvers.objective import Objective, Reduction
from fedtorch.kernels.glm_steps import BERNOULLI, CATEGORICAL, GAUSSIAN, POISSON, Family
from fedtorch.models.linear import LinearHead, raw

_FAMILIES = {family.loss: family for family in (GAUSSIAN, BERNOULLI, POISSON, CATEGORICAL)}
_LOSSES = (nn.MSELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss, nn.CrossEntropyLoss)
_KNOWN = {nn.Linear, LinearHead, nn.Sequential, nn.Flatten, nn.Unflatten, nn.Identity, *_LOSSES}
_ROWS = (5, 2)  # of batches that are tried
_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4}  # of losses of order 1
_TORCH = (F.linear, torch.cat, torch.ones_like, torch.matmul, torch.flatten, torch.reshape, torch.squeeze)
_METHODS = "__getitem__ __matmul__ detach dim flatten matmul numel ravel reshape reshape_as size squeeze unflatten"
_OF_TENSORS = [getattr(Tensor, name) for name in f"{_METHODS} unsqueeze view view_as".split()]
_CALLS = frozenset((*_TORCH, torch.unsqueeze, *_OF_TENSORS, Tensor.ndim.__get__, Tensor.shape.__get__))  # type: ignore[attr-defined]


class LinearModel(NamedTuple):
    """A module whose training step is the loss of a linear model."""

    family: Family
    form: LinearForm
    dims: frozenset[int]  # that y may have, the clients and rows included
    logs: tuple[str, ...]  # names under which it logs the loss
    code: StraightLine
    flattens: Callable[[tuple[int, ...]], bool]  # whether it takes rows of a shape as the features, one after another


class _Unknown(Exception):
    """A module calls what is not known."""


class _Calls(TorchFunctionMode):
    """Note the losses that are called, and let nothing happen but what is known."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Family] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _FAMILIES:
            self.losses.append(_FAMILIES[function])
            _check_plain(function, args, kwargs)
        elif function not in _CALLS:
            raise _Unknown(function)
        return function(*args, **kwargs)


def linear_model(objective: Objective, loss: Any, trained: list[str]) -> LinearModel | None:
    """Return the linear model that a module is, None if it is none or its code does not show that it is.

    Args:
        objective: of the module.
        loss: of a module that is no LightningModule.
        trained: names of the parameters that are trained.
    """
    module = objective.module
    leaves = [(name, part) for name, part in module.named_modules() if any(True for _ in part.parameters(False))]
    if len(leaves) != 1 or type(leaves[0][1]) not in (nn.Linear, LinearHead):
        return None
    name, leaf = leaves[0]
    if set(trained) != {each for each, _ in module.named_parameters()} or getattr(leaf, "feature_map", raw) is not raw:
        return None
    if any(True for _ in module.buffers()) or objective.metrics.recorders:
        return None
    if objective.supervised and loss not in _FAMILIES and type(loss) not in _LOSSES:
        return None
    code = straight_line(module, _KNOWN, _FAMILIES)
    if code is None:
        return None
    form = _of_module(linear_form(leaf), f"{name}." if name else "")
    tried = functools.partial(_tried, objective, form, trained)
    found = {columns: tried(columns, (form.features,)) for columns in ((), (1,))}
    known = {columns: each for columns, each in found.items() if each is not None}
    if len(set(known.values())) != 1:  # what it is may not depend on the shape of y
        return None
    family, logs = next(iter(known.values()))
    flattens = functools.cache(lambda shape: all(tried(columns, shape) == each for columns, each in known.items()))
    return LinearModel(family, form, frozenset(2 + len(columns) for columns in known), logs, code, flattens)


def _of_module(form: LinearForm, prefix: str) -> LinearForm:
    """Return the form of a layer with the names that its parameters have in a module."""
    short = lambda tensors: {name.removeprefix(prefix): leaf for name, leaf in tensors.items()}
    long = lambda tensors: {prefix + name: leaf for name, leaf in tensors.items()}
    return (
        form._replace(join=lambda tensors: form.join(short(tensors)), split=lambda joined: long(form.split(joined)))
        if prefix
        else form
    )


def _tried(
    objective: Objective, form: LinearForm, trained: list[str], columns: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Family, tuple[str, ...]] | None:
    """Return the family and the names of what is logged, None if that is not known.

    Args:
        objective, form, trained: of the module.
        columns, shape: of drawn rows, y `(N, *columns)` and x `(N, *shape)`.
    """
    swap = functional.Swap(objective.module, trained)
    parameters = dict(objective.module.named_parameters())
    first = next(iter(parameters.values()))
    if first.dtype not in _TOLERANCE or first.device.type != "cpu" or math.prod(shape) != form.features:
        return None
    draw = lambda number, *shape: random.normal(random.fold_in(random.key(0), number), shape).to(first.dtype)
    values = {name: draw(i, *parameters[name].shape) for i, name in enumerate(trained)}
    theta = form.join({name: value[None] for name, value in values.items()})[0]
    found = set()
    for rows in _ROWS:
        x = draw(100 + rows, rows, form.features)
        y = draw(200 + rows, rows).abs() * 3
        if form.outputs > 1:
            y = y.long() % form.outputs
        eta = x @ theta[: form.features] + (theta[form.features] if len(theta) > form.features else 0.0)
        calls = _Calls()
        objective.reductions.clear()
        try:
            with warnings.catch_warnings(action="error"), torch.no_grad(), swap(list(values.values())), calls:
                loss, logs = objective((x.reshape(rows, *shape), y.reshape(rows, *columns)), None, 0)
        except Exception:  # whatever a module objects to
            return None
        if len(calls.losses) != 1 or (calls.losses[0] is CATEGORICAL) != (form.outputs > 1):
            return None
        wanted = calls.losses[0].loss(eta if form.outputs > 1 else eta[:, 0], y)
        if any(objective.reductions[name] != Reduction() for name in logs):
            return None
        said = torch.stack([loss, *logs.values()])
        if not torch.allclose(said, wanted.expand_as(said), rtol=_TOLERANCE[first.dtype], atol=0.0):
            return None
        found.add((calls.losses[0], tuple(logs)))
    return found.pop() if len(found) == 1 else None


def _check_plain(loss: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise _Unknown unless a loss is called with nothing but outputs and targets, or what is there by default."""
    signature = inspect.signature(loss)
    given = list(signature.bind(*args, **kwargs).arguments.items())[2:]
    for name, value in given:
        usual = signature.parameters[name].default
        if value is not usual and not (isinstance(value, (str, int, float)) and value == usual):
            raise _Unknown(loss)
