"""The comparison with other simulators and the scaling benchmark run with --smoke."""

import json

import pytest
import torch

from experiments.benchmarks import modules, scaling
from experiments.benchmarks.peers import __main__ as peers, ours, tasks, work


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads that wait for each other on busy cores would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def figures(path):
    return {(row["setting"], row["metric"]): row["ours"] for row in json.loads(path.read_text())["rows"]}


@pytest.mark.slow
def test_ours_and_the_plain_loop_do_the_same_work(tmp_path):
    peers.main(["--smoke", "--json", str(tmp_path / "rows.json")])
    found = figures(tmp_path / "rows.json")
    for task, spec in tasks.TASKS.items():
        plain = found[f"{task}: {peers.LOOP}", "loss"]
        # The same minibatches: only rounding differs, but where a module draws.
        for name in [
            name for name in peers.SYSTEMS if name.startswith("fedtorch") and task in peers.SYSTEMS[name].tasks
        ]:
            assert found[f"{task}: {name}", "loss"] == pytest.approx(plain, rel=0.1 if spec.random else 1e-5)
            assert found[f"{task}: {name}", f"times faster than the {peers.LOOP}"] > 0


@pytest.mark.slow
def test_a_system_runs_as_a_program(tmp_path):
    file = tmp_path / "work.npz"
    work.write(file, {"linear": tasks.Size(3, 2)}, ours.schedule)
    found = peers.measure(peers.SYSTEMS[peers.LOOP], file, "linear", 1, here=False)
    assert found.keys() == {"version", "startup", "seconds", "processor", "megabytes", "loss"}


@pytest.mark.slow
def test_scaling(tmp_path):
    scaling.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    found = figures(tmp_path / "rows.json")
    assert {name for _, name in found} >= {"s a round", "times faster with two (at most 2)", "ms"}
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM of 256 units", "attention with a mask"])
def test_kinds_of_modules(tmp_path, kind):
    modules.main(["--smoke", "--part", kind, "--json", str(tmp_path / "rows.json")])
    found = figures(tmp_path / "rows.json")
    assert {f"{way}, × the loop's speed" for way in ("bound", *modules.WAYS)} <= {name for _, name in found}
    assert min(found.values()) > 0
