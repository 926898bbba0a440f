"""Runs on record, and the alarm for drift."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.oracles.closed_forms import linear, linear_clients, sgd

import fedtorch as ft
from fedtorch.cli import main
from fedtorch.networks.solvers import norm2
from fedtorch.trust import privacy, record
from fedtorch.trust.drift import DriftAlarm

K = 8
DATA = linear_clients([5, 6, 7, 8, 9, 5, 4, 6])
FAULTS = ft.dropouts(0.2) | ft.lost_messages(after=0.2)


def made(ledger: record.RunRecord, rounds: int = 5) -> ft.Run:
    algorithm = ft.gtv(sgd(0.05), ft.Network.ring(K), 0.5)
    return ft.run(algorithm, ft.InProcess(DATA), rounds=rounds, cohort=5, faults=FAULTS, seed=1, record=ledger)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ledger = record.RunRecord(watts=36.0, note="Ada Lovelace")
    return ledger.save(made(ledger), tmp_path / "run.safetensors")


def test_record_contents(tmp_path: Path) -> None:
    ledger = record.RunRecord(watts=36.0, note="Ada Lovelace")
    rounds = []

    class Both:
        def record(self, round: ft.Round) -> None:
            ledger.record(round)
            rounds.append(round)

    run = made(Both())  # type: ignore[arg-type]
    content = ledger.content(run, _checkpoint(tmp_path))
    assert content["note"] == "Ada Lovelace"
    assert content["bytes"] == {"up": run.bytes_up, "down": run.bytes_down}
    assert content["network"]["edges"] == K
    assert content["clients"] == list(DATA.names)
    assert content["data"]["rows"] == 50
    assert content["settings"]["seed"] == "1"
    assert content["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert content["faults"]["lost_after"] == sum(len(round.lost_after) for round in rounds) > 0
    assert content["energy"]["watt_hours"] == content["energy"]["seconds"] / 100
    for line, round in zip(content["rounds"], rounds, strict=True):
        assert line["round"] == round.number
        assert line["asked"] == record.spans(round.asked)
        assert line["answered"] == record.spans(round.ids)


@pytest.mark.parametrize(
    ("name", "edges"),
    [("squared", K), ("tied", K), ("lossy", K), ("budget", K), ("without a server", K), ("star", None)],
)
def test_a_record_has_the_network_whose_nodes_the_clients_are(name: str, edges: int | None, tmp_path: Path) -> None:
    ring, local = ft.Network.ring(K), ft.least_squares(linear())
    algorithm = {
        "squared": lambda: ft.gtv(local, ring, 0.5),
        "tied": lambda: ft.gtv(local, ring, 0.5, penalty=norm2),
        "lossy": lambda: ft.gtv(local, ring, 0.5) | ft.unreliable_edges(ring, loss=0.1),
        "budget": lambda: ft.edge_weights(ring, 4, edges=5),  # a number of edges among its settings is no network
        "without a server": lambda: ft.without_server(ft.fedavg(local), ring, 1e-6),
        "star": lambda: ft.fedavg(local),
    }[name]()
    data = ft.data.from_tensors([(torch.ones(1, 3), torch.ones(1)) for _ in range(K)]) if name == "budget" else DATA
    ledger = record.RunRecord()
    run = ft.run(algorithm, ft.InProcess(data), rounds=2, record=ledger)
    run.save(tmp_path / "run.safetensors")
    found = ledger.content(run, tmp_path / "run.safetensors")["network"]
    assert (found and found["edges"]) == edges


def test_a_private_run_has_its_epsilon_on_record(tmp_path: Path) -> None:
    ledger, noised = record.RunRecord(), privacy.from_seed(0)
    algorithm = ft.fedavg(sgd(0.05)) | privacy.client_level(1.0, 5.0, delta=1e-3, entropy=noised)
    run = ft.run(algorithm, ft.InProcess(DATA), rounds=3, record=ledger)
    content = json.loads(ledger.save(run, tmp_path / "run.safetensors").read_text())
    assert content["report"]["epsilon"] == run.history["epsilon"].iloc[-1] > 0
    assert content["settings"]["privacy.client_level.noise"] == "5.0"


def _checkpoint(folder: Path) -> Path:
    other = folder / "other.safetensors"
    made(record.RunRecord()).save(other)
    return other


def test_spans() -> None:
    assert record.spans(torch.tensor([0, 1, 2, 5, 7, 8])) == "0-2,5,7-8"
    assert record.spans(torch.tensor([], dtype=torch.int64)) == ""


def test_record_verification(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(check.holds for check in record.verify(saved, DATA))
    assert main(["record", "verify", str(saved)]) == 0
    assert "FAILED" not in capsys.readouterr().out


def changed(saved: Path, change: object) -> set[str]:
    """The names of what does not hold after a change of the record's content."""
    content = json.loads(saved.read_text())
    change(content)  # type: ignore[operator]
    saved.write_text(json.dumps(content))
    return {check.name for check in record.verify(saved) if not check.holds}


