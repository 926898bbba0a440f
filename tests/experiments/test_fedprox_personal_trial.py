"""The trial of personal and Bayesian methods on synthetic federations: LEAF's rows, pulls, scores, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fedtorch as ft
from experiments.trials import fedprox_personal, leaf_data


def test_rows_are_those_of_leafs_script() -> None:
    made = leaf_data.rows()
    x, y = (torch.cat(leaves) for leaves in zip(*made, strict=True))
    assert len(made) == 1000
    assert len(y) == 107_553  # here and below: what LEAF's own main.py gives of its default seed
    assert y.bincount().tolist() == [16607, 15477, 23124, 35783, 16562]
    assert float(x.sum()) == pytest.approx(859_685.2361869651, rel=1e-10)
    sizes = [len(rows) for _, rows in made]
    assert (min(sizes), max(sizes)) == (5, 1000)


def test_leafs_devices_label_alike_where_their_numbers_have_one_sign() -> None:
    """All linear models are multiples of one basis: one softmax regression has nearly all rows of all devices right."""
    x, y = (torch.cat(leaves) for leaves in zip(*leaf_data.rows(devices=100), strict=True))
    basis = torch.from_numpy(leaf_data.np.random.RandomState(leaf_data.SEED).normal(0, 1, (61, 5, 1)))[..., 0]
    logits = -(x @ basis[1:] + basis[0])  # the centre is negative
    assert float((logits.argmax(1) == y).double().mean()) > 0.95


@pytest.mark.parametrize("name", ["(1, 1)", fedprox_personal.LEAF])
def test_the_pull_of_all_others_is_that_of_fedprox(name: str) -> None:
    of = fedprox_personal.federation(name, 0, small=True)
    settings = fedprox_personal.gtv(of).settings
    degree = len(settings["edges"]) * 2 / of.train.clients
    assert degree == of.train.clients - 1
    assert 2 * settings["alpha"]["weight"] * degree == pytest.approx(fedprox_personal.PULL)


def test_scores_are_those_of_each_devices_own_model() -> None:
    x = torch.eye(3, dtype=torch.float64)
    train = ft.data.from_tensors([(x, torch.tensor([0, 1, 2])), (x, torch.tensor([1, 2, 0]))])
    of = fedprox_personal.Federation(train, train, 3, 2)
    own, nothing = torch.eye(3).double(), torch.zeros(2, 3).double()
    weight = torch.stack([5 * own, 5 * own])  # right of the first device, never of the second
    found = fedprox_personal.scores(fedprox_personal.Models(weight, nothing), of)
    right, wrong = (float(torch.tensor([5.0, 0, 0]).double().log_softmax(0)[place]) for place in (0, 1))
    assert found["training loss"] == pytest.approx(-(right + wrong) / 2)
    shares = [found[metric] for metric in fedprox_personal.METRICS[1:]]
    assert shares == [0.5, 0.5, 0.0, 0.0]
    rest = fedprox_personal.scores(fedprox_personal.Models(weight, nothing, True), of)
    odds = torch.tensor([5.0, 0, 0]).double().sigmoid()
    odds = (odds / odds.sum()).log()
    assert rest["training loss"] == pytest.approx(-float(odds[0] + odds[1]) / 2)


def test_each_class_is_fitted_against_all_others() -> None:
    rows = [(torch.ones(3, 1).double(), torch.tensor([0, 2, 2])), (torch.ones(2, 1).double(), torch.tensor([1, 0]))]
    of = fedprox_personal.Federation(ft.data.from_tensors(rows), ft.data.from_tensors(rows), 3, 2)
    models = fedprox_personal.against_the_rest(
        lambda data: torch.stack([y.sum().expand(2) for _, y in data]) * torch.tensor([1.0, 10.0]), of
    )
    assert models.against_the_rest
    assert models.weight[..., 0].tolist() == [[1.0, 0.0, 2.0], [1.0, 1.0, 0.0]]
    assert models.bias.tolist() == [[10.0, 0.0, 20.0], [10.0, 10.0, 0.0]]


def test_a_training_that_is_kept_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    alone = fedprox_personal.METHODS["alone"]
    monkeypatch.setitem(fedprox_personal.METHODS, "alone", lambda *given: calls.append(given[2]) or alone(*given))
    setting = (tmp_path, fedprox_personal.LEAF, "alone", 1, 3, True)
    assert fedprox_personal.kept(*setting) == fedprox_personal.kept(*setting)
    assert calls == [3]


@pytest.mark.slow
def test_the_trial_runs(tmp_path: Path) -> None:
    fedprox_personal.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["setting"] for row in rows} == {
        f"{method}: {name}" for method in fedprox_personal.METHODS for name in ("(1, 1)", fedprox_personal.LEAF)
    }
    assert (tmp_path / "fedprox_personal.png").exists()


@pytest.mark.slow
def test_hierarchical_intercepts_are_fitted() -> None:
    of = fedprox_personal.federation(fedprox_personal.LEAF, 0, small=True)
    models = fedprox_personal.own_intercepts_by_ep(of, 1, 0)
    assert models.weight.shape == (40, 5, 60)
    torch.testing.assert_close(models.weight[0], models.weight[-1])
    assert float(models.bias.std(0).min()) > 0
