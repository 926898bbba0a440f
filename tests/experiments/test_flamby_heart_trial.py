"""The trial of Fed-Heart-Disease: FLamby's rows, rules and figures, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtorch as ft
from experiments.trials import flamby_heart, flamby_published
from experiments.trials.flamby_published import AVERAGE, EACH, HOSPITALS
from fedtorch.federation.algorithms.fedopt import Adagrad


@pytest.fixture(scope="module")
def rows() -> flamby_heart.Rows:
    try:
        return flamby_heart.rows()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_rows_are_those_of_flamby(rows: flamby_heart.Rows) -> None:
    assert rows.train.counts.tolist() == [199, 172, 30, 85]
    assert (*rows.test.counts.tolist(), len(rows.all_test.rows[0])) == flamby_published.TESTED
    assert rows.train.names == HOSPITALS
    for x, y in [*rows.train, rows.all_train.rows]:
        spread = x.std(0)
        assert bool((((spread - 1).abs() < 1e-5) | (spread == 0)).all())
        assert float(x.mean(0).abs().max()) < 1e-5
        assert set(y.unique().tolist()) <= {0.0, 1.0}


def test_labels_that_are_rare_are_not_stratified() -> None:
    labels = np.array([0] * 2 + [1] * 44)
    train, test = flamby_heart.split(labels, 43)
    assert sorted([*train, *test]) == list(range(46))
    assert (len(train), len(test)) == (30, 16)
    frequent = np.array([0, 1] * 50)
    _, test = flamby_heart.split(frequent, 43)
    assert frequent[test].sum() == 17


def test_weights_begin_as_those_of_pytorch_and_leave_its_generator() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    weight = flamby_heart.linear(42).weight
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(42)
    assert weight.equal(torch.nn.Linear(13, 1).weight.double())


def test_adagrad_is_that_of_flamby() -> None:
    parameter = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = Adagrad([parameter], lr=0.3, betas=(0.9, 0.0), eps=1e-8, initial=0.0)
    expected, m, v = torch.zeros(2, dtype=torch.float64), 0.0, 0.0
    for change in torch.tensor([[0.1, -2.0], [0.3, 0.5], [-0.2, 0.1]], dtype=torch.float64):
        m, v = 0.9 * m + 0.1 * change, v + change * change
        expected = expected + 0.3 * m / (v.sqrt() + 1e-8)
        parameter.grad = -change
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=0.0)


def test_hospitals_take_turns_in_permutations() -> None:
    order, draws = flamby_heart.cycle(42, 15), np.random.default_rng(42)
    assert order == [*draws.permutation(4), *draws.permutation(4), *draws.permutation(4), *draws.permutation(4)][:15]


def test_cleveland_of_cyclic_is_trained_alone(rows: flamby_heart.Rows) -> None:
    turn = flamby_heart.cycle(43, 4).index(0)
    run = ft.run(
        ft.separate(flamby_heart.descent(43, 0.01)),
        ft.InProcess(rows.train.select([0])),
        rounds=4,
        seed=43,
        cohort=lambda key, round: torch.arange(int(round == turn)),
        progress=False,
    )
    alone = flamby_heart.one_model(flamby_heart.client(run.tensors(), 0), rows).own
    cleveland = flamby_heart.cyclic(ft.separate, rows, 43, 4).own
    handed_on = flamby_heart.cyclic(ft.fedavg, rows, 43, 4).own
    assert bool((alone[0] - cleveland[0]).abs().max() < 1e-9)
    assert bool((handed_on[0] - cleveland[0]).abs().max() > 0.1)


def test_published_figures_are_those_of_flamby() -> None:
    assert np.mean(flamby_published.published("FedYogi")[AVERAGE]) == pytest.approx(0.7314, abs=5e-5)
    assert flamby_published.published("pooled")["all rows"][0] == 0.7913385826771654  # of its file of seed 42
    assert np.mean(flamby_published.published(EACH)[AVERAGE]) == pytest.approx(0.7299, abs=5e-5)
    assert flamby_published.published("HM1") == {}


def test_fedavg_gets_as_many_right_as_published(rows: flamby_heart.Rows) -> None:
    run = flamby_heart.trained(flamby_heart.STRATEGIES["FedAvg"](42), rows.train, 42, flamby_heart.ROUNDS)
    fitted = flamby_heart.one_model(flamby_heart.client(run.tensors(), 0), rows)
    ours = flamby_heart.accuracies(fitted, rows)
    for test, count, hits in zip(
        flamby_published.TESTS, flamby_published.TESTED, flamby_published.PUBLISHED["FedAvg"][0]
    ):
        assert abs(ours[test] * count - hits) < 2.5, test


def test_the_more_frequent_answer(rows: flamby_heart.Rows) -> None:
    scores = flamby_heart.accuracies(flamby_heart.majority(rows), rows)
    ill = [float(y.mean()) for _, y in rows.test]
    assert [scores[name] for name in HOSPITALS] == pytest.approx([1 - ill[0], 1 - ill[1], ill[2], ill[3]])


@pytest.mark.slow
def test_the_trial_runs(tmp_path: Path) -> None:
    flamby_heart.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    found = {
        (row["setting"], row["metric"]): row["ours"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]
    }
    assert len({setting for setting, _ in found}) > 20
    assert found["EP, intercepts differ, published split", AVERAGE] > found["FedYogi", AVERAGE]
    assert (tmp_path / "flamby_heart.png").exists()
