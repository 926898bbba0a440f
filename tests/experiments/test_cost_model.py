"""The formulas of what a round costs, and the scripts that measure their constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fedtorch as ft
from experiments.benchmarks import scaling
from experiments.benchmarks.cost_model import __main__ as cost_model
from experiments.benchmarks.parts import (
    cost_formulas as formulas,
    cpu_programs,
    gpu_kernels,
    kernel_bounds,
    scaling_ranks,
)
from experiments.benchmarks.parts.cost_formulas import Cluster, Here, Wide

HERE = Here(
    round=3e-3,
    client=1e-5,
    meet=1e-3,
    hop=1e-4,
    pace=1e9,
    line=5e-4,
    server=4e-4,
    asked=8e-4,
    site=2e-3,
    shared=3e-3,
    byte=1e-9,
)


def test_rounds_over_ranks() -> None:
    assert formulas.over_ranks(HERE, 1000, 1, 72) == pytest.approx(formulas.stacked(HERE, 1000)) == pytest.approx(13e-3)
    # 250 clients each; h; a sum of 2 · 2 steps; three quarters of 2 · (8 MB and 16 bytes a client)
    wanted = 3e-3 + 250e-5 + 1e-3 + 4 * 1e-4 + 0.75 * 2 * (8e6 + 16_000) / 1e9
    assert formulas.over_ranks(HERE, 1000, 4, 8_000_000) == pytest.approx(wanted)


def test_what_ranks_measure_has_the_names_that_are_asked_for() -> None:
    found = scaling_ranks.work([4])
    for way in scaling_ranks.WAYS:
        title = scaling_ranks.titled(4, way)
        assert found[title] > 0
        assert {f"{title}, {name}" for name in scaling.MEETINGS} <= found.keys()
        assert found[f"{title}, collectives"] == 0  # of one process
        assert scaling_ranks.apart(ft.Distributed(scaling_ranks.linear_data(4)), 2, **scaling_ranks.WAYS[way]) > 0


def test_rounds_over_sites_of_one_machine() -> None:
    """The server is the longest, then a process of many sites, then all processors together."""
    assert formulas.over_sites(HERE, 3, 1, cores=100) == pytest.approx(5e-4 + 4e-4 + 3 * 8e-4 + 2e-3)
    assert formulas.over_sites(HERE, 180, 180, cores=100) == pytest.approx(5e-4 + 180 * 3e-3)
    assert formulas.over_sites(HERE, 20, 1, cores=2) == pytest.approx(5e-4 + (4e-4 + 20 * 2.8e-3) / 2)


def test_rounds_on_gpus() -> None:
    cluster = Cluster()
    for work in formulas.WORKS:
        one, node, every = (formulas.on_gpus(work, cluster, HERE, ranks) for ranks in (1, 8, 128))
        assert one.talk == 0 < node.talk < every.talk
        assert one.seconds > node.seconds > every.seconds > one.seconds / 128
    large = formulas.on_gpus(formulas.WORKS[3], cluster, HERE, 128)
    size, hops = 2 * (8 * 110e6 + 16 * 1280), 2 * (3 * 3e-6 + 4 * 8e-6)
    inside, outside = 7 / 8 * size / cluster.near[1], 15 / 16 * size / 8 / cluster.far[1]
    assert large.talk == pytest.approx(HERE.meet + hops + inside + outside, rel=1e-4)


def test_rounds_of_the_world() -> None:
    few, many = (sum(formulas.over_the_world(HERE, Wide(), n, 4e4).values()) for n in (1000, 10_000))
    assert many - few == pytest.approx(9000 * (8e-4 + 2 * 4e4 * 1e-9 + 2 * 4e4 / Wide().link))
    below = formulas.over_the_world(HERE, Wide(), 1_000_000, 4e4, servers=1000)
    assert below["the server's processor"] == pytest.approx(2 * (4e-4 + 1000 * (8e-4 + 8e-5)))


def test_bounds_of_programs() -> None:
    device = formulas.Device("a device", memory=100.0, single=10.0, double=5.0, call=1.0)
    assert device.bound(2, 300.0, 20.0, double=False) == 2 + 3  # bytes take longer than operations
    assert device.bound(2, 300.0, 20.0, double=True) == 2 + 4
    x = torch.ones(1000)
    assert kernel_bounds.spent(lambda: x.reshape(10, 100).mT) == (0, 0.0)  # a view
    assert kernel_bounds.spent(lambda: x + x.flip(0)) == (2, 4 * (2 + 3) * 1000.0)
    assert kernel_bounds.spent(lambda: x.expand(7, -1).sum(0)) == (1, 4 * 2000.0)  # read once


def test_every_program_has_bounds() -> None:
    lines = kernel_bounds.lines(small=True)
    assert {line[0] for line in lines} == set(gpu_kernels.CASES)
    for line in lines:
        assert len(line) == len(kernel_bounds.COLUMNS)
        moved, calls, least, *bounds = map(float, line[2:])
        assert moved > 0
        assert calls >= 1
        assert min(least, *bounds) > 0


def test_a_reference_is_measured_beside_its_compiled_form() -> None:
    line = kernel_bounds.compiled("stacked_step", small=True, compile=lambda work, dynamic: work)
    assert len(line) == len(kernel_bounds.COMPILED)
    reference, library, compiled, *ratios, starting = map(float, line[2:8])
    assert min(reference, library, compiled, starting) > 0
    assert ratios[0] == pytest.approx(reference / compiled, rel=0.05)
    assert ratios[1] <= ratios[0] + 0.01


def test_compiler_errors_are_reported() -> None:
    line = kernel_bounds.compiled("glm_steps", small=True, compile=lambda work, dynamic: lambda: work(1, 2, 3, 4))
    assert len(line) == len(kernel_bounds.COMPILED)
    assert line[4] == "refused (TypeError)"
    assert line[-1] == "never"


@pytest.mark.parametrize("name", cpu_programs.WORK)
def test_programs_of_the_cpu_have_a_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_programs, "seconds_to_compile", lambda source: 0.5)
    line = cpu_programs.line(name, small=True)
    assert len(line) == len(cpu_programs.COLUMNS)
    assert float(line[4]) > 0
    monkeypatch.setattr(cpu_programs, "seconds_to_compile", lambda source: None)
    assert "no numba" in cpu_programs.line(name, small=True)


@pytest.mark.slow
def test_a_program_is_compiled_anew_to_time_it() -> None:
    assert (cpu_programs.seconds_to_compile("gibbs_server") or 0) > 0.01


@pytest.mark.slow
def test_the_scripts(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    scaling.main(["--smoke", "--part", "processes", "--json", str(file)])
    assert all(row["ours"] > 0 for row in json.loads(file.read_text())["rows"])
    cost_model.main(["--smoke", "--json", str(file)])
    found = {row["metric"]: row["ours"] for row in json.loads(file.read_text())["rows"][: len(Here._fields)]}
    assert found.keys() == set(Here._fields)
    assert min(found[name] for name in ("hop", "pace", "line", "site", "shared")) > 0
