"""Checkpoints of Trainers: files of this machine that appear whole and hold plain tensors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from fedtorch import _files as files


class PlainCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file beside it, which takes its name when all is on the disk, and reads none
    that could run code: whatever the Trainer is told, `weights_only=True`, and no addresses.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path | str, storage_options: Any = None) -> None:
        """Write a file; a kill at any moment leaves the old one or the new one, whole."""
        if storage_options is not None:
            raise TypeError(f"Expected no storage_options, but got {storage_options!r}")
        local, buffer = _here(path), io.BytesIO()
        torch.save(checkpoint, buffer)
        local.parent.mkdir(parents=True, exist_ok=True)
        files.replace(local, buffer.getbuffer())

    def load_checkpoint(self, path: Path | str, map_location: Any = None, weights_only: bool | None = True) -> Any:
        """Read what `save_checkpoint` wrote, onto the CPU by default.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: `path` is an address, or the file is damaged or holds objects of other kinds than plain data.
        """
        try:
            return torch.load(_here(path), map_location=map_location or "cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:  # whatever a damaged file may cause
            raise ValueError(
                f"Expected a checkpoint of tensors and plain data in {path}, but got a damaged file or one with "
                f"objects that could run code: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from None


def keep_plain(strategy: Strategy) -> None:
    """Give a strategy `PlainCheckpointIO`, unless it has been given another one.

    Example:
        >>> from lightning.pytorch.strategies import SingleDeviceStrategy
        >>> strategy = SingleDeviceStrategy()  # of a Trainer
        >>> keep_plain(strategy)
        >>> type(strategy.checkpoint_io).__name__
        'PlainCheckpointIO'
    """
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = PlainCheckpointIO()


def _here(path: Path | str) -> Path:
    if "://" in str(path):
        raise ValueError(
            f"Expected a checkpoint in a file of this machine, but got the address {str(path)!r}; download it from a "
            "place that you trust, and pass its path"
        )
    return Path(path)
