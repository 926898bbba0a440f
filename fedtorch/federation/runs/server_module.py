"""The module that a server holds: which of its tensors, and which only clients have.

What a client predicts with comes from what the server sends out, from the client's own state, and from the module
itself, whose frozen parameters and buffers no training changes. A server has a whole model where clients add nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import functional, tree
from fedtorch.federation.algorithm import Algorithm
from fedtorch.tree import Tree

ENTRY = "module"  # of a checkpoint: the bytes of JSON that say what the server holds
_NAMED = 3  # tensors in a message
_STRETCHES = 2**10  # of a tensor's numbers, whose order counts in its checksum


class ServerModule(NamedTuple):
    """Hold what a server knows of a module.

    Attributes:
        tensors: by the module's names, those that the server holds.
        lacks: names of those that it does not, but clients predict with.
    """

    tensors: dict[str, Tensor]
    lacks: tuple[str, ...]

    def check_whole(self, module: nn.Module) -> None:
        """Raise ValueError where a model of `module` has parts that the server lacks."""
        if self.lacks:
            names = ", ".join(self.lacks[:_NAMED]) + (", …" if len(self.lacks) > _NAMED else "")
            buffers = {name for name, _ in module.named_buffers()}.intersection(self.lacks)
            average = ', or average buffers: ft.gradient_descent(…, buffers="average")' if buffers else ""
            raise ValueError(
                f"Expected the server to hold a whole model, but it does not, and lacks {names}; use "
                f"ft.Run(algorithm, population).load(path).client_module(client), or run.client_module(client){average}"
            )


class Modules:
    """The modules of a run's algorithm.

    Args:
        algorithm: of the run.
        state: one client's initial state, on the run's device.
    """

    def __init__(self, algorithm: Algorithm, state: Tree) -> None:
        self._algorithm, self._state = algorithm, state
        self._checksums: dict[str, int | None] = {}

    @property
    def module(self) -> nn.Module:
        """Return the algorithm's module.

        Raises:
            ValueError: it has none.
        """
        if self._algorithm.module is None:
            raise ValueError("Expected an algorithm of a module, but got one without; use run.tensors(clients)")
        return self._algorithm.module

    def of_server(self, outbox: Tree) -> ServerModule:
        """Return what the server holds that sends out `outbox`."""
        algorithm, named = self._algorithm, functional.tensors(self.module)
        sent = getattr(outbox, "parameters", outbox)
        held = {name: _whole(leaf, named.get(name)) for name, leaf in sent.items()} if isinstance(sent, dict) else {}
        if any(name not in named or leaf.shape != named[name].shape for name, leaf in held.items()):
            held = {}  # of another kind, or a row for each client
        used = set(functional.parameters(self.module))
        if held:  # whatever a client predicts with besides, of nobody's `(0, ...)` tensors
            nobody = algorithm.exchange.scatter(outbox, slice(0, 0)), tree.expand(self._state, 0)
            used |= named.keys() & dict(algorithm.model(*nobody)).keys()
        # Counters do not predict, and bounds at infinity are the module's own.
        numbers = lambda tensor: tensor.is_floating_point() or tensor.is_complex()
        matters = lambda tensor: numbers(tensor) and bool(tensor.isfinite().all())
        return ServerModule(held, tuple(name for name in sorted(used - held.keys()) if matters(named[name])))

    def entries(self, outbox: Tree, server: Tree) -> dict[str, Tensor]:
        """Return what a checkpoint says of it, flat: the names of the server's tensors, and those that are none of its.

        Args:
            outbox: what the server sends out.
            server: its state, whose leaves are in the checkpoint.
        """
        if self._algorithm.module is None:
            return {}
        holds = self.of_server(outbox)
        places = {id(leaf): name for name, leaf in tree.flatten(server, "server").items()}
        names = {name: places.get(id(leaf), f"{ENTRY}.{name}") for name, leaf in holds.tensors.items()}
        own = {n: t for n, t in functional.tensors(self.module).items() if n not in names and n not in holds.lacks}
        for name in own.keys() - self._checksums.keys():
            self._checksums[name] = checksum(own[name])
        said = {
            "class": type(self.module).__name__,
            "tensors": names,
            "lacks": holds.lacks,
            "own": {name: self._checksums[name] for name in own},
        }
        computed = {names[n]: leaf.detach().cpu() for n, leaf in holds.tensors.items() if id(leaf) not in places}
        return {ENTRY: torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8), **computed}


class SavedModule(NamedTuple):
    """Hold what a checkpoint says of a module."""

    kind: str  # its class
    holds: ServerModule
    own: dict[str, int | None]  # checksums of the tensors that no training changes, by name


def read(flat: Mapping[str, Tensor]) -> SavedModule:
    """Return what a checkpoint's `entries` say.

    Raises:
        ValueError: they are not there.
    """
    if ENTRY not in flat:
        raise ValueError(
            "Expected a checkpoint of a federation that trained a module, but got one without; begin the run and go on "
            "from it: ft.Run(algorithm, population).load(path)"
        )
    said: dict[str, Any] = json.loads(bytes(flat[ENTRY].tolist()))
    tensors = {name: flat[place] for name, place in said["tensors"].items()}
    return SavedModule(said["class"], ServerModule(tensors, tuple(said["lacks"])), said["own"])


def _whole(leaf: Tensor, own: Tensor | None) -> Tensor:
    """Return a tensor of a server as a module has it: an averaged buffer that began at infinity travels in parts."""
    if own is None or leaf.shape == own.shape or bool(own.isfinite().all()):
        return leaf
    parts = functional.finite_parts(own)
    if leaf.shape != parts.shape:
        return leaf
    numbers = functional.from_finite_parts(leaf)
    return (torch.view_as_complex(numbers) if own.is_complex() else numbers).to(own.dtype)


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
