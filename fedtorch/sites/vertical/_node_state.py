"""All that changes at a node of a vertical model while it is trained, as flat tensors: it goes on from them bit by bit.

That is its part of the model, the state of its optimiser, and what it last heard of nodes that may be idle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedtorch.checkpoint import below
from fedtorch.vfl.fit.noise import Noise
from fedtorch.vfl.nodes.node import PartyNode, Pooled, ServerNode, Share, Value

Node = ServerNode | PartyNode
_HEARD: dict[str, Any] = {"values": Value, "pools": Pooled, "answers": Share}
_STRUCTURE = "structure"


def state_of(node: Node) -> dict[str, Tensor]:
    """A node's state, in memory of its own."""
    flat = {f"part.{name}": leaf for name, leaf in node.part.state_dict().items()}
    flat |= {f"optimizer.{name}": leaf for name, leaf in packed(node.optimizer.state_dict()).items()}
    for kind in _HEARD:
        for j, heard in enumerate(getattr(node, kind)):
            fields = {} if heard is None else heard._asdict()
            flat |= {f"{kind}.{j}.{name}": leaf for name, leaf in fields.items() if leaf is not None}
    if node.chained and hasattr(node, "noise"):
        flat["noise"] = node.noise.theta[node.index]  # the chain goes through a node that is idle, too
    return {name: leaf.detach().clone() for name, leaf in flat.items()}


def restore(node: Node, flat: Mapping[str, Tensor]) -> None:
    """Puts a node into a state that `state_of` has told of one like it."""
    device = next(node.part.buffers()).device
    node.part.load_state_dict(below("part.", flat))
    node.optimizer.load_state_dict(unpacked(below("optimizer.", flat)))
    for kind, made in _HEARD.items():
        for j in range(len(getattr(node, kind))):
            own = {name: leaf.to(device) for name, leaf in below(f"{kind}.{j}.", flat).items()}
            getattr(node, kind)[j] = made(**{**dict.fromkeys(made._fields), **own}) if own else None
    if "noise" in flat:
        node.noise = Noise((flat["noise"].to(device),) * (node.index + 1), ())


def packed(state: Any) -> dict[str, Tensor]:
    """What `Optimizer.state_dict` returns as flat tensors: those in it, and the rest of it as the bytes of JSON.

    Raises:
        TypeError: there is something in it that is no tensor, number, text, list or dict.
    """
    flat: dict[str, Tensor] = {}
    text = json.dumps(_described(state, "value", flat))
    return {**flat, _STRUCTURE: torch.tensor(list(text.encode()), dtype=torch.uint8)}


def unpacked(flat: Mapping[str, Tensor]) -> Any:
    """What `packed` was given."""
    return _made(json.loads(bytes(flat[_STRUCTURE].tolist())), flat)


def _described(value: Any, name: str, flat: dict[str, Tensor]) -> Any:
    """JSON in which a kind goes before every value; tensors are put into `flat`, and named."""
    if isinstance(value, Tensor):
        flat[name] = value
        return ["tensor", name]
    if isinstance(value, dict):
        return ["dict", [[key, _described(part, f"{name}.{key}", flat)] for key, part in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_described(part, f"{name}.{i}", flat) for i, part in enumerate(value)]]
    return ["plain", value]


def _made(described: Any, flat: Mapping[str, Tensor]) -> Any:
    kind, value = described
    if kind == "tensor":
        return flat[value].clone()
    if kind == "dict":
        return {key: _made(part, flat) for key, part in value}
    if kind == "plain":
        return value
    parts = [_made(part, flat) for part in value]
    return tuple(parts) if kind == "tuple" else parts
