"""Every experiment and benchmark runs with --smoke and writes the rows it promises."""

import json

import pytest

from experiments import fedavg_family, quickstart, sparse_regression
from experiments.benchmarks import core, gibbs


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


def test_sparse_regression(tmp_path):
    arguments = ["--smoke", "--study", "simulated", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)]
    sparse_regression.main(arguments)
    found = rows(tmp_path / "rows.json")
    for way in ("federated", "pooled as iid", "sites, averaged"):
        assert found[f"alike, {way}", "inclusion of effects"] > 0.8 > 0.4 > found[f"alike, {way}", "inclusion of zeros"]
    assert found["alike, federated", "megabytes"] > 0 == found["alike, pooled as iid", "megabytes"]
    assert (tmp_path / "sparse_regression_alike.png").stat().st_size > 10_000


@pytest.mark.parametrize("part", ["clients", *(pytest.param(p, marks=pytest.mark.slow) for p in ("nuts", "sweeps"))])
def test_gibbs_benchmark(tmp_path, part):
    gibbs.main(["--smoke", "--part", part, "--json", str(tmp_path / "rows.json")])
    assert all(value > 0 for value in rows(tmp_path / "rows.json").values())
