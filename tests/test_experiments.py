"""Every experiment and benchmark runs with --smoke and writes the rows it promises."""

import json

import pytest

from experiments import fedavg_family, quickstart
from experiments.benchmarks import core, gtv


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


def test_gtv_benchmark(tmp_path):
    gtv.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    found = rows(tmp_path / "rows.json")
    reached = {
        setting.split(", ")[1]: value for (setting, metric), value in found.items() if metric == "rounds to 1e-8"
    }
    assert reached["conjugate gradients"] < reached["Chebyshev"] <= reached["FedGD"] == 150
    assert all(value > 0 for value in found.values())
    assert (tmp_path / "gtv_edges.png").stat().st_size > 10_000
