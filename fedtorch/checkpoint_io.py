"""Checkpoints of Trainers: local files that are complete under their names, contain plain tensors, and are checked for
damage.

A file of `torch.save` is a ZIP archive whose checksums torch does not compare. `PlainCheckpointIO` writes the SHA-256
of the archive as its comment, which other readers ignore, and compares it before reading.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from fedtorch import _files as files

_COMMENT = b"fedtorch sha256 "  # of an archive; the digits end the file
_END = b"PK\5\6"  # start of an archive's last record, whose last two bytes count the comment
_END_BYTES = 22  # of that record


class PlainCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file beside it, which gets its name when complete, and reads none that could
    run code: always with `weights_only=True`, and no addresses.

    Args:
        private: whether files are readable by their owner alone, as those of a server of sites are.
    """

    def __init__(self, private: bool = False) -> None:
        self._private = private

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path | str, storage_options: Any = None) -> None:
        """Write a file; a kill at any moment leaves the old one or the new one, complete."""
        if storage_options is not None:
            raise TypeError(f"Expected no storage_options, but got {storage_options!r}")
        local, buffer = _here(path), io.BytesIO()
        torch.save(checkpoint, buffer)
        payload, room = buffer.getbuffer(), (len(_COMMENT) + files.DIGITS).to_bytes(2, "little")
        hashed = hashlib.sha256(payload[:-2])
        hashed.update(room + _COMMENT)
        if self._private:
            files.private_folder(local.parent)
        else:
            local.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(local, private=self._private) as file:
            file.write(payload[:-2])
            file.write(room + _COMMENT + hashed.hexdigest().encode())

    def load_checkpoint(self, path: Path | str, map_location: Any = None, weights_only: bool | None = True) -> Any:
        """Read a file of `save_checkpoint`, onto the CPU by default, or of a plain Trainer, by ZIP's checksums.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: `path` is an address, or the file is damaged or holds objects of other kinds than plain data.
        """
        try:
            with _here(path).open("rb") as file:
                _check_whole(file)
            return torch.load(_here(path), map_location=map_location or "cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:  # any error that a damaged file may cause
            raise ValueError(
                f"Expected a checkpoint of tensors and plain data in {path}, but got a damaged file or one with "
                f"objects that could run code: {str(error).splitlines()[0] if str(error) else type(error).__name__}; "
                "take another copy or an earlier checkpoint"
            ) from None


def _check_whole(file: BinaryIO) -> None:
    """Raise ValueError unless an archive matches its digest; one of another writer, without comment, its checksums."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - files.DIGITS - len(_COMMENT)))
    end = file.read()
    if end.startswith(_COMMENT):
        if not files.digest_fits(file, size - files.DIGITS):
            raise ValueError("its content does not fit the SHA-256 at its end")
    elif not end[-_END_BYTES:].startswith(_END) or not end.endswith(b"\0\0"):
        raise ValueError("it does not end as a file of torch.save")
    elif (bad := zipfile.ZipFile(file).testzip()) is not None:
        raise ValueError(f"{bad} in it does not fit its checksum")


def keep_plain(strategy: Strategy, private: bool = False) -> None:
    """Set a strategy's checkpoint plugin to `PlainCheckpointIO`, unless the user has set another one.

    Example:
        >>> from lightning.pytorch.strategies import SingleDeviceStrategy
        >>> strategy = SingleDeviceStrategy()  # of a Trainer
        >>> keep_plain(strategy)
        >>> type(strategy.checkpoint_io).__name__
        'PlainCheckpointIO'
    """
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = PlainCheckpointIO(private)


def _here(path: Path | str) -> Path:
    if "://" in str(path):
        raise ValueError(
            f"Expected a checkpoint in a file of this machine, but got the address {str(path)!r}; download it from a "
            "place that you trust, and pass its path"
        )
    return Path(path)
