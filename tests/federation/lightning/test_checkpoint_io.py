"""A Trainer's checkpoints of a federation: never code, never from an address, never half a file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from support.oracles.closed_forms import linear_clients, same_bits, sgd
from support.small_federations import everything, trainer

import fedtorch as ft
from fedtorch.checkpoint_io import PlainCheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def federation() -> ft.Federation:
    return ft.Federation(ft.fedavg(sgd(0.05)), ft.InProcess(linear_clients([4, 5, 6])))


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("weights_only", [None, False])
def test_a_checkpoint_with_code_is_refused_and_not_run(tmp_path: Path, weights_only: bool | None) -> None:
    for name, write in (("pickle", lambda value, path: path.write_bytes(pickle.dumps(value))), ("torch", torch.save)):
        write({"state_dict": Evil(tmp_path / "made")}, path := tmp_path / f"{name}.ckpt")
        with pytest.raises(ValueError, match=rf"Expected a checkpoint of tensors and plain data in .*{name}\.ckpt"):
            trainer(max_epochs=1).fit(federation(), ckpt_path=path, weights_only=weights_only)
        assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/last.ckpt", "https://example.org/a.ckpt", "memory://a.ckpt"])
def test_addresses_are_refused(address: str) -> None:
    for call in (
        lambda: trainer(max_epochs=1).fit(federation(), ckpt_path=address),
        lambda: PlainCheckpointIO().save_checkpoint({}, address),
    ):
        with pytest.raises(ValueError, match=f"file of this machine, but got the address '{address}'; download it"):
            call()


@pytest.mark.parametrize("left", [0, 10, 700])
def test_a_torn_file_names_itself(tmp_path: Path, left: int) -> None:
    PlainCheckpointIO().save_checkpoint({"numbers": torch.arange(100)}, path := tmp_path / "torn.ckpt")
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"in .*torn\.ckpt, but got a damaged file"):
        PlainCheckpointIO().load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        PlainCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_the_old_file_stays_until_the_new_one_is_whole(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, path = PlainCheckpointIO(), tmp_path / "deep" / "last.ckpt"
    files.save_checkpoint({"round": 1}, path)

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, step, stop)
        with pytest.raises(KeyboardInterrupt):
            files.save_checkpoint({"round": 2}, path)
    assert files.load_checkpoint(path) == {"round": 1}
    assert [found.name for found in path.parent.iterdir()] == ["last.ckpt"]
    files.save_checkpoint({"round": 3}, path)
    assert files.load_checkpoint(path) == {"round": 3}


def test_a_trainer_writes_and_resumes_with_it(tmp_path: Path) -> None:
    keep = lambda: ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
    whole, first, again = federation(), federation(), federation()
    trainer(max_epochs=4).fit(whole)
    outer = trainer(max_epochs=2, callbacks=[keep()], enable_checkpointing=True)
    outer.fit(first)
    assert type(outer.strategy.checkpoint_io) is PlainCheckpointIO
    last = trainer(max_epochs=4, callbacks=[keep()], enable_checkpointing=True)
    last.fit(again, ckpt_path=tmp_path / "last.ckpt")
    assert same_bits(everything(again), everything(whole))


def test_over_ranks_too_unless_another_one_is_given() -> None:
    assert type(ft.ClientSharding().checkpoint_io) is PlainCheckpointIO
    other = TorchCheckpointIO()
    assert ft.ClientSharding(checkpoint_io=other).checkpoint_io is other


def test_a_checkpoint_may_be_read_by_whom_other_files_may(tmp_path: Path) -> None:
    PlainCheckpointIO().save_checkpoint({"round": 1}, tmp_path / "last.ckpt")
    (tmp_path / "other").write_text("")
    assert (tmp_path / "last.ckpt").stat().st_mode == (tmp_path / "other").stat().st_mode
