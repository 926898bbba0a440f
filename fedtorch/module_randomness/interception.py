"""Random operations inside a user's module, drawn from client keys.

A module that calls dropout or `torch.randn` draws from torch's global generator, which is shared by all clients.
`KeyedRandomness` intercepts these operations below `vmap` and autograd, where they arrive as plain tensors with the
clients in front, and draws each from (client key, number of the call, position in the client's row). A client's dropout
mask is then the same stacked with others, in chunks and alone, and the global generator is not used.

>>> import torch
>>> from fedtorch import random
>>> from fedtorch.module_randomness.interception import KeyedRandomness
>>> clients, inputs = random.fold_in(random.key(0), torch.arange(3)), torch.ones(3, 4, 5)
>>> dropout = torch.nn.Dropout()
>>> with KeyedRandomness(clients):
...     stacked = torch.func.vmap(dropout, randomness="different")(inputs)
>>> with KeyedRandomness(clients[1]):
...     alone = dropout(inputs[1])
>>> torch.equal(stacked[1], alone)
True
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedtorch import random
from fedtorch._devices import generators, restored
from fedtorch.module_randomness import plain_attention

aten = torch.ops.aten
Arguments = dict[str, Any]
Draw = Callable[..., Tensor]  # (keys, shape of a row, ...) -> rows


class Seeded(NotImplementedError):
    """A step sets one of torch's generators to a seed or a state."""

    def __init__(self) -> None:
        super().__init__(
            "Expected draws without a seed, but the step calls torch.manual_seed or sets a generator's state, where "
            "clients draw from keys of their own; leave that away, or use ft.lightning_fit"
        )


def _is_global(generator: torch.Generator) -> bool:
    """Return whether a generator is its device's default, of which torch makes a new Python object at every call."""
    before, default = generator.get_state(), generators(generator.device)[-1]
    seed = default.initial_seed() ^ 1
    try:
        return generator.manual_seed(seed).initial_seed() == default.initial_seed()
    finally:
        generator.set_state(before)


