"""Scripts under a Trainer stop, are logged, and go on with the same bits; without a device they say so."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch

import fedtorch as ft
from experiments.trainers import training

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "trainers.md").read_text()
NAMES = sorted(path.stem for path in (ROOT / "experiments" / "trainers").glob("*.py") if path.stem[0] != "_")
SCRIPTS = {
    name: importlib.import_module(f"experiments.trainers.{name}") for name in NAMES if name != "training"
}  # by what they are called
ON_DEVICE = [name for name, module in SCRIPTS.items() if "gpu" in module.SCRIPT.sizes]


def rows(module: ModuleType, path: Path, *options: str) -> dict[str, float]:
    """The figures that a script writes."""
    module.main([*options, "--json", str(path / "rows.json")])
    written = json.loads((path / "rows.json").read_text())
    assert written["experiment"] == module.SCRIPT.name
    return {row["metric"]: row["ours"] for row in written["rows"]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    found = rows(SCRIPTS[name], tmp_path, "--smoke", "--keep", str(tmp_path / "kept"))
    assert found["tensors in its checkpoint"] > 10
    assert found["of these other bits after going on"] == 0
    assert found["columns in metrics.csv"] >= 4
    assert found["rounds"] <= SCRIPTS[name].SCRIPT.sizes["smoke"].rounds
    assert (tmp_path / "kept" / "whole" / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.slow  # until they stop by themselves
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_stops_by_its_criterion(name: str, tmp_path: Path) -> None:
    found = rows(SCRIPTS[name], tmp_path)
    assert found["stopped by its criterion"] == 1
    assert found["of these other bits after going on"] == 0


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_script_for_a_device_goes_the_same_way_on_the_cpu(name: str, tmp_path: Path) -> None:
    found = rows(SCRIPTS[name], tmp_path, "--smoke", "--gpu")
    assert found["rounds"] == SCRIPTS[name].SCRIPT.sizes["smoke"].rounds
    assert min(found["first round, seconds"], found["later rounds, seconds"]) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a device")
@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_script_without_its_device_measures_nothing(name: str, tmp_path: Path, capsys: Any) -> None:
    assert rows(SCRIPTS[name], tmp_path, "--gpu") == {}
    assert "No CUDA device: nothing has been measured" in capsys.readouterr().err


def test_a_million_edges_and_ten_thousand_clients_are_what_a_device_is_given() -> None:
    sizes = {name: SCRIPTS[name].SCRIPT.sizes["gpu"] for name in ON_DEVICE}
    assert sizes["networks"].clients * SCRIPTS["networks"].REACH == 1_000_000
    assert sizes["averaging"].clients == sizes["processes"].clients == 10_000


def test_the_page_has_every_script() -> None:
    assert set(re.findall(r"`trainers\.(\w+)`", PAGE)) == set(SCRIPTS)
    assert {Path(file).stem for file in re.findall(r"literalinclude\} \S+?(\w+\.py)", PAGE)} >= set(SCRIPTS)
    assert set(re.findall(r"trainers\.(\w+) --gpu", PAGE)) == set(ON_DEVICE)


def test_other_bits_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that goes on otherwise is found."""
    fitted = training.fitted

    def disturbed(*arguments: Any) -> L.LightningModule:
        module = fitted(*arguments)
        if len(arguments) == 5:
            ft.tree.leaves(module.server)[0].add_(1e-9)
        return module

    monkeypatch.setattr(training, "fitted", disturbed)
    assert rows(SCRIPTS["networks"], tmp_path, "--smoke")["of these other bits after going on"] == 1
