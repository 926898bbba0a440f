"""Clients' predictions as a file of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtorch import checkpoint, tree
from fedtorch.tree import Tree


def write_predictions(path: Path | str, predictions: Mapping[str, Sequence[Any]]) -> None:
    """Write a safetensors file: a tensor for each client, by name, or one for each field, `client.field`.

    Args:
        path: path of the file, which appears only when complete.
        predictions: predictions of each batch, by client; they are concatenated.

    Raises:
        TypeError: predictions that are not tensors or trees of tensors.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_predictions(f"{folder}/p.safetensors", {"a": [torch.ones(2, 3), torch.ones(1, 3)]})
        ...     checkpoint.read(f"{folder}/p.safetensors")["a"].shape
        torch.Size([3, 3])
    """
    flat: dict[str, Tensor] = {}
    for client, batches in predictions.items():
        if batches:
            flat.update(tree.flatten(_joined(client, batches), client))
    checkpoint.write(path, flat)


def _joined(client: str, batches: Sequence[Any]) -> Tree:
    for batch in batches:
        for leaf in tree.leaves(batch):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"Expected tensors of predict_step, or trees of them, but got {type(leaf).__name__} for client "
                    f"{client!r}; call run.predict in Python"
                )
    return tree.map(lambda *parts: torch.cat([torch.atleast_1d(part) for part in parts]).contiguous(), *batches)
