"""The trial of FedProx's synthetic data: its generator, its stragglers, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fedtorch as ft
from experiments.trials import fedprox


@pytest.mark.parametrize("name", fedprox.DATA)
def test_devices_are_as_documented(name: str) -> None:
    training, test = fedprox.generate(fedprox.DATA[name], seed=3)
    sizes = training.counts + test.counts
    assert len(sizes) == 30
    assert int(sizes.min()) >= 50
    assert bool(((training.counts / sizes - 0.9).abs() < 0.02).all())
    x, y = training.rows
    assert x.shape[1] == 60
    assert set(y.tolist()) <= set(range(10))
    if name == "IID":
        spread = x.var(0) * torch.arange(1.0, 61.0) ** 1.2
        assert bool(((spread - 1).abs() < 0.2).all())


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_so_many_of_a_round_are_stragglers(level: float) -> None:
    ids = torch.arange(0, 30, 3)
    keys = lambda seed: ft.random.fold_in(ft.random.key(seed), ids)
    dropped, slow = fedprox.stragglers(level, drops=True), fedprox.stragglers(level, drops=False)
    assert dropped is not None
    assert slow is not None
    assert dropped.before is not None
    assert slow.work is not None
    assert int(dropped.before(keys(1), ids).sum()) == round(10 * level)
    epochs = torch.cat([slow.work(keys(seed), ids) * 20 for seed in range(200)])
    assert int((epochs < 20).sum()) == 200 * round(10 * level)
    drawn = epochs[epochs < 20].round()
    assert (float(drawn.min()), float(drawn.max())) == (1.0, 19.0)
    assert fedprox.stragglers(0.0, drops=True) is None


def test_dissimilarity_is_that_of_autograd() -> None:
    training, _ = fedprox.generate((1, 1), seed=1)
    weight = torch.randn(10, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    bias = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    each = []
    for x, y in training:
        loss = F.cross_entropy(x @ weight.mT + bias, y)
        each.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, [weight, bias])]))
    x, y = training.rows
    loss = F.cross_entropy(x @ weight.mT + bias, y)
    whole = torch.cat([part.flatten() for part in torch.autograd.grad(loss, [weight, bias])])
    expected = float((torch.stack(each) - whole).square().sum(1).mean())
    with torch.no_grad():
        assert fedprox.dissimilarity(training, {"weight": weight, "bias": bias}) == pytest.approx(expected, rel=1e-10)


def test_a_run_that_is_kept_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(fedprox, "course", lambda name, *rest: calls.append(name) or {"training loss": [1.0]})
    setting = ("(1, 1)", 0.9, fedprox.METHODS["FedAvg"], 2, 0)
    assert fedprox.kept(tmp_path, *setting) == fedprox.kept(tmp_path, *setting)
    assert calls == ["(1, 1)"]


@pytest.mark.slow
def test_the_trial_runs(tmp_path: Path) -> None:
    fedprox.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    rows = {
        (row["setting"], row["metric"]): row["ours"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]
    }
    losses = [rows[f"(1, 1), 90% stragglers, {method}", "training loss"] for method in fedprox.METHODS]
    assert losses[1] < losses[0]  # after one round: nine of ten have done something
    assert (tmp_path / "fedprox_90.png").exists()
