"""One optimiser for each client of a stack, for optimisers that do not act row by row.

Norms of a parameter, its number of elements, products of matrices and nested optimisers are a client's own only if the
optimiser holds the client's own tensors. An optimiser is therefore made for each client as in a loop over clients, and
the optimisers step one after the other; the gradients come from the stack.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedtorch.federation.solvers._configured import StepRefused
from fedtorch.federation.solvers.host_state import HostGenerators, equal_or_nan
from fedtorch.module_randomness.step_draws import Draws
from fedtorch.optimisers import State, options

Make = Callable[[Mapping[str, Tensor]], tuple[Optimizer, dict[str, nn.Parameter]]]  # from one client's values
Parts = dict[str, Any]  # parts of the state of a parameter

_BEGUN = "begun"  # an extra part: whether the client's optimiser has any state for the parameter
# attributes of an optimiser
_NOT_KEPT = {"state", "param_groups", "_opt_called", "_warned_capturable_if_run_uncaptured"}
_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


class ClientOptimizers:
    """Clients' optimisers of their own tensors, whose values are copied to the stacks after each step.

    Args:
        make: makes one client's, and returns its parameters by name with it.
        tensors: stacks `(K, ...)`, by name, with the clients' start.
        keep: whether `state` will be called.
        state: of earlier rounds; {} for a fresh start.
        template: see `template`; {} if no state is stored.
    """

    def __init__(
        self,
        make: Make,
        tensors: Mapping[str, Tensor],
        keep: bool,
        state: State,
        template: Mapping[str, Parts],
    ) -> None:
        count = len(next(iter(tensors.values())))
        self._clients = [make({name: tensor[k] for name, tensor in tensors.items()}) for k in range(count)]
        self._name, self._template = type(self._clients[0][0]).__name__, template
        for name, saved in state.items():
            begun, parts = saved[_BEGUN].tolist(), template[name].items()
            for k, (optimizer, parameters) in enumerate(self._clients):
                if begun[k]:
                    optimizer.state[parameters[name]].update({n: _loaded(n, saved[n][k], like) for n, like in parts})
        self._outside = [_outside(*client) for client in self._clients] if keep else []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all clients."""
        return [group for optimizer, _ in self._clients for group in optimizer.param_groups]

    def rates(self) -> Tensor:
        """Return the learning rate `(K,)` of each client's first group, which its optimiser may have set itself."""
        return torch.tensor(
            [optimizer.param_groups[0].get("lr", torch.nan) for optimizer, _ in self._clients], dtype=torch.float64
        )

    def step(
        self,
        tensors: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor | None],
        missing: Mapping[str, Tensor],
        draws: Draws,
    ) -> None:
        """Take a step of every client, and copy the results into the stacks.

        Args:
            tensors: stacks `(K, ...)`, by name.
            gradients: `(K, ...)`; None where no client has one.
            missing: `(K,)` bool, the clients that have no gradient of a tensor, by its name.
            draws: random draws of the step.

        Raises:
            StepRefused: an optimiser cannot take its step, or draws from Python's or NumPy's generator.
        """
        without = {name: mask.tolist() for name, mask in missing.items()}
        generators = HostGenerators.state()
        for k, (optimizer, parameters) in enumerate(self._clients):
            for name, parameter in parameters.items():
                gradient = None if name in without and without[name][k] else gradients[name]
                # A copy, for optimisers change gradients in place.
                fresh = None if gradient is None else gradient[k].clone(memory_format=torch.contiguous_format)
                parameter.grad = fresh
            with draws.alone(k):
                self._step(optimizer)
        if HostGenerators.moved(generators):
            raise StepRefused(
                f"Expected {self._name} to draw by torch, but it draws from Python's random or numpy.random, whose "
                "numbers clients would share; draw with torch, or use ft.lightning_fit"
            )
        for name, tensor in tensors.items():
            tensor.copy_(torch.stack([parameters[name].detach() for _, parameters in self._clients]))

    def _step(self, optimizer: Optimizer) -> None:
        try:
            optimizer.step()
        except Exception as error:  # any error of a user's optimiser
            raise StepRefused(
                f"Expected {self._name} to step by a client's gradients alone, but it raised {type(error).__name__} "
                f"({error}); use ft.lightning_fit or another optimiser"
            ) from error

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the clients' tensors to the stacks' values."""
        for k, (_, parameters) in enumerate(self._clients):
            for name, tensor in tensors.items():
                parameters[name].detach().copy_(tensor[k])

    def keep(self, clients: Tensor) -> None:
        """Keep the clients at positions `(M,)`, and drop the others."""
        self._clients = [self._clients[k] for k in clients.tolist()]
        self._outside = [self._outside[k] for k in clients.tolist()] if self._outside else []

    def template(self) -> dict[str, Parts]:
        """Return the parts of the first client's states, zeros, after a step.

        Raises:
            StepRefused: a part is not a number or tensor, or the optimiser stores something elsewhere.
        """
        self._refuse_outside(())
        optimizer, parameters = self._clients[0]
        parts_by_name = {name: _parts(optimizer, parameter) for name, parameter in parameters.items()}
        strange = [
            f"{n} ({type(v).__name__})" for parts in parts_by_name.values() for n, v in parts.items() if not _is_kept(v)
        ]
        if strange:
            raise StepRefused(
                f"Expected the state of {self._name} to be numbers and tensors, but got {', '.join(strange)}; use "
                "reset='round'"
            )
        zero = lambda part: torch.zeros_like(part) if isinstance(part, Tensor) else type(part)(0)
        return {name: {n: zero(part) for n, part in parts.items()} for name, parts in parts_by_name.items()}

    def state(self, scheduled: Collection[str] = ()) -> State:
        """Return the states of all clients, `(K, ...)`, by parameter and part; zeros without a state.

        Args:
            scheduled: hyperparameters that are set before every step.

        Raises:
            StepRefused: an optimiser has other parts than its template, or stores something elsewhere.
        """
        self._refuse_outside(scheduled)
        return {name: self._stacked(name, template) for name, template in self._template.items()}

    def _refuse_outside(self, scheduled: Collection[str]) -> None:
        for before, client in zip(self._outside, self._clients):
            changed = _changed(before, _outside(*client), scheduled)
            if changed:
                raise StepRefused(
                    f"{self._name} keeps its state outside of the parameters, in {', '.join(changed)}; use "
                    "reset='round'"
                )

    def _stacked(self, name: str, template: Parts) -> dict[str, Tensor]:
        each = [_parts(optimizer, parameters[name]) for optimizer, parameters in self._clients]
        for parts in each:
            if parts and _kinds(parts) != _kinds(template):
                raise StepRefused(
                    f"Expected the state of {self._name} for {name} to be {_kinds(template)} in every step, but got "
                    f"{_kinds(parts)}; use reset='round'"
                )
        device = self._clients[0][1][name].device
        rows = {n: torch.stack([_saved(parts.get(n, like), device) for parts in each]) for n, like in template.items()}
        return {_BEGUN: torch.tensor([bool(parts) for parts in each], device=device), **rows}


def untrained(template: Mapping[str, Parts]) -> State:
    """Return the state of one client without any state of parameters."""
    host = torch.device("cpu")
    return {
        name: {_BEGUN: torch.tensor(False), **{n: _saved(part, host) for n, part in parts.items()}}
        for name, parts in template.items()
    }


def _parts(optimizer: Optimizer, parameter: Tensor) -> Parts:
    return {name: part for name, part in optimizer.state.get(parameter, {}).items() if part is not None}


def _is_kept(part: Any) -> bool:
    return isinstance(part, Tensor) or type(part) in (bool, int, float)


def _kinds(parts: Parts) -> dict[str, Any]:
    """Describe parts by name: a tensor of a shape and dtype, or a class."""
    return {
        name: (tuple(part.shape), part.dtype) if isinstance(part, Tensor) else type(part).__name__
        for name, part in sorted(parts.items())
    }


def _saved(part: Any, device: torch.device) -> Tensor:
    return part.detach().to(device) if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.float64).to(device)


def _loaded(name: str, value: Tensor, like: Any) -> Any:
    """Return a part of a state as the optimiser had it; a part "step" is on the host, as torch has it."""
    if isinstance(like, Tensor):
        return value.to("cpu", copy=True) if name == "step" else value.clone()
    return type(like)(value.item())


def _outside(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return an optimiser's attributes besides the state of its client's parameters, by path."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {id(value): value for value in (optimizer, optimizer.state, *parameters.values())}
    for number, group in enumerate(optimizer.param_groups):
        seen[id(group)] = group
        _walk(f"param_groups[{number}]", options(group), seen, found)
    _walk("state", [part for key, part in optimizer.state.items() if id(key) not in seen], seen, found)
    _walk("", {name: value for name, value in vars(optimizer).items() if name not in _NOT_KEPT}, seen, found)
    return found


def _walk(path: str, value: Any, seen: dict[int, Any], slots: dict[str, Any]) -> None:
    """Add a value's contents to `slots`; `seen` keeps visited objects alive, so that their ids stay unique."""
    if isinstance(value, _SIMPLE):
        slots[path] = value
    if isinstance(value, (*_SIMPLE, type, types.ModuleType)) or id(value) in seen:
        return
    seen[id(value)] = value
    within: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        slots[path] = value.detach().clone()
    elif isinstance(value, torch.Generator):
        slots[path] = value.get_state()
    elif isinstance(value, Mapping):
        slots[path] = len(value)
        within = [(repr(key) if isinstance(key, str) else n, each) for n, (key, each) in enumerate(value.items())]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        slots[path] = len(value)
        within = enumerate(value)
    elif isinstance(value, types.MethodType):
        within = [("self", value.__self__), ("function", value.__func__)]
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())
        within = [(name, cell.cell_contents) for name, cell in cells]
    elif isinstance(value, Optimizer):
        attributes = [(repr(name), each) for name, each in vars(value).items() if name not in _NOT_KEPT]
        within = [*attributes, ("state", value.state), ("param_groups", value.param_groups)]
    elif hasattr(value, "__dict__"):
        within = [(repr(name), each) for name, each in vars(value).items()]
    for key, each in within:
        _walk(f"{path}[{key}]" if path else str(key).strip("'"), each, seen, slots)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], scheduled: Collection[str]) -> list[str]:
    """Return the paths of changed values, without hyperparameters that are set before every step."""
    endings = tuple(f"[{name!r}]" for name in scheduled)
    paths = [path for path in {**before, **after} if not path.endswith(endings)]
    return [path for path in paths if not _same(before.get(path), after.get(path))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(equal_or_nan(one, other).all())
    return type(one) is type(other) and (one == other or (one != one and other != other))
