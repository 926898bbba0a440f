"""The server's copy of a run's module: which tensors the server has, and which exist only at clients.

A client predicts with the tensors that the server broadcasts, with its own state, and with the module's frozen
parameters and buffers. The server has a complete model if clients contribute no tensors of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import checkpoint, functional, tree
from fedtorch.federation.algorithm import Algorithm
from fedtorch.tree import Tree

ENTRY = "module"  # checkpoint entry: JSON that describes the server's module
_NAMED = 3  # most tensor names in a message

Layers = Mapping[str, Mapping[str, str]]  # as `functional.layers` returns them


class ServerModule(NamedTuple):
    """The tensors of a module that the server has.

    Attributes:
        tensors: those that the server has, by the module's names.
        lacks: names of tensors that clients predict with and the server does not have.
    """

    tensors: dict[str, Tensor]
    lacks: tuple[str, ...]

    def check_whole(self, module: nn.Module) -> None:
        """Raise ValueError if the server lacks parts of a model of `module`."""
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
        self._layers = {} if algorithm.module is None else functional.layers(algorithm.module)

    @property
    def module(self) -> nn.Module:
        """Return the algorithm's module.

        Raises:
            ValueError: the algorithm has none.
        """
        if self._algorithm.module is None:
            raise ValueError("Expected an algorithm of a module, but got one without; use run.tensors(clients)")
        return self._algorithm.module

    def of_server(self, outbox: Tree) -> ServerModule:
        """Return the tensors of the server that broadcasts `outbox`."""
        named = functional.tensors(self.module)
        sent = getattr(outbox, "parameters", outbox)
        held = {name: _whole(leaf, named.get(name)) for name, leaf in sent.items()} if isinstance(sent, dict) else {}
        if any(name not in named or leaf.shape != named[name].shape for name, leaf in held.items()):
            held = {}  # of another dtype, or with a row per client
        used = set(functional.parameters(self.module))
        if held:
            used |= named.keys() & self._predicts_with(outbox)
        # Counters do not affect predictions, and infinite bounds are the module's own.
        numbers = lambda tensor: tensor.is_floating_point() or tensor.is_complex()
        matters = lambda tensor: numbers(tensor) and bool(tensor.isfinite().all())
        return ServerModule(held, tuple(name for name in sorted(used - held.keys()) if matters(named[name])))

    def _predicts_with(self, outbox: Tree) -> set[str]:
        """Return the names of the tensors in server and client states that a client predicts with."""
        nobody = self._algorithm.exchange.scatter(outbox, slice(0, 0)), tree.expand(self._state, 0)
        return set(dict(self._algorithm.model(*nobody)))

    def check(self, flat: Mapping[str, Tensor], outbox: Tree) -> None:
        """Refuse a checkpoint of another module: other layers, layer settings or frozen tensors.

        Settings of torch's layers are compared if both versions of torch have them. Older checkpoints have no entry for
        layers.

        Raises:
            ValueError: names the first difference.
        """
        if ENTRY not in flat or self._algorithm.module is None:
            return
        said = _said(flat)
        if "layers" in said:
            checkpoint.check_fingerprint(*_as_known(said["layers"], self._layers))
        named, states = functional.tensors(self.module), self._predicts_with(outbox)
        theirs = {n: number for n, number in said["own"].items() if n in named and n not in states}
        mine = {n: None if number is None else self._checksum(n, named[n]) for n, number in theirs.items()}
        checkpoint.check_fingerprint(
            *({f"the checksum of module.{n}": v for n, v in a.items()} for a in (theirs, mine))
        )

    def _checksum(self, name: str, tensor: Tensor) -> int | None:
        if name not in self._checksums:
            self._checksums[name] = functional.checksum(tensor)
        return self._checksums[name]

    def entries(self, outbox: Tree, server: Tree) -> dict[str, Tensor]:
        """Build the checkpoint entries for the module: names of the server's tensors, and checksums of frozen tensors.

        Args:
            outbox: the server's broadcast.
            server: the server's state, whose leaves are in the checkpoint.
        """
        if self._algorithm.module is None:
            return {}
        holds = self.of_server(outbox)
        places = {id(leaf): name for name, leaf in tree.flatten(server, "server").items()}
        names = {name: places.get(id(leaf), f"{ENTRY}.{name}") for name, leaf in holds.tensors.items()}
        own = {n: t for n, t in functional.tensors(self.module).items() if n not in names and n not in holds.lacks}
        entry = {
            "class": type(self.module).__name__,
            "tensors": names,
            "lacks": holds.lacks,
            "own": {name: self._checksum(name, leaf) for name, leaf in own.items()},
            "layers": self._layers,
        }
        computed = {names[n]: leaf.detach().cpu() for n, leaf in holds.tensors.items() if id(leaf) not in places}
        return {ENTRY: torch.tensor(list(json.dumps(entry).encode()), dtype=torch.uint8), **computed}


class SavedModule(NamedTuple):
    """Description of a module in a checkpoint."""

    kind: str  # class name
    holds: ServerModule
    own: dict[str, int | None]  # checksums of tensors that training does not change, by name


def read(flat: Mapping[str, Tensor]) -> SavedModule:
    """Read the description from a checkpoint's `entries`.

    Raises:
        ValueError: the entries are missing.
    """
    if ENTRY not in flat:
        raise ValueError(
            "Expected a checkpoint of a federation that trained a module, but got one without; begin the run and go on "
            "from it: ft.Run(algorithm, population).load(path)"
        )
    said = _said(flat)
    tensors = {name: flat[place] for name, place in said["tensors"].items()}
    return SavedModule(said["class"], ServerModule(tensors, tuple(said["lacks"])), said["own"])


def _said(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(bytes(flat[ENTRY].tolist()))
    return said


def _as_known(theirs: Layers, mine: Layers) -> tuple[dict[str, str], dict[str, str]]:
    """Flatten the layers of a checkpoint and of this run, with the settings that both have for the same class."""
    flat: tuple[dict[str, str], dict[str, str]] = {}, {}
    for layers, other, names in zip((theirs, mine), (mine, theirs), flat):
        for name, settings in layers.items():
            known = other.get(name, {})
            at = ".".join(filter(None, [ENTRY, name]))
            names.update(
                {at if n == "class" else f"{at}.{n}": v for n, v in settings.items() if n in {*known, "class"}}
            )
    return flat


def _whole(leaf: Tensor, original: Tensor | None) -> Tensor:
    """Return a server's tensor in the module's form: a buffer with infinite entries is averaged in two parts."""
    if original is None or leaf.shape == original.shape or bool(original.isfinite().all()):
        return leaf
    parts = functional.finite_parts(original)
    if leaf.shape != parts.shape:
        return leaf
    numbers = functional.from_finite_parts(leaf)
    return (torch.view_as_complex(numbers) if original.is_complex() else numbers).to(original.dtype)
