"""Scores of a federation beside scikit-learn on the same rows."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torchmetrics
from sklearn.metrics import mean_squared_error, r2_score
from support.closed_forms import client_tensors, linear_clients, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.evaluation import Score, evaluate, inputs_and_targets

SIZES = [7, 3, 12, 5]
DATA = linear_clients(SIZES)
ROUNDING = 1e-12
METRICS = {"mse": ft.metrics.mean_squared_error(), "r2": torchmetrics.R2Score()}


def predict(tensors: Any, inputs: Tensor) -> Tensor:
    return torch.einsum("knd,kod->kno", inputs, tensors["weight"]).squeeze(-1) + tensors["bias"]


def trained(population: ft.InProcess) -> tuple[Any, Any]:
    last = ft.run(ft.personal_layers(sgd(0.1, steps=3), "bias"), population, rounds=2).last
    return last.clients, last.server


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_scores_are_those_of_pooled_rows_and_of_each_client(chunk: int | None) -> None:
    clients, outbox = trained(ft.InProcess(DATA, chunk=chunk))
    scores = evaluate(clients, outbox, predict, DATA, METRICS)
    outputs, targets = [], []
    for k, (x, y) in enumerate(DATA):
        tensors = client_tensors(clients, outbox, k)
        outputs.append((x @ tensors["weight"][0] + tensors["bias"]).numpy())
        targets.append(y.numpy())
    for name, reference in (("mse", mean_squared_error), ("r2", r2_score)):
        pooled = reference(numpy.concatenate(targets), numpy.concatenate(outputs))
        each = [reference(t, o) for t, o in zip(targets, outputs)]
        # R2Score keeps float32 sums.
        rounding = {"rel": ROUNDING} if name == "mse" else {"rel": 1e-4, "abs": 1e-4}
        assert scores[name].overall == pytest.approx(pooled, **rounding)
        assert scores[name].clients.tolist() == pytest.approx(each, **rounding)
        assert scores[name].clients.dtype == torch.float64
        assert scores[name].mean() == pytest.approx(sum(each) / len(each), **rounding)
        assert scores[name].worst() == pytest.approx(min(each), **rounding)
        assert scores[name].worst(largest_is_best=False) == pytest.approx(max(each), **rounding)


def test_a_client_without_rows_is_nan_and_counts_for_nothing() -> None:
    _, validation = linear_clients([7, 1, 12, 5]).split(0.7, seed=0)
    assert int(validation.counts[1]) == 0
    clients, outbox = trained(ft.InProcess(DATA))
    score = evaluate(clients, outbox, predict, validation, METRICS)["mse"]
    rest = torch.tensor([0, 2, 3])
    assert bool(score.clients[1].isnan())
    weights = validation.counts[rest].double()
    assert score.overall == pytest.approx(float((weights * score.clients[rest]).sum() / weights.sum()))
    assert score.mean() == pytest.approx(float(score.clients[rest].mean()))
    assert score.worst(False) == float(score.clients[rest].max())


def test_a_federation_without_rows_is_nan() -> None:
    score = Score(float("nan"), torch.full((3,), torch.nan, dtype=torch.float64))
    assert score.mean() != score.mean()
    assert score.worst() != score.worst()


def test_scores_do_not_depend_on_the_order_of_clients() -> None:
    order = [2, 0, 3, 1]
    clients, outbox = trained(ft.InProcess(DATA))
    again, other = trained(ft.InProcess(DATA.select(order)))
    straight = evaluate(clients, outbox, predict, DATA, METRICS)["mse"]
    permuted = evaluate(again, other, predict, DATA.select(order), METRICS)["mse"]
    assert permuted.clients.tolist() == pytest.approx(straight.clients[order].tolist(), rel=ROUNDING)


def test_evaluation_leaves_states_alone_also_in_inference_mode() -> None:
    clients, outbox = trained(ft.InProcess(DATA))
    before = tree.map(torch.clone, clients.state_dict())
    with torch.inference_mode():
        evaluate(clients, outbox, predict, DATA, METRICS)
    after = clients.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_rows_of_another_form_need_a_split() -> None:
    data = DATA.map(lambda rows: {"features": rows[0], "label": rows[1], "age": rows[1]})
    clients, outbox = trained(ft.InProcess(DATA))
    with pytest.raises(TypeError, match=r"got \['age', 'features', 'label'\]; pass split="):
        evaluate(clients, outbox, predict, data, METRICS)
    with pytest.raises(TypeError, match="got Tensor"):
        inputs_and_targets(torch.zeros(3))
    scores = evaluate(clients, outbox, predict, data, METRICS, lambda rows: (rows["features"], rows["label"]))
    assert scores["mse"].overall == evaluate(clients, outbox, predict, DATA, METRICS)["mse"].overall


def test_no_metrics_and_other_clients_are_refused() -> None:
    clients, outbox = trained(ft.InProcess(DATA))
    with pytest.raises(ValueError, match="at least one metric"):
        evaluate(clients, outbox, predict, DATA, {})
    with pytest.raises(ValueError, match="4 clients, but got 2"):
        evaluate(clients, outbox, predict, DATA.select([0, 1]), METRICS)
