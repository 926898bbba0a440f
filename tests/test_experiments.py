"""Every experiment and benchmark runs with --smoke and writes the rows it promises."""

import json
import os

import pytest

from experiments import fedavg_family, fedlin_selection, fedlin_student, quickstart
from experiments.benchmarks import core


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


def test_fedlin_selection(tmp_path):
    fedlin_selection.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    found = rows(tmp_path / "rows.json")
    assert found["case I", "correct inclusion"] == 1.0
    assert 0.05 < found["case I", "A-RMSE"] < 0.055  # noise of 0.05, and eight coefficients learnt from 100 rows
    assert found["case I", "false inclusion"] < 0.25
    assert (tmp_path / "fedlin_selection.png").stat().st_size > 10_000


def test_fedlin_student(tmp_path):
    if not os.environ.get("FEDTORCH_DATA_DIR"):
        pytest.skip("needs the student performance data in FEDTORCH_DATA_DIR")
    fedlin_student.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    found = rows(tmp_path / "rows.json")
    assert found["ridge (HM2)", "A-RMSE, all"] < 1  # better than the mean
    assert 0 < found["ridge (HM2)", "included, school 1"] < 38
    assert (tmp_path / "fedlin_student.png").stat().st_size > 10_000
