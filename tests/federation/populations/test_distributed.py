"""Two ranks give what one process gives, and ranks that differ are refused: one script starts them all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.oracles.closed_forms import ROUNDING, distance, linear_clients, sgd
from support.processes import TESTS, Process
from support.scripts import distributed_script as script
from support.small_federations import CLASSES, everything

import fedtorch as ft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks have left findings and checkpoints."""
    path = tmp_path_factory.mktemp("ranks")
    process = Process([str(TESTS / "support" / "scripts" / "odd_ranks.py"), str(path)])
    said = process.communicate(timeout=250)
    assert process.returncode == 0, said[-5000:]
    return path


@pytest.fixture(scope="module", params=[0, 1])
def findings(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """Of each rank."""
    return json.loads((folder / f"findings-{request.param}.json").read_text())


@pytest.mark.parametrize("what", ["rounds", "predictions"])
def test_two_ranks_equal_one_process(findings: dict[str, Any], what: str) -> None:
    wrong = {name: value for name, value in findings[what].items() if not value < ROUNDING}
    assert not wrong
    assert len(findings[what]) > 9


def test_clients_join_over_two_ranks(findings: dict[str, Any]) -> None:
    assert set(findings["joining"]) == {"SCAFFOLD", "GTV"}
    assert all(value < ROUNDING for value in findings["joining"].values())


def test_gibbs_sampling_over_two_ranks_is_the_same_to_the_bit(findings: dict[str, Any]) -> None:
    found = {name: value for name, value in findings["rounds"].items() if name.startswith("Gibbs")}
    assert len(found) == 2
    assert set(found.values()) == {0.0}


def test_a_trainer_over_two_ranks(findings: dict[str, Any]) -> None:
    found = findings["lightning"]
    assert found["clients"] == [0, 1, 2, 3, 4]
    assert found["left behind"] == []
    assert found["rounds"] == [4, 4, 4]
    assert found["resumed is equal"]


def test_what_ranks_log_is_what_one_process_logs(findings: dict[str, Any]) -> None:
    model = ft.Federation(
        script.sharded().run.algorithm,
        ft.InProcess(script.CLASSES),
        cohort=3,
        seed=7,
        validation=script.CLASSES,
        metrics=script.METRICS,
    )
    outer = script.trainer(max_epochs=4)
    outer.fit(model)
    assert findings["lightning"]["logged"] == pytest.approx(
        {name: float(value) for name, value in outer.callback_metrics.items()}, rel=ROUNDING
    )
    history = model.history.drop(columns="seconds").to_dict("list")
    assert findings["lightning"]["history"].keys() == history.keys()
    for name, column in history.items():
        assert findings["lightning"]["history"][name] == pytest.approx(column, rel=ROUNDING)
    losses = model.client_losses.to_dict("list")
    assert findings["lightning"]["losses"].pop("client") == losses.pop("client")
    for name, column in losses.items():
        assert findings["lightning"]["losses"][name] == pytest.approx(column, rel=1e-6)  # kept in float32
    assert findings["lightning"]["twice"] < ROUNDING


def test_what_cannot_run_over_ranks_is_refused(findings: dict[str, Any]) -> None:
    refused = findings["refusals"]
    assert "use ft.Distributed(data)" in refused["in process"]
    assert "strategy=ft.ClientSharding()" in refused["ddp"]
    assert "torchrun" in refused["elsewhere"]
    assert "5 clients, but got 2" in refused["other data"]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lightning starts a process group of one, which is taken down again."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_of_two_ranks_goes_on_with_one(folder: Path) -> None:
    expected = torch.load(folder / "two.pt", weights_only=True)
    for epoch in (1, 3):
        model = script.sharded()
        outer = script.sharding(folder, 4, devices=1)
        outer.fit(model, ckpt_path=folder / "checkpoints" / f"epoch={epoch}.ckpt")
        assert (model.round, model.run.bytes_up) == (4, expected["up"])
        assert distance(model.server, expected["server"]) < ROUNDING
        for k, tensors in enumerate(expected["modules"]):
            assert distance(dict(model.client_module(k).state_dict()), tensors) < ROUNDING


@pytest.mark.usefixtures("one_rank")
def test_a_file_of_one_process_goes_on_sharded(tmp_path: Path) -> None:
    single = ft.Federation(script.sharded().run.algorithm, ft.InProcess(script.CLASSES), cohort=3, seed=7)
    before = script.trainer(max_epochs=2)
    before.fit(single)
    before.save_checkpoint(tmp_path / "one.ckpt")
    model = ft.Federation(single.run.algorithm, ft.Distributed(script.CLASSES), cohort=3, seed=7)
    script.trainer(max_epochs=2, strategy=ft.ClientSharding(), devices=1).fit(model, ckpt_path=tmp_path / "one.ckpt")
    assert distance(everything(model), everything(single)) == 0.0


@pytest.fixture(scope="module")
def odd(folder: Path) -> dict[str, Any]:
    """What ranks say that differ, are too many, or get lost."""
    return json.loads((folder / "findings.json").read_text())


@pytest.mark.parametrize("clients", [1, 2])
def test_more_ranks_than_clients(odd: dict[str, Any], clients: int) -> None:
    expected = odd["alone"][clients - 1]
    found = odd[["one client", "two clients"][clients - 1]]
    assert len(found) == 4
    for numbers in found:
        assert numbers == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)


