"""Modules as functions of their tensors: parameters as a flat dict, split into shared and personal by name.

>>> from torch import nn
>>> from fedtorch import functional
>>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
>>> personal, shared = functional.split(functional.parameters(net), "2.*")
>>> sorted(personal), sorted(shared)
(['2.bias', '2.weight'], ['0.bias', '0.weight'])
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.vmap import lazy_load_decompositions

_STRETCHES = 2**10  # stretches of a tensor's numbers, whose order counts in its checksum


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the trainable parameters by name, without frozen ones (`requires_grad=False`)."""
    check_made(module)
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers by name.

    Example:
        >>> net = nn.BatchNorm1d(3)
        >>> {name: tuple(tensor.shape) for name, tensor in buffers(net).items()}
        {'running_mean': (3,), 'running_var': (3,), 'num_batches_tracked': ()}
    """
    return {name: b.detach().clone() for name, b in module.named_buffers()}


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, the module's own.

    Example:
        >>> list(tensors(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))))
        ['0.weight', '1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def layers(module: nn.Module) -> dict[str, dict[str, str]]:
    """Return the class and settings of each layer as text, by the layer's name.

    The settings of torch's own layers are their public attributes that are numbers, texts, functions, or tuples of
    these: the p of a dropout, the activation of an encoder. Those of other classes are the text of `extra_repr`,
    without addresses.

    Example:
        >>> layers(nn.Sequential(nn.Dropout(0.1)))["0"]
        {'class': 'Dropout', 'p': '0.1', 'inplace': 'False'}
    """
    return {name: {"class": type(part).__qualname__, **_settings(part)} for name, part in module.named_modules()}


def _settings(part: nn.Module) -> dict[str, str]:
    if type(part).__module__.partition(".")[0] == "torch":
        public = {n: _setting(v) for n, v in vars(part).items() if not n.startswith("_") and n != "training"}
        return {name: text for name, text in public.items() if text is not None}
    try:
        extra = part.extra_repr()
    except Exception:  # a part that cannot be printed yet
        return {}
    return {"extra_repr": re.sub(" at 0x[0-9a-f]+", "", extra)} if extra else {}


def _setting(value: Any) -> str | None:
    """Return a setting as text, None of objects."""
    if isinstance(value, (tuple, list)):
        parts = [_setting(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return str(value)
    return getattr(value, "__name__", None) if callable(value) else None


def checksum(tensor: Tensor) -> int | None:
    """Return a number that is the same on every device for the same bits, and seldom for others; None of odd layouts.

    The order of numbers counts, in large tensors that of stretches of them.

    Example:
        >>> [checksum(torch.tensor(some)) for some in ([1.0, 2.0], [2.0, 1.0], [1.0, 2.0])]
        [4286578688, 4269801472, 4286578688]
        >>> checksum(torch.tensor([True])), checksum(torch.eye(2).to_sparse())
        (1, None)
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
    words = plain.detach().flatten().contiguous().view(whole)
    length = -(-len(words) // _STRETCHES) or 1
    sums = torch.stack([part.sum(dtype=torch.int64) for part in words.split(length)]) if length > 1 else words.long()
    return int((sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum())


def split(tensors: Mapping[str, Tensor], patterns: str | Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split named tensors in two: (those that match a pattern, the rest).

    Args:
        tensors: for example `parameters(module)`.
        patterns: shell patterns on the full name, such as `"head.*"` or `["*.bias", "scale"]`.

    Raises:
        ValueError: a pattern matches no name; the message lists the names.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            raise ValueError(f"Expected a pattern that matches one of {sorted(tensors)}, but got {pattern!r}")
    matching = {n: t for n, t in tensors.items() if any(fnmatchcase(n, p) for p in patterns)}
    return matching, {n: t for n, t in tensors.items() if n not in matching}


def copied(module: nn.Module) -> nn.Module:
    """Deep copy a module, with parameters' hooks and attributes, which `copy.deepcopy` loses.

    A hook, or another function that a part holds, which is a method of the module or closes over it, is the copy's.

    Raises:
        RuntimeError: the module cannot be copied; the message has the remedy.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> handle = net.weight.register_hook(lambda gradient: 0 * gradient)
        >>> other = copied(net)
        >>> other(torch.ones(1, 2)).sum().backward()
        >>> other.weight.grad
        tensor([[0., 0.]])
    """
    scripted = [path or "itself" for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        raise TypeError(
            f"Expected a module of Python, but {', '.join(scripted)} of {type(module).__name__} is scripted, whose "
            "tensors cannot be a client's; give the module before torch.jit.script"
        )
    check_made(module)
    memo: dict[int, Any] = {}
    try:
        result = copy.deepcopy(module, memo)
    except (RuntimeError, ValueError, TypeError) as error:
        raise _not_copied(module, error) from error
    _rebind_functions(result, memo)
    for old, new in zip(module.parameters(), result.parameters()):
        vars(new).update({name: _copied(value, memo) for name, value in vars(old).items()})
        for hook in (old._backward_hooks or {}).values():
            new.register_hook(_rebound(hook, memo))
        for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
            new.register_post_accumulate_grad_hook(_rebound(hook, memo))
    return result


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy; objects that cannot be copied, such as a tensor with a history of operations, are shared."""
    try:
        return copy.deepcopy(value, memo)
    except (RuntimeError, TypeError):
        return value


def check_made(module: nn.Module) -> None:
    """Raise RuntimeError for lazy parameters and buffers, which torch makes of a first batch.

    Example:
        >>> check_made(nn.LazyLinear(1))
        Traceback (most recent call last):
        RuntimeError: Expected LazyLinear with its parameters made, but weight, bias wait for a first batch; ...
    """
    kinds = nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer
    lazy = [name for name, each in (*module.named_parameters(), *module.named_buffers()) if isinstance(each, kinds)]
    if lazy:
        raise RuntimeError(
            f"Expected {type(module).__name__} with its parameters made, but {', '.join(lazy)} wait for a first batch; "
            "call the module once on one, for example module(x[:2])"
        )


def refuse_shared_memory(module: nn.Module) -> None:
    """Raise TypeError for parameters of one memory, which each client would have apart; one parameter is tied right."""
    seen: dict[int, str] = {}
    parameters = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            continue
        if not tensor.numel() or tensor.layout is not torch.strided or tensor.device.type == "meta":
            continue
        first = seen.setdefault(tensor.untyped_storage().data_ptr(), name)
        if first != name and parameters & {first, name}:
            raise TypeError(
                f"Expected parameters with a storage of their own, but {first} and {name} of {type(module).__name__} "
                "share one; tie them as one nn.Parameter, or give each its own by .clone()"
            )


def _rebound(function: Any, memo: Mapping[int, Any]) -> Any:
    """Return a function whose bound object and closure refer to the copies."""
    if isinstance(function, types.MethodType) and id(function.__self__) in memo:
        return types.MethodType(function.__func__, memo[id(function.__self__)])
    if isinstance(function, functools.partial):
        parts = [memo.get(id(part), part) for part in function.args]
        return functools.partial(_rebound(function.func, memo), *parts, **function.keywords)
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    contents = [content_of(cell) for cell in function.__closure__]
    if not any(isinstance(content, nn.Module) and id(content) in memo for content in contents):
        return function
    cells = tuple(
        types.CellType(memo[id(content)]) if isinstance(content, nn.Module) and id(content) in memo else cell
        for cell, content in zip(function.__closure__, contents)
    )
    new = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__ = function.__kwdefaults__
    vars(new).update(vars(function))
    return new


def content_of(cell: Any) -> Any:
    """Return the content of a closure's cell, None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _rebind_functions(module: nn.Module, memo: Mapping[int, Any]) -> None:
    """Bind the functions that the parts of a copy hold, such as hooks, to the copy."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if name.endswith("_hooks") and isinstance(value, dict):
                for key, hook in value.items():
                    value[key] = _rebound(hook, memo)
            elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                vars(part)[name] = _rebound(value, memo)


def _not_copied(module: nn.Module, error: Exception) -> Exception:
    """Return the error of a module that cannot be copied."""
    name = type(module).__name__
    parts = [path or name for path, part in module.named_modules() if _derived(part)]
    if parts:
        return RuntimeError(
            f"Expected a module that can be copied for every client, but {', '.join(parts)} of {name} keep tensors "
            "that were computed from others, as torch.nn.utils.weight_norm, spectral_norm and prune do, or what a call "
            "has cached; use torch.nn.utils.parametrizations, prune.remove, or give the module before its first call"
        )
    return RuntimeError(f"Expected a module that can be copied for every client, but {name} cannot be: {error}")


def _derived(part: nn.Module) -> bool:
    """Return whether a part has an attribute that is a tensor with a history of operations."""
    return any(isinstance(value, Tensor) and value.grad_fn is not None for value in vars(part).values())


def load(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of `module` with parameters and buffers replaced by `tensors` (some or all of them).

    Raises:
        KeyError: the module has no parameter or buffer of that name.
        ValueError: a tensor has another shape than the module's.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> trained = load(net, {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([0.5])})
        >>> trained(torch.tensor([[3.0, 1.0]])).tolist(), net.weight is trained.weight
        ([[5.5]], False)
    """
    result = copied(module)
    for (name, value), target in zip(tensors.items(), _named(result, list(tensors))):
        if value.shape != target.shape:
            raise ValueError(f"Expected shape {tuple(target.shape)} for {name!r}, but got {tuple(value.shape)}")
        value = value.detach() if target.is_floating_point() else counted(value.detach(), target.dtype)
        target.data = value.to(target.device, copy=True)
    return result


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of `module` with `tensors` in place of its own; the other tensors are shared.

    Unlike `load` it copies no tensor of the module, and gradients flow to the given ones.

    Raises:
        KeyError: the module has no parameter or buffer of that name.

    Example:
        >>> net, weight = nn.Linear(2, 1), torch.tensor([[1.0, 2.0]], requires_grad=True)
        >>> other = with_tensors(net, {"weight": weight})
        >>> other.weight is weight, other.bias is net.bias
        (True, True)
    """
    memo = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    memo.update((id(old), new) for old, new in zip(_named(module, list(tensors)), tensors.values()))
    result = copy.deepcopy(module, memo)
    _rebind_functions(result, memo)
    return result


def arguments(module: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call `module` on `inputs`: with a dict of arguments of its `forward` by name, otherwise as they are.

    Example:
        >>> net = nn.Bilinear(2, 3, 1)
        >>> batch = {"input1": torch.ones(4, 2), "input2": torch.ones(4, 3)}
        >>> positional, named = arguments(net, batch)
        >>> net(*positional, **named).shape
        torch.Size([4, 1])
        >>> len(arguments(nn.Linear(2, 1), batch["input1"])[0])  # the tensor itself, as the first argument
        1
    """
    if isinstance(inputs, dict):
        takes = inspect.signature(module.forward).parameters
        if inputs.keys() <= takes.keys() or any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            return (), inputs
    return (inputs,), {}


def counted(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return means of counts or flags as whole numbers, rounded up: a flag that one client has raised is raised.

    A value that exceeds a whole number by less than 0.001 counts as that number, with the rounding of a mean.

    Example:
        >>> counted(torch.tensor([0.25, 2.0001]), torch.int64)  # one of four has counted 1; all have 2, or nearly
        tensor([1, 2])
    """
    return (value - 1e-3).ceil().to(dtype) if value.is_floating_point() else value.to(dtype)


def finite_parts(value: Tensor) -> Tensor:
    """Convert real numbers `(...)` to `(..., 4)` finite ones: the number or 0, and flags for Inf, −Inf and NaN.

    Their weighted means determine the weighted mean of the numbers, see `from_finite_parts`. Complex numbers are pairs,
    `(..., 2, 4)`. Half precision becomes float32, in which a small weight does not become 0.

    Example:
        >>> finite_parts(torch.tensor([3.0, float("inf")]))
        tensor([[3., 0., 0., 0.],
                [0., 1., 0., 0.]])
    """
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    wide = value if value.dtype == torch.float64 else value.to(torch.float32)
    kinds = [wide == torch.inf, wide == -torch.inf, wide.isnan()]
    return torch.stack([torch.where(wide.isfinite(), wide, 0.0), *(kind.to(wide.dtype) for kind in kinds)], -1)


def from_finite_parts(parts: Tensor) -> Tensor:
    """Return the numbers `(...)` of finite parts `(..., 4)`, or their weighted mean of that of the parts.

    A mean with an infinite part is infinite; with both infinities, or NaN, it is NaN.

    Example:
        >>> from_finite_parts(finite_parts(torch.tensor([[3.0, float("inf")], [5.0, 1.0]])).mean(0))
        tensor([4., inf])
    """
    number, up, down, neither = parts.unbind(-1)
    number = torch.where(up > 0, torch.inf, torch.where(down > 0, -torch.inf, number))
    return torch.where((neither > 0) | ((up > 0) & (down > 0)), torch.nan, number)


def mapped(function: Callable[..., Sequence[Tensor]], stacked: Sequence[Tensor], randomness: str) -> list[Tensor]:
    """Compute `torch.vmap(function, randomness=randomness)(*stacked)` with flat tensors in and out.

    `torch.vmap` walks through nested containers, which costs more than a small step itself.

    Example:
        >>> mapped(lambda x, y: (x @ y, x.sum()), [torch.ones(3, 2), torch.ones(3, 2)], randomness="error")
        [tensor([2., 2., 2.]), tensor([2., 2., 2.])]
    """
    _load_decompositions()
    maps, count = torch._C._functorch, len(stacked[0])
    level = maps._vmap_increment_nesting(count, randomness)
    try:
        results = function(*[maps._add_batch_dim(tensor, 0, level) for tensor in stacked])
        return [maps._remove_batch_dim(result, level, count, 0) for result in results]
    finally:
        maps._vmap_decrement_nesting()


_load_decompositions = functools.cache(lazy_load_decompositions)  # takes a lock in every call


def _named(module: nn.Module, names: Sequence[str]) -> list[Tensor]:
    """Return the module's own parameters and buffers of these names."""
    named = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for name in names:
        if name not in named:
            raise KeyError(f"Expected a parameter or buffer of {type(module).__name__}, but got {name!r}")
    return [named[name] for name in names]


class Swap:
    """Runs a module on other tensors: `with swap(values): module(...)`.

    Like `torch.func.functional_call`, but with the tensors' places looked up once instead of in every call.

    Args:
        module: has the parameters and buffers.
        names: of the parameters and buffers to replace; tied ones are replaced together.

    Raises:
        KeyError: the module has no parameter or buffer of that name.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> swap = Swap(net, ["weight", "bias"])
        >>> with swap([torch.tensor([[1.0, 2.0]]), torch.tensor([0.5])]):
        ...     net(torch.tensor([[3.0, 1.0]]))
        tensor([[5.5000]])
        >>> swap.current()[0] is net.weight  # its own are back
        True
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append((table, name))
        each = [places[id(tensor)] for tensor in _named(module, names)]
        self._count, self._first = len(each), [tables[0] for tables in each]
        self._places = [(table, name, i) for i, tables in enumerate(each) for table, name in tables]

    @contextmanager
    def __call__(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Put `values` in the places of the names, in their order, and take them out again."""
        if len(values) != self._count:
            raise ValueError(f"Expected {self._count} tensors, but got {len(values)}")
        before = [table[name] for table, name, _ in self._places]
        try:
            for table, name, i in self._places:
                table[name] = values[i]
            yield
        finally:
            for (table, name, _), original in zip(self._places, before):
                table[name] = original

    def current(self) -> list[Tensor]:
        """Return the tensors that are in the places of the names now."""
        return [table[name] for table, name in self._first]
