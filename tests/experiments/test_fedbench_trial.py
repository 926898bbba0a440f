"""The trial of FedBench: FedNova and Flower's FedAdam are plain loops', and clients have the rows that it gives."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedtorch as ft
from experiments.trials import fedbench


def test_fednova_moves_by_changes_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedbench, "EPOCHS", 2)
    draws = torch.Generator().manual_seed(0)
    rows = [(torch.randn(n, 3, generator=draws), torch.randint(2, (n,), generator=draws)) for n in (20, 64)]
    module = fedbench.made(fedbench.perceptron, 0)
    run = ft.run(fedbench.fednova(fedbench.descent(module)), ft.InProcess(ft.data.from_tensors(rows)), rounds=1)
    changes, lengths, shares = [], [], torch.tensor([20.0, 64.0]) / 84
    for x, y in rows:  # one minibatch each
        mine = copy.deepcopy(module)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(mine(x), y).backward()
            optimizer.step()
        lengths.append((2 - 0.9 * (1 - 0.9**2) / 0.1) / 0.1)
        changes.append([(b - a).detach() for a, b in zip(module.parameters(), mine.parameters())])
    total = sum(float(share) * length for share, length in zip(shares, lengths))
    for place, (name, leaf) in enumerate(module.named_parameters()):
        step = sum(share * change[place] / length for share, change, length in zip(shares, changes, lengths))
        torch.testing.assert_close(run.server[name], leaf.detach() + total * step, atol=1e-6, rtol=0)


def test_means_that_are_said_not_to_differ_do_not_by_welchs_test() -> None:
    record = json.loads((fedbench.result_pages.RESULTS / "trials_fedbench.json").read_text())
    rows = [row for run in record["runs"] for row in run["rows"] if row["setting"] == "FCUBE, FedAdam"]
    rows = [row for row in rows if row["metric"] in ("accuracy after 2 rounds", "accuracy after 50 rounds")]
    assert len(rows) == 2
    for row in rows:
        theirs = row["published_sd"] ** 2 * 3 / 2 / 3  # the sd is divided by the number of runs
        t = (row["ours"] - row["published"]) / (row["sd"] ** 2 / row["repeats"] + theirs) ** 0.5
        assert round(t, 1) == -1.1
        assert row["sd"] > 4 * row["published_sd"]


def test_the_first_round_is_kept_for_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedbench, "EPOCHS", 1)
    draws, module = torch.Generator().manual_seed(1), fedbench.made(fedbench.perceptron, 0)
    data = ft.data.from_tensors([(torch.randn(n, 3, generator=draws), torch.arange(n) % 2) for n in (5, 9)])
    kept: dict = {}
    for method in (fedbench.METHODS["FedAvg"], fedbench.fednova):
        wanted = ft.run(method(fedbench.descent(module)), ft.InProcess(data), rounds=2, progress=False)
        run = ft.run(method(fedbench.remembered(fedbench.descent(module), kept)), ft.InProcess(data), rounds=2)
        assert all(torch.equal(leaf, wanted.server[name]) for name, leaf in run.server.items())
    assert len(kept) == 1


def test_flowers_adam_corrects_by_the_round_to_come() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = fedbench.Adam([parameter], lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    wanted, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for round, change in enumerate(([0.3, -0.1], [-0.2, 0.4]), 1):
        parameter.grad = -torch.tensor(change)
        optimizer.step()
        m, v = 0.9 * m + 0.1 * np.array(change), 0.99 * v + 0.01 * np.square(change)
        rate = 0.1 * np.sqrt(1 - 0.99 ** (round + 1)) / (1 - 0.9 ** (round + 1))
        wanted = wanted + rate * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(parameter.detach(), wanted, rtol=1e-5)


def test_rows_are_divided_once() -> None:
    rows = fedbench.by_dirichlet(np.arange(3000) % 10, 10)
    assert sorted(np.concatenate(rows)) == list(range(3000))
    assert min(map(len, rows)) >= 10
    points, labels = fedbench.cube(0).clients[3]
    assert points.shape == (900, 3)
    assert torch.equal(labels, (points[:, 0] < 0).long())
    assert bool((points[:, 0] * points[:, 1] < 0).all() and (points[:, 0] * points[:, 2] < 0).all())


@pytest.mark.slow
def test_the_trial_runs(tmp_path: Path) -> None:
    try:
        ft.data.mnist(train=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    fedbench.main(["--smoke", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["setting"].split(", ")[1] for row in rows} >= set(fedbench.METHODS)
