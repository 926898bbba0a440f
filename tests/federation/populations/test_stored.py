"""Clients whose rows stay in a file do what those in memory do, and read what a round needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.oracles.closed_forms import distance, linear_clients, sgd

import fedtorch as ft
from fedtorch.data import ClientData, FederatedData

SIZES = [3, 12, 5, 9, 40, 1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    linear_clients(SIZES).to_file(tmp_path / "rows.safetensors")
    return tmp_path / "rows.safetensors"


def some_rounds(population: ft.InProcess, **settings: Any) -> ft.Run:
    return ft.run(ft.ditto(sgd(0.1, steps=3), strength=0.1), population, rounds=3, seed=4, **settings)


@pytest.mark.parametrize("settings", [{}, {"cohort": 2}])
@pytest.mark.parametrize("chunk", [None, 1])
def test_rounds_are_the_same_to_the_bit(file: Path, settings: dict[str, Any], chunk: int | None) -> None:
    stored = some_rounds(ft.InProcess(FederatedData.from_file(file), chunk=chunk), **settings)
    held = some_rounds(ft.InProcess(linear_clients(SIZES), chunk=chunk), **settings)
    assert distance(stored.server, held.server) == 0.0
    assert distance(stored.tensors(), held.tensors()) == 0.0
    assert stored.client_losses.equals(held.client_losses)


def test_a_round_reads_the_rows_of_its_clients(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ft.Run(ft.fedavg(sgd(0.1)), ft.InProcess(FederatedData.from_file(file)), cohort=2)
    run.step()  # before the first round a few rows are looked at
    stack, read = FederatedData.stack, []

    def noted(data: FederatedData, ids: torch.Tensor, size: int | None = None) -> ClientData:
        read.extend(ids.tolist())
        return stack(data, ids, size)

    monkeypatch.setattr(FederatedData, "stack", noted)
    assert run.step().asked.tolist() == sorted(read)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = {"x": torch.ones(3, 2), "label": torch.tensor([1, 0, 1])}
    data = FederatedData(rows, torch.tensor([1, 2]), ("Oulu", "Turku"), features=("height", "weight"))
    data.to_file(tmp_path / "rows")
    read = FederatedData.from_file(tmp_path / "rows")
    assert (read.names, read.features, read.on_disk) == (data.names, data.features, True)
    assert torch.equal(read.counts, data.counts)
    assert all(torch.equal(read.rows[name], leaf) for name, leaf in rows.items())
    assert not read.select([1]).on_disk
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows"]


def test_bad_rows_are_named_when_they_are_read(tmp_path: Path) -> None:
    x = torch.ones(5, 2)
    x[3, 1] = torch.nan
    save_file({"0": x, "1": torch.ones(5, 1), "counts": torch.tensor([2, 3])}, tmp_path / "rows")
    run = ft.Run(
        ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(FederatedData.from_file(tmp_path / "rows"))
    )
    with pytest.raises(ValueError, match="NaN or Inf in field '0' of client '1', row 1"):
        run.step()


def test_other_files_and_rows_are_refused(tmp_path: Path) -> None:
    save_file({"0": torch.ones(5, 2)}, tmp_path / "uncounted")
    with pytest.raises(ValueError, match=r"Expected a tensor 'counts' .* but got \['0'\]"):
        FederatedData.from_file(tmp_path / "uncounted")
    (tmp_path / "torn").write_bytes(b"\x08\0\0\0")
    with pytest.raises(ValueError, match=r"Expected a safetensors file in .*torn"):
        FederatedData.from_file(tmp_path / "torn")
    for rows in (torch.ones(2, 1), {"counts": torch.ones(2)}, ({"y": torch.ones(2)}, torch.ones(2))):
        with pytest.raises(ValueError, match="Expected rows as a tuple or dict of tensors"):
            FederatedData(rows, torch.tensor([2])).to_file(tmp_path / "rows")