class KeyedRandomness(TorchDispatchMode):
    """A context in which a module's random operations draw from keys.

    Enter it around `torch.func.vmap(function, randomness="different")`; `backward` may run inside or outside. With one
    client's key and no `vmap` the whole of every tensor is that client's row. A further `vmap` over examples inside has
    the draws of the batch as a whole. Operations without a rule here, such as a gamma variate, are drawn by torch for
    one client alone, seeded by the call's key; draws from a generator argument other than torch's own are not changed.
    Attention uses its plain kernel, since the fused ones draw their dropout inside. Dropout and `bernoulli` draw the
    same in every dtype, the others do not.

    Args:
        keys: `(K,)` for `K` stacked clients, `()` for one client alone.
        first: keys of the first calls, `(*keys.shape, C)`, made before; None makes them when they are needed.
        note: called at every draw.

    Attributes:
        calls: number of intercepted operations.

    Raises:
        RuntimeError: in the context, for a draw that is not supported or does not have the clients in front.
    """

    def __init__(self, keys: Tensor, first: Tensor | None = None, note: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.keys, self._note = keys, note
        self.calls = 0
        self._made = () if first is None else first.unbind(-1)  # keys of calls, the first of them number `_from`
        self._from, self._seed = 0, torch.initial_seed()

    def draw(self, function: Draw, row: tuple[int, ...], *arguments: Any) -> Tensor:
        """Return `function(keys of the next call, row, *arguments)`, of numbers that depend on (key, position) only."""
        return function(self.key(), row, *arguments)

    def __enter__(self) -> KeyedRandomness:
        plain_attention.enter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        plain_attention.leave()

    def __torch_dispatch__(
        self, fn: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(fn):
            return fn(*args, **kwargs)
        if fn.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # in inference mode composite operations arrive undecomposed
                return fn.decompose(*args, **kwargs)
        arguments = _bind(fn, args, kwargs)
        if any(arguments.get(name) == value for name, value in _DETERMINISTIC):
            return fn(*args, **kwargs)
        if torch.initial_seed() != self._seed:
            raise Seeded
        draw = _DRAWS.get(fn.overloadpacket)
        generator = arguments.get("generator")
        if generator is not None and not self.keys.ndim and not _is_global(generator):
            return fn(*args, **kwargs)
        if draw is None and not self.keys.ndim and generator is None:
            return self._by_torch(fn, args, kwargs)
        if generator is not None:
            raise NotImplementedError(
                f"Expected {fn} without an explicit generator that clients share; leave generator= away, for clients "
                "draw from keys of their own, make one in each step with batched='auto', or use ft.lightning_fit"
            )
        if draw is None or "out" in arguments:
            supported = ", ".join(sorted({packet.__name__ for packet in _DRAWS}))
            how = " with out=" if draw is not None else ""
            raise NotImplementedError(
                f"{fn}{how} is not supported on stacked clients; draw it with one of {supported}, "
                "or use ft.lightning_fit"
            )
        if self._note is not None:
            self._note()
        return draw(self, fn, arguments)

    def _by_torch(self, fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return torch's draw for one client, with generators seeded by the key of this call."""
        if self._note is not None:
            self._note()
        device, seed = self.keys.device, int(self.key()) % 2**63
        with restored(generators(device), seed):
            return fn(*args, **kwargs)

    def anew(self) -> KeyedRandomness:
        """Return an interception that draws the same again."""
        return type(self)(self.keys)

    def key(self) -> Tensor:
        """Return the clients' keys of the next call, in the shape of `keys`."""
        if self.calls >= self._from + len(self._made):
            self._from, calls = self.calls, torch.arange(self.calls, self.calls + AHEAD, device=self.keys.device)
            self._made = random.fold_in(self.keys.unsqueeze(-1), calls).unbind(-1)
        self.calls += 1
        return self._made[self.calls - 1 - self._from]

    def row(self, fn: Any, shape: Sequence[int]) -> tuple[int, ...]:
        """Return one client's part of a shape that has the clients in front."""
        clients = tuple(self.keys.shape)
        if tuple(shape[: len(clients)]) != clients:
            raise _misplaced(fn, clients, shape)
        return tuple(shape[len(clients) :])


AHEAD = 8  # calls whose keys are made at a time: eight cost little more than one
_DETERMINISTIC = (("dropout_p", 0.0), ("dropout", 0.0), ("train", False), ("training", False))


def _misplaced(fn: Any, clients: tuple[int, ...], shape: Sequence[int]) -> RuntimeError:
    return RuntimeError(
        f"Expected random tensors with the clients {clients} in front, but got {tuple(shape)} in {fn}; "
        "call the module under one vmap over these clients, with randomness='different'"
    )


@functools.cache
def _is_random(fn: Any) -> bool:
    # Some operations draw but lack the tag (`random_`, `_sample_dirichlet`): they take a generator.
    return torch.Tag.nondeterministic_seeded in fn.tags or any(
        argument.name == "generator" for argument in fn._schema.arguments
    )


def _bind(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    schema = fn._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(schema, args)} | kwargs


def _like(arguments: Arguments) -> tuple[Sequence[int], torch.dtype, torch.device]:
    """Return shape, dtype and device of an elementwise operation's result."""
    if "size" in arguments:
        dtype = arguments["dtype"] or torch.get_default_dtype()
        if isinstance(dtype, int):  # a schema's default is an int, which only integers have
            dtype = torch.int64
        return arguments["size"], dtype, arguments["device"] or torch.get_default_device()
    names = ("self",) if "self" in arguments else ("mean", "std")
    tensors = [arguments[name] for name in names if isinstance(arguments[name], Tensor)]
    shape = tensors[0].shape if len(tensors) == 1 else torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return shape, arguments.get("dtype") or tensors[0].dtype, arguments.get("device") or tensors[0].device


Values = Callable[[KeyedRandomness, tuple[int, ...], torch.dtype, Arguments], Tensor]


def _elementwise(values: Values) -> Callable[[KeyedRandomness, Any, Arguments], Tensor]:
    """Return a draw whose elements are independent, returned or written in place."""

    def draw(drawn: KeyedRandomness, fn: Any, arguments: Arguments) -> Tensor:
        shape, dtype, device = _like(arguments)
        row = drawn.row(fn, shape)
        result = values(drawn, row, dtype, arguments).to(device, dtype)
        return arguments["self"].copy_(result) if fn._schema.is_mutable else result

    return draw


def _uniform(drawn: KeyedRandomness, row: tuple[int, ...], dtype: torch.dtype, arguments: Arguments) -> Tensor:
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    return drawn.draw(random.uniform, row, dtype).mul_(high - low).add_(low)


def _normal(drawn: KeyedRandomness, row: tuple[int, ...], dtype: torch.dtype, arguments: Arguments) -> Tensor:
    mean, std = arguments.get("mean", 0.0), arguments.get("std", 1.0)
    device = next((value.device for value in (mean, std) if isinstance(value, Tensor)), drawn.keys.device)
    return drawn.draw(random.normal, row, dtype).to(device) * std + mean


def _exponential(drawn: KeyedRandomness, row: tuple[int, ...], dtype: torch.dtype, arguments: Arguments) -> Tensor:
    return drawn.draw(random.exponential, row, dtype).div_(arguments.get("lambd", 1.0))


def _bernoulli(drawn: KeyedRandomness, row: tuple[int, ...], dtype: torch.dtype, arguments: Arguments) -> Tensor:
    probability = arguments["p"] if "p" in arguments else arguments["self"]
    if isinstance(probability, Tensor):
        return random.bernoulli(drawn.key(), probability.to(drawn.keys.device), row)
    return drawn.draw(_coins, row, probability)


def _integers(drawn: KeyedRandomness, row: tuple[int, ...], dtype: torch.dtype, arguments: Arguments) -> Tensor:
    low, high = arguments.get("low", 0), arguments["high"]
    return drawn.draw(_below, row, int(high) - low).add_(low)


def _coins(key: Tensor, row: tuple[int, ...], probability: float) -> Tensor:
    return random.bernoulli(key, probability, row)


def _below(key: Tensor, row: tuple[int, ...], high: int) -> Tensor:
    return random.randint(key, high, row)


def _dropout(drawn: KeyedRandomness, fn: Any, arguments: Arguments) -> tuple[Tensor, Tensor]:
    inputs = arguments["input"]
    noise, keep = dropout_noise(drawn, drawn.row(fn, inputs.shape), arguments["p"], inputs)
    return inputs * noise, keep


def dropout_noise(
    drawn: KeyedRandomness, row: tuple[int, ...], probability: float, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (factors of inputs by dropout, mask), drawn by the next call."""
    keep = drawn.draw(_coins, row, 1 - probability).to(inputs.device)
    noise = keep.to(inputs.dtype)
    return noise.div_(1 - probability) if probability < 1 else noise, keep


def _permutation(drawn: KeyedRandomness, fn: Any, arguments: Arguments) -> Tensor:
    if drawn.keys.ndim:  # `vmap` draws one for each client, as separate calls
        raise NotImplementedError(f"{fn} is not supported on stacked clients; use batched='auto' or ft.lightning_fit")
    dtype = arguments.get("dtype")
    order = random.permutation(drawn.key(), arguments["n"])
    return order.to(arguments.get("device") or order.device, dtype if isinstance(dtype, torch.dtype) else torch.int64)


def _multinomial(drawn: KeyedRandomness, fn: Any, arguments: Arguments) -> Tensor:
    weights, count = arguments["self"], arguments["num_samples"]
    *rows, categories = weights.shape
    clients = drawn.keys.numel()
    # vmap flattens clients and rows into one dimension, clients first.
    if drawn.keys.ndim and (not rows or rows[0] % max(clients, 1)):
        raise _misplaced(fn, tuple(drawn.keys.shape), weights.shape)
    each = math.prod(rows) // max(clients, 1)
    key = drawn.key()
    if arguments["replacement"]:
        cumulative = weights.to(key.device, torch.float64).cumsum(-1)
        cumulative = cumulative / cumulative[..., -1:]
        points = random.uniform(key, (each, count), torch.float64).reshape(*rows, count)
        result = torch.searchsorted(cumulative, points, right=True)
    else:
        if count > categories:
            raise RuntimeError(f"Expected at most {categories} samples without replacement, but got {count}")
        times = random.exponential(key, (each, categories), torch.float64).reshape(weights.shape)
        result = (weights.to(key.device, torch.float64) / times).topk(count).indices
    return result.to(weights.device)


_DRAWS: dict[Any, Callable[[KeyedRandomness, Any, Arguments], Any]] = {
    aten.rand: _elementwise(_uniform),
    aten.rand_like: _elementwise(_uniform),
    aten.uniform: _elementwise(_uniform),
    aten.uniform_: _elementwise(_uniform),
    aten.randn: _elementwise(_normal),
    aten.randn_like: _elementwise(_normal),
    aten.normal: _elementwise(_normal),
    aten.normal_: _elementwise(_normal),
    aten.exponential: _elementwise(_exponential),
    aten.exponential_: _elementwise(_exponential),
    aten.bernoulli: _elementwise(_bernoulli),
    aten.bernoulli_: _elementwise(_bernoulli),
    aten.randint: _elementwise(_integers),
    aten.randint_like: _elementwise(_integers),
    aten.native_dropout: _dropout,
    aten.multinomial: _multinomial,
    aten.randperm: _permutation,
}