def test_ranks_meet_once_a_round(odd: dict[str, Any]) -> None:
    first, second = odd["collectives"]
    assert first == second
    assert first[0] > 1  # they compare what they run, and learn the names of diagnostics
    assert first[1:] == [1, 1, 1]


ODD = {  # what differs: (how the message calls it, the rank that differs)
    "data": ("rows", 1),
    "names": ("clients", 0),
    "sizes": ("sizes", 2),
    "seed": ("seed", 2),
    "cohort": ("cohort", 1),
    "rate": ("local.optimizer", 1),
    "start": ("start", 0),
    "layers": ("model", 2),
    "evaluation first": ("seed", 1),
    "round": ("round", 1),
}


@pytest.mark.parametrize("what", ODD)
def test_a_rank_that_runs_something_else_is_named_on_all(odd: dict[str, Any], what: str) -> None:
    name, rank = ODD[what]
    assert len(odd[what]) > 1
    for told in odd[what]:
        assert told.startswith(f"ValueError: Expected all ranks to run the same, with {name} ")
        assert re.search(r"but got rank (\d) with", told).group(1) == str(rank)  # type: ignore[union-attr]


def test_ranks_have_the_same_bits(odd: dict[str, Any]) -> None:
    first, second = odd["same"]
    assert first == second


def test_a_rank_that_is_lost_is_named(odd: dict[str, Any]) -> None:
    first, killed, third = odd["lost"]
    assert killed is None
    assert first == third
    assert first.startswith("RuntimeError: Expected all ranks to take part, but rank 1 has gone")


def test_a_rank_that_is_late_is_named_after_the_timeout(odd: dict[str, Any]) -> None:
    first, second, late = odd["late"]
    assert first == second
    assert first.startswith("RuntimeError: Expected all ranks within 1 s, but got nothing from rank 2")
    assert late.startswith("RuntimeError: Expected all ranks within 1 s")


def test_without_torchrun_it_is_one_process() -> None:
    data = linear_clients([4, 5, 6])
    population = ft.Distributed(data)
    assert repr(population).endswith("rank 0 of 1)")
    one, two = (script.some_rounds(ft.fedavg(sgd(0.1)), p, cohort=2) for p in (ft.InProcess(data), population))
    assert script.worst(one, two) == 0.0
    assert not dist.is_initialized()


def test_refusals_at_construction() -> None:
    with pytest.raises(TypeError, match="Expected FederatedData, but got list"):
        ft.Distributed([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk of at least 1, but got 0"):
        ft.Distributed(linear_clients([CLASSES]), chunk=0)
    with pytest.raises(ValueError, match="Expected a positive timeout"):
        ft.Distributed(linear_clients([CLASSES]), timeout=timedelta(0))
