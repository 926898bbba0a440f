"""The comparison with other simulators and the scaling benchmark run with --smoke."""

import json

import pytest
import torch

from experiments.benchmarks import __main__ as page, modules, scaling
from experiments.benchmarks.parts import floors
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
    assert {name for _, name in found} >= {"processor s a round", "times faster with two (at most 2)", "ms"}
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM of 256 units", "attention with a mask"])
def test_kinds_of_modules(kind):
    found = {row.metric: row.ours for row in modules.rows_of(kind, clients=4, repeat=1)}
    assert {*modules.WAYS, modules.ALONE, modules.PRODUCTS, "bound"} <= found.keys()
    assert min(found.values()) > 0
    assert found[modules.PRODUCTS] > found[modules.ALONE]  # they are some of them


@pytest.mark.slow
def test_what_was_aimed_at_is_beside_what_is_possible(tmp_path):
    page.main(["modules", "--results", str(tmp_path), "--", "--smoke", "--part", "What was aimed at"])
    lines = (tmp_path / "modules.md").read_text().splitlines()
    head = next(line for line in lines if "to reach" in line)
    assert [cell.strip() for cell in head.split("|")[2:5]] == ["to reach", "reached", "at best"]
    assert sum(line.count("|") == head.count("|") for line in lines) > 12


def test_operations_are_called_again_and_those_of_our_own_whole():
    added, weights, states = torch.zeros(2, 3, 4, 12), torch.ones(2, 12, 4), torch.zeros(2, 4, 4)
    gru, calls = torch.ops.fedtorch.gru, []
    recorded = floors.recorded(lambda: gru(added, states, weights, torch.zeros(2, 12))[0].mul_(2))
    assert len(recorded.operations) == 3  # zeros, the layer, and the product
    names = [str(each[0].overloadpacket) for each in recorded.parts]
    assert names.count("aten.baddbmm") == len(recorded.products().operations) == 3  # of three steps
    layer = torch._library.custom_ops.OPDEFS["fedtorch::gru"]._init_fn
    again = [(lambda *args: calls.append(layer(*args)), *each[1:]) for each in recorded.operations if each[0] is layer]
    floors.Recorded(again, []).again()
    assert len(calls) == 1
