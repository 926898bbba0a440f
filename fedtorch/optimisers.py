"""`torch.optim` optimisers as functions of trees, whose state is a tree of tensors like every message and checkpoint.

>>> import torch
>>> from fedtorch.optimisers import TreeOptimizer
>>> parameters = {"x": torch.tensor([4.0, -2.0])}
>>> momentum = TreeOptimizer.made(lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), parameters)
>>> state = momentum.init(parameters)
>>> for _ in range(2):
...     parameters, state = momentum.step(parameters, gradients=parameters, state=state)
>>> parameters["x"], state["x"]["momentum_buffer"]
(tensor([-0.8000,  0.4000]), tensor([ 5.6000, -2.8000]))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    optimizer as torch_optimizer,
)

from fedtorch import expected, tree

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
State = dict[str, dict[str, Tensor]]  # by parameter, then by the optimiser's own names

# Classes of torch that treat every element of a parameter independently, and their step functions at import.
_ELEMENTWISE = {
    kind: kind.step for kind in (SGD, Adam, AdamW, Adagrad, Adadelta, RMSprop, Rprop, NAdam, RAdam, Adamax, ASGD)
}


class TreeOptimizer:
    """An optimiser whose state is a tree: by parameter, then by the optimiser's own names, such as "exp_avg".

    A parameter's state is zero everywhere until its first gradient.

    Args:
        original: has the hyperparameters, in its groups.
        parameters: those of the optimiser, by name; frozen ones are left out. They are not changed.
        stacked: whether parameters and states are stacks `(K, ...)`. State that the optimiser has once per parameter,
            such as a step count, is then a row `(K,)` of equal values.
        advice: remedy at the end of the error for an optimiser whose state is not a tree.

    Raises:
        TypeError: not an optimiser, or one of other parameters.
    """

    def __init__(
        self,
        original: Optimizer,
        parameters: Mapping[str, Tensor],
        *,
        stacked: bool = False,
        advice: str = "and then it cannot be saved",
    ) -> None:
        if not isinstance(original, Optimizer):
            raise TypeError(f"Expected a torch.optim.Optimizer, but got {type(original).__name__}")
        names = {id(parameter): name for name, parameter in parameters.items()}
        groups = [group["params"] for group in original.param_groups]
        unknown = [tuple(p.shape) for group in groups for p in group if id(p) not in names]
        if unknown:
            raise TypeError(
                f"Expected the optimiser to hold the module's parameters, but got others of shapes {unknown}"
            )
        self.names = [[names[id(p)] for p in group if p.requires_grad] for group in groups]
        self.original, self.stacked, self.advice = original, stacked, advice
        self._numbers: dict[str, Any] | None = None  # scalar parts of the state and their types; None: unknown
        self._counts: set[str] = set()  # those that are one scalar for a parameter with more elements

    @property
    def counts(self) -> set[str]:
        """Return the names of state parts that are one scalar per parameter, such as its step count."""
        return self._counts

    @classmethod
    def made(cls, make: MakeOptimizer, parameters: Mapping[str, Tensor]) -> TreeOptimizer:
        """Build the optimiser that `make` returns for parameters of these names and shapes."""
        check_maker(make)
        stacked = {name: nn.Parameter(leaf.clone()) for name, leaf in parameters.items()}
        return cls(make(stacked.values()), stacked)

    def init(self, parameters: Mapping[str, Tensor]) -> State:
        """Return the state before the first step, zeros in the structure of the state after it.

        Raises:
            TypeError: the optimiser needs a closure, or has state that belongs to no parameter.
        """
        tensors = self._copies(parameters)
        optimizer = self._zero_step(tensors)
        numbers = [
            (tensor, name, type(value))
            for tensor, state in optimizer.state.items()
            for name, value in state.items()
            if value is not None and (not isinstance(value, Tensor) or value.ndim == 0)
        ]
        self._numbers = {name: kind for _, name, kind in numbers}
        self._counts = {name for tensor, name, _ in numbers if tensor.ndim > self.stacked}
        return tree.zeros_like(self.state(optimizer, tensors))

    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None], state: State
    ) -> tuple[dict[str, Tensor], State]:
        """Return (parameters, state) after a step; those without a gradient stay, and nothing is changed in place."""
        tensors = self._copies(parameters)
        optimizer = self.bind(tensors, state)
        for name, tensor in tensors.items():
            gradient = gradients[name]
            if gradient is not None:  # fused optimisers need contiguous gradients
                tensor.grad = gradient.detach().to(tensor.device, tensor.dtype).contiguous()
        optimizer.step()
        return tensors, self.state(optimizer, tensors, state)

    def bind(self, tensors: Mapping[str, Tensor], state: State | None = None) -> Optimizer:
        """Return an optimiser of `tensors`, with a copy of the state, that steps them in place by their `grad`."""
        optimizer = rebind(self.original, [[tensors[name] for name in group] for group in self.names])
        if state and self._numbers is None:
            self.init(tensors)
        on_device = {
            name
            for names, group in zip(self.names, optimizer.param_groups)
            for name in names
            if group.get("fused") or group.get("capturable")
        }
        begun, numbers = self._seen(state or {})
        for name, saved in (state or {}).items():
            if name in begun:
                read = {} if name in on_device else numbers[name]
                optimizer.state[tensors[name]].update(
                    {part: self._loaded(part, value, read.get(part)) for part, value in saved.items()}
                )
        return optimizer

    def state(self, optimizer: Optimizer, tensors: Mapping[str, Tensor], before: State | None = None) -> State:
        """Return the state of a bound optimiser, not copied; `before` for parameters without a gradient so far.

        Raises:
            TypeError: state of stacked parameters without a row per client.
        """
        old = before or {}
        return {name: {**old.get(name, {}), **self._parts(optimizer, tensor)} for name, tensor in tensors.items()}

    def _parts(self, optimizer: Optimizer, tensor: Tensor) -> dict[str, Tensor]:
        parts = {}
        for name, value in optimizer.state.get(tensor, {}).items():
            if value is None:
                continue
            value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            if self.stacked and value.ndim == 0:
                value = value.to(tensor.device).expand(len(tensor)).clone()
            elif self.stacked and len(value) != len(tensor):
                raise TypeError(
                    f"Expected {type(optimizer).__name__}'s state {name!r} to have a row per client, but got shape "
                    f"{tuple(value.shape)} for {len(tensor)} clients; {self.advice}"
                )
            parts[name] = value
        return parts

    def _seen(self, state: State) -> tuple[set[str], dict[str, dict[str, float]]]:
        """Return (parameters with a nonzero state, scalar parts of the states by parameter), in one transfer."""
        parts = [(name, part, value) for name, saved in state.items() for part, value in saved.items()]
        if not parts:
            return set(), {}
        device = next((value.device for _, _, value in parts if not value.is_cpu), parts[0][2].device)
        flags = [value.any().to(device, torch.float64) for _, _, value in parts]
        held = [(name, part, value) for name, part, value in parts if part in self._counts]
        numbers = [(value[0] if self.stacked else value).to(device, torch.float64) for _, _, value in held]
        read = torch.stack([*flags, *numbers]).tolist()
        numbers_of: dict[str, dict[str, float]] = {name: {} for name in state}
        for (name, part, _), number in zip(held, read[len(flags) :]):
            numbers_of[name][part] = number
        return {name for (name, _, _), flag in zip(parts, read) if flag}, numbers_of

    def _loaded(self, part: str, value: Tensor, read: float | None) -> Any:
        """Return a part of a state as the optimiser expects it; `read` is its value on the host."""
        kind = (self._numbers or {}).get(part)
        if kind is None:
            return value.clone()
        number = (value[0] if self.stacked else value) if read is None else torch.tensor(read, dtype=value.dtype)
        return number.clone() if issubclass(kind, Tensor) else kind(number)

    def _copies(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: parameters[name].detach().clone() for group in self.names for name in group}

    def _zero_step(self, tensors: dict[str, Tensor]) -> Optimizer:
        """Bind an optimiser and take a step with zero gradients, which creates its state."""
        name, optimizer = type(self.original).__name__, self.bind(tensors)
        before = [dict(group) for group in optimizer.param_groups]
        for tensor in tensors.values():
            tensor.grad = torch.zeros_like(tensor)
        try:
            optimizer.step()
        except TypeError as error:
            raise TypeError(f"Expected an optimiser that needs no closure, but got {name} ({error})") from error
        if [dict(group) for group in optimizer.param_groups] != before:
            raise TypeError(f"{name} keeps its state outside of the parameters; {self.advice}")
        return optimizer


class DirectSteps:
    """Steps of a bound optimiser on the CPU, by one torch operation for all parameters of a group.

    `Optimizer.step` checks devices, dtypes and states first, which costs more than a small step itself.

    Args:
        optimizer: its groups and states are read at every step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._known = type(optimizer) in (SGD, Adam, AdamW) and elementwise(optimizer)
        self._known = self._known and all(map(_plain, optimizer.param_groups))
        self._states: list[list[list[Tensor]]] | None = None  # of each group: by name, then by parameter

    def step(self) -> None:
        """Take a step by the parameters' `grad`."""
        groups = self.optimizer.param_groups
        gradients = [[tensor.grad for tensor in group["params"]] for group in groups]
        known = self._known and all(gradient is not None for each in gradients for gradient in each)
        if not known:
            self.optimizer.step()
            return
        if self._states is None:
            self._states = [self._moments(group) for group in groups]
        for group, given, state in zip(groups, gradients, self._states):
            if "betas" in group:
                self._adam(group, given, *state)
            else:
                torch._foreach_add_(group["params"], given, alpha=-group["lr"])

    def _moments(self, group: Mapping[str, Any]) -> list[list[Tensor]]:
        """Return the states of a group, by name and then by parameter, zero at first; none for SGD."""
        if "betas" not in group:
            return []
        states = [self.optimizer.state[parameter] for parameter in group["params"]]
        for parameter, state in zip(group["params"], states):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state.update({name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")})
        return [[state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq")]

    def _adam(
        self, group: Mapping[str, Any], given: list[Any], count: list[Tensor], mean: list[Tensor], square: list[Tensor]
    ) -> None:
        fused = torch._fused_adamw_ if group.get("decoupled_weight_decay") else torch._fused_adam_
        torch._foreach_add_(count, 1)
        beta1, beta2 = group["betas"]
        settings = {name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
        fused(group["params"], given, mean, square, [], count, beta1=beta1, beta2=beta2, **settings)


def _plain(group: Mapping[str, Any]) -> bool:
    """Return whether `DirectSteps` implements a group's steps."""
    more = any(group.get(name) for name in ("amsgrad", "differentiable", "capturable", "momentum"))
    numbers = not any(isinstance(value, Tensor) for value in (group["lr"], *group.get("betas", ())))
    if more or not numbers or not all(tensor.device.type == "cpu" for tensor in group["params"]):
        return False
    chosen = group["fused"] or group["weight_decay"] or group["maximize"]
    return bool(group["fused"]) if "betas" in group else not chosen


def elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimiser acts on a stack as independent optimisers of its rows, by its type.

    It is one of torch's own classes, with torch's own step and without hooks.

    >>> elementwise(SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
    True
    >>> elementwise(torch.optim.Adafactor([torch.zeros(1, requires_grad=True)]))
    False
    """
    kind, step = type(optimizer), vars(optimizer).get("step")
    if kind not in _ELEMENTWISE or _hooked(optimizer):
        return False
    of_class = kind.step  # torch wraps it when the first optimiser of a class is made
    torchs = _ELEMENTWISE[kind] in (of_class, getattr(of_class, "__wrapped__", None))
    scheduled = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is of_class
    return torchs and (step is None or scheduled)


def _hooked(optimizer: Optimizer) -> bool:
    """Return whether an optimiser's steps, or those of all optimisers, have hooks."""
    of_all = any(getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post"))
    return of_all or any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))


def check_maker(make: MakeOptimizer) -> None:
    """Raise TypeError unless `make` is a function from parameters to an optimiser.

    >>> check_maker(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    Traceback (most recent call last):
    TypeError: Expected a function of parameters that makes an optimiser, but got ...
    """
    advice = "pass optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), for every client has its own"
    expected.function(make, "a function of parameters that makes an optimiser", advice)


def rebind(optimizer: Optimizer, groups: list[list[Tensor]]) -> Optimizer:
    """Return the same optimiser with the same hyperparameters on other tensors, in its initial state.

    Raises:
        TypeError: the constructor sets a state that is not the same number everywhere.
    """
    clone = object.__new__(type(optimizer))
    clone.__dict__.update(vars(optimizer))
    clone.__dict__.pop("step", None)  # schedulers wrap it and bind it to the original
    clone.state = defaultdict(dict)
    clone.param_groups = []
    for group, tensors in zip(optimizer.param_groups, groups):
        clone.param_groups.append({"params": tensors, **options(group)})
        if _may_fuse(clone.param_groups[-1]):
            clone.param_groups[-1]["fused"] = True
        begun = {p.is_complex(): optimizer.state[p] for p in reversed(group["params"]) if p in optimizer.state}
        for tensor in tensors if begun else ():
            initial = begun.get(tensor.is_complex(), next(iter(begun.values())))
            clone.state[tensor] = {name: _fill(value, tensor, name, clone) for name, value in initial.items()}
    return clone


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the hyperparameters of a parameter group; schedulers change a tensor learning rate in place."""
    return {name: _copied(value) for name, value in group.items() if name != "params"}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _may_fuse(group: dict[str, Any]) -> bool:
    """Return whether an optimiser with two moments can be fused, and the user has not chosen.

    Fused optimisers need contiguous parameters and gradients, and real numbers.
    """
    undecided = group.get("fused", False) is None and group.get("foreach") is None
    plain = not group.get("differentiable") and not group.get("capturable")
    fits = all(p.is_contiguous() and not p.is_complex() for p in group["params"])
    return "betas" in group and undecided and plain and fits


def _fill(value: Any, tensor: Tensor, name: str, optimizer: Optimizer) -> Any:
    """Return a constructor's state (such as Adagrad's sums) for a tensor of another shape."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return _copied(value)
    if bool((value != value.flatten()[0]).any()):
        raise TypeError(
            f"{type(optimizer).__name__} starts with a state {name!r} that differs between elements; use "
            "ft.lightning_fit or another optimiser"
        )
    first = value.flatten()[0] if tensor.is_complex() else value.flatten()[0].real
    return first.to(tensor.device, tensor.dtype).expand(tensor.shape).clone()
