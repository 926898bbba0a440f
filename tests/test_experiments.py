"""Every experiment and benchmark runs with --smoke and writes the rows it promises."""

import json

import pytest

from experiments import (
    fedavg_family,
    fedmgp_battery,
    fedmgp_extrapolation,
    fedmgp_faults,
    fedmgp_scale,
    quickstart,
)
from experiments.benchmarks import core
from experiments.benchmarks import fedmgp as fedmgp_benchmark


def rows(path):
    written = json.loads(path.read_text())
    assert all(row.keys() == {"setting", "metric", "ours", "sd", "published"} for row in written["rows"])
    return {(row["setting"], row["metric"]): row["ours"] for row in written["rows"]}


def test_quickstart(tmp_path):
    quickstart.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    found = rows(tmp_path / "rows.json")
    assert {setting for setting, _ in found} == {"separate", "FedAvg", "personal layers", "pooled"}
    assert found["separate", "megabytes"] == found["pooled", "megabytes"] == 0
    assert 0 < found["personal layers", "megabytes"] < found["FedAvg", "megabytes"]
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000


def test_core_benchmark(tmp_path):
    core.main(["--smoke", "--part", "linear", "--json", str(tmp_path / "rows.json")])
    assert len(rows(tmp_path / "rows.json")) == 6


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(core.parts(True)))
def test_core_benchmark_parts(tmp_path, part):
    core.main(["--smoke", "--part", part, "--json", str(tmp_path / "rows.json")])
    assert all(value == value for value in rows(tmp_path / "rows.json").values())


def test_fedavg_family(tmp_path):
    fedavg_family.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    found = rows(tmp_path / "rows.json")
    for participation in ("all clients", "2 of 10 clients"):
        error = {name: found[name, f"relative error, {participation}"] for name in fedavg_family.algorithms()}
        assert max(error["SCAFFOLD"], error["FedDyn"]) < min(error["FedAvg"], error["FedProx"]) / 10
        assert error["Ditto (shared)"] == pytest.approx(error["FedAvg"], rel=1e-12)
    assert (tmp_path / "fedavg_family.png").stat().st_size > 10_000


def test_fedmgp_extrapolation(tmp_path):
    fedmgp_extrapolation.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    found = rows(tmp_path / "rows.json")
    assert found["FedMGP", "MSE"] < min(found["FedPoly", "MSE"], found["IndGP", "MSE"])
    assert (tmp_path / "fedmgp_extrapolation.png").stat().st_size > 10_000


def test_fedmgp_scale(tmp_path):
    fedmgp_scale.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    assert rows(tmp_path / "rows.json")["(50, 20)", "CenMGP MSE"] < 0.02
    assert (tmp_path / "fedmgp_scale.png").stat().st_size > 10_000


def test_fedmgp_benchmark(tmp_path):
    fedmgp_benchmark.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    found = rows(tmp_path / "rows.json")
    assert found["to the same bound", "times faster (target 20)"] > 1
    assert (tmp_path / "fedmgp_benchmark.png").stat().st_size > 10_000


def test_fedmgp_faults(tmp_path):
    fedmgp_faults.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    assert len(rows(tmp_path / "rows.json")) == 8
    assert (tmp_path / "fedmgp_faults.png").stat().st_size > 10_000


def test_fedmgp_battery(tmp_path):
    try:
        fedmgp_battery.cells()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    fedmgp_battery.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    assert len(rows(tmp_path / "rows.json")) == 5
    assert (tmp_path / "fedmgp_battery.png").stat().st_size > 10_000
