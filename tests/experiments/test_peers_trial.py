"""The trial of other simulators: ten regressions in one model are ten models, and it runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments.benchmarks.peers import tasks, work
from experiments.trials import peers


def every_row(counts: np.ndarray, task: tasks.Task, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """All clients, whose batches are their first rows."""
    clients = np.tile(np.arange(len(counts)), (rounds, 1))
    return clients, np.tile(np.arange(task.batch_size or 0), (rounds, len(counts), task.steps, 1))


def test_one_model_of_all_seeds_trains_as_a_model_for_each(tmp_path: Path) -> None:
    file = tmp_path / "work.npz"
    work.write(file, {"softmax": tasks.Size(3, 1)}, every_row)
    mine = work.Work(file, "softmax")
    together, seed = mine.model(), 3
    alone = torch.nn.Linear(64, 10)
    alone.load_state_dict({name: leaf[seed] for name, leaf in together.state_dict().items()})
    mine.fit(together, mine.batches(0, 1))
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x, y in mine.batches(0, 1):
        sgd.zero_grad()
        F.cross_entropy(alone(x[:, seed]), y[:, seed]).backward()
        sgd.step()
    for name, leaf in together.state_dict().items():
        torch.testing.assert_close(leaf[seed], alone.state_dict()[name], atol=1e-6, rtol=0)
    parameters = {name: leaf.numpy() for name, leaf in together.state_dict().items()}
    x, y = (leaf[:, seed] for leaf in mine.evaluation)
    score = peers.scored(parameters, mine)
    with torch.no_grad():
        output = alone(x)
    assert score.loss[seed] == pytest.approx(float(F.cross_entropy(output, y)), rel=1e-5)
    assert score.accuracy[seed] == pytest.approx(float((output.argmax(-1) == y).double().mean()))


def test_a_difference_of_one_seed_is_seen() -> None:
    draws = np.random.default_rng(0)
    mine = peers.Model(draws.normal(size=(10, 10, 65)), draws.random(10), draws.random(10))
    other = mine._replace(weight=mine.weight.copy())
    other.weight[4, 2, 7] += 1e-4
    figures = {row.metric: row.ours for row in peers.beside("another", other, mine)}
    assert figures["largest difference of a weight"] == pytest.approx(1e-4)
    assert figures["seeds of 10 equal to 1e-05"] == 9
    assert figures["p of Kolmogorov-Smirnov, test loss"] == 1


@pytest.mark.slow
def test_the_trial_runs(tmp_path: Path) -> None:
    peers.main(["--smoke", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    figures = {(row["setting"], row["metric"]): row["ours"] for row in rows}
    assert {setting for setting, _ in figures} == {"fedtorch", "plain PyTorch loop"}
    assert figures["plain PyTorch loop", "seeds of 10 equal to 1e-05"] == 10