def test_what_was_changed_is_found(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert changed(saved, lambda content: content.update(note="Charles Babbage")) == {"record"}
    assert changed(saved, lambda content: content["rounds"][2].update(answered="0-7")) == {"record", "rounds"}
    assert changed(saved, lambda content: content.update(code="0")) == {"record", "rounds", "code"}
    assert main(["record", "verify", str(saved)]) == 1
    assert capsys.readouterr().out.count("FAILED") == 3


def test_a_record_of_an_earlier_version_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected a record of format 2 in .*, but got format 1; verify it with"):
        changed(saved, lambda content: content.update(format=1))


def test_numbers_that_are_not_finite_are_kept_as_text(tmp_path: Path) -> None:
    kept = record.RunRecord()
    run = made(kept)
    assert run.last is not None
    run.last.report["worst"] = torch.inf
    written = kept.save(run, tmp_path / "run.safetensors")
    assert json.loads(written.read_text())["report"]["worst"] == "inf"
    assert all(check.holds for check in record.verify(written))


def test_another_checkpoint_or_other_data_are_found(saved: Path) -> None:
    other = DATA.map(lambda rows: (rows[0], rows[1] + 1e-9))
    assert [check.name for check in record.verify(saved, other) if not check.holds] == ["data"]
    file = saved.with_suffix("")
    payload = bytearray(file.read_bytes())
    payload[-1] ^= 1
    file.write_bytes(payload)
    assert [check.name for check in record.verify(saved) if not check.holds] == ["checkpoint", "settings"]
    file.unlink()
    assert [check.name for check in record.verify(saved) if not check.holds] == ["checkpoint", "settings"]


def test_a_resumed_run_has_the_record_of_all_rounds(tmp_path: Path) -> None:
    whole, first, second = record.RunRecord(), record.RunRecord(), record.RunRecord()
    made(first, 2).save(tmp_path / "early.safetensors")
    run = made(second, 0).load(tmp_path / "early.safetensors")
    for _ in run.rounds(5):
        pass
    contents = [each.save(each_run, tmp_path / "run") for each, each_run in ((whole, made(whole)), (second, run))]
    lines = [json.loads(path.read_text())["rounds"] for path in contents]
    assert lines[0] == lines[1]


def test_what_is_no_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="Expected a record of a run"):
        record.verify(tmp_path / "other.json")
    assert main(["record", "verify", str(tmp_path / "other.json"), str(tmp_path / "none.json")]) == 1
    assert "Expected a record of a run" in capsys.readouterr().err
    late = record.RunRecord()
    with pytest.raises(ValueError, match="record of all 5 rounds, but it has followed 0"):
        late.save(made(record.RunRecord()), tmp_path / "run")
    with pytest.raises(ValueError, match="positive power"):
        record.RunRecord(watts=0)


def test_the_alarm_is_raised_where_values_get_worse() -> None:
    """After a step of size h it takes about λ/(h − δ) rounds; without a step random values raise none."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, generator=generator)
    values[200:] += 3
    said: list[str] = []
    drift = DriftAlarm(threshold=20.0, slack=0.5, alarm=said.append)
    for number, value in enumerate(values.tolist(), 1):
        drift.watch(number, value)
    assert 200 < drift.rounds[0] < 215
    assert len(said) == len(drift.rounds) == 1


def test_the_alarm_follows_a_run_and_resumes() -> None:
    def run(rounds: int, drift: DriftAlarm) -> ft.Run:
        return ft.run(ft.fedavg(ft.least_squares(linear())), ft.InProcess(DATA), rounds=rounds, record=drift)

    def worse(round: ft.Round) -> float:
        return float(round.number**2)

    whole, first, second = (DriftAlarm(worse, threshold=60.0, alarm=lambda said: None) for _ in range(3))
    run(12, whole)
    early = run(4, first)
    late = ft.Run(ft.fedavg(ft.least_squares(linear())), ft.InProcess(DATA), record=second)
    late.load_state_dict(early.state_dict())
    for _ in late.rounds(12):
        pass
    assert whole.rounds == second.rounds != []
    with pytest.warns(UserWarning, match="Drift in round"):
        run(12, DriftAlarm(worse, threshold=60.0))
    quiet = DriftAlarm(threshold=1e9)
    run(2, quiet)
    assert quiet.rounds == []
    with pytest.raises(ValueError, match="positive threshold"):
        DriftAlarm(threshold=0.0)
