"""Scores of a federation beside scikit-learn on the same rows."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torchmetrics
from sklearn.metrics import mean_squared_error, r2_score
from support.oracles.closed_forms import client_tensors, linear_clients, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.runs.evaluation import evaluate, inputs_and_targets
from fedtorch.metrics.scores import Score
from fedtorch.metrics.stacked import as_stacked

SIZES = [7, 3, 12, 5]
DATA = linear_clients(SIZES)
ROUNDING = 1e-12
MSE = {"mse": ft.metrics.mean_squared_error()}
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
        assert scores[name].worst() == pytest.approx((max if name == "mse" else min)(each), **rounding)
        assert scores[name].worst(largest_is_best=True) == pytest.approx(min(each), **rounding)
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
    assert score.worst() == float(score.clients[rest].max())


def test_a_client_whose_predictions_are_nan_is_not_left_out() -> None:
    """Its model has diverged: a mean or a worst value over the others would hide it."""
    _, validation = linear_clients([7, 1, 12, 5]).split(0.7, seed=0)
    clients, outbox = trained(ft.InProcess(DATA))
    first = iter([True])

    def diverged(tensors: Any, inputs: Tensor) -> Tensor:
        prediction = predict(tensors, inputs)
        if next(first, False):
            prediction[0] = torch.nan
        return prediction

    scores = evaluate(clients, outbox, diverged, validation, METRICS)
    for score in scores.values():
        assert score.failed is not None
        assert int(score.failed.sum()) == 1
        assert bool(score.clients[score.failed].isnan().all())
        assert all(value != value for value in (score.mean(), score.worst(), score.worst_decile()))
    finite = evaluate(clients, outbox, predict, validation, METRICS)["mse"]
    assert finite.failed is not None
    assert not bool(finite.failed.any())
    assert int(finite.clients.isnan().sum()) == 1  # without rows


def test_a_federation_without_rows_is_nan() -> None:
    score = Score(float("nan"), torch.full((3,), torch.nan, dtype=torch.float64))
    assert score.mean() != score.mean()
    assert score.worst() != score.worst()
    assert score.worst_decile() != score.worst_decile()


@pytest.mark.parametrize(
    ("metric", "largest_is_best"),
    [
        (ft.metrics.accuracy(), True),
        (ft.metrics.calibration_error(), False),
        (torchmetrics.R2Score(), True),
        (torchmetrics.MeanSquaredError(), False),
        (torch.nn.functional.l1_loss, False),
        (torch.nn.HuberLoss(), False),
        (ft.metrics.mean_of(lambda prediction, target: prediction - target, True), True),
    ],
)
def test_metrics_say_which_end_is_best(metric: Any, largest_is_best: bool) -> None:
    assert as_stacked(metric).largest_is_best is largest_is_best
    score = Score(1.0, torch.tensor([2.0, torch.nan, 1.0, 3.0]), largest_is_best)
    assert score.worst() == score.worst_decile() == (1.0 if largest_is_best else 3.0)


def test_a_function_does_not_say_which_end_is_best() -> None:
    run = ft.run(ft.fedavg(sgd(0.1)), ft.InProcess(DATA), rounds=1)
    score = run.evaluate(DATA, {"bias": lambda prediction, target: prediction[..., 0] - target})["bias"]
    assert score.worst(True) == float(score.clients.min())
    for worst in (score.worst, score.worst_decile):
        with pytest.raises(ValueError, match="Expected largest_is_best=True"):
            worst()


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


def test_unseen_clients_start_where_all_started_and_hear_the_server() -> None:
    others = linear_clients([4, 9, 6], seed=5)
    local = sgd(0.1, steps=3)
    averaged = ft.run(ft.fedavg(local), ft.InProcess(DATA), rounds=2)
    scores = averaged.evaluate(others, MSE, unseen=True)
    for (x, y), score in zip(others, scores["mse"].clients.tolist()):
        error = predict({n: leaf[None] for n, leaf in averaged.server.items()}, x[None])[0] - y
        assert score == pytest.approx(float(error.square().mean()), rel=ROUNDING)
    personal = ft.run(ft.personal_layers(local, "bias"), ft.InProcess(DATA), rounds=2)
    found = personal.evaluate(others, MSE, unseen=True)["mse"].clients.tolist()
    tensors = {**personal.server, "bias": local.parameters["bias"]}
    for (x, y), score in zip(others, found):
        error = predict({n: leaf[None] for n, leaf in tensors.items()}, x[None])[0] - y
        assert score == pytest.approx(float(error.square().mean()), rel=ROUNDING)
    federation = ft.Federation(ft.fedavg(local), ft.InProcess(DATA))
    assert len(federation.evaluate(others, MSE, unseen=True)["mse"].clients) == 3


def test_unseen_clients_have_no_model_where_each_hears_its_own() -> None:
    others = linear_clients([4, 9], seed=5)
    coupled = ft.Run(ft.gtv(sgd(0.1, steps=3), ft.Network.ring(4), 0.1), ft.InProcess(DATA))
    with pytest.raises(ValueError, match="Expected an algorithm whose server sends all clients the same"):
        coupled.evaluate(others, METRICS, unseen=True)
    with pytest.raises(ValueError, match="pass unseen=True for others"):
        coupled.evaluate(others, METRICS)


class Named(torch.nn.Module):
    """Takes its inputs by name, as models of text do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.linear(ids * mask)[:, 0]


class Positional(Named):
    """Takes its inputs as one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["ids"], batch["mask"])


@pytest.mark.parametrize("module", [Named, Positional])
@pytest.mark.parametrize("batched", [True, False])
def test_inputs_that_are_dicts_reach_forward_by_name(module: type[Named], batched: bool) -> None:
    rows = [({"ids": x, "mask": (x > 0).double()}, y) for x, y in DATA]
    local = ft.gradient_descent(
        module(),
        epochs=1,
        batch_size=4,
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batched=batched,
    )
    run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=1)
    flat = ft.data.from_tensors([{**inputs, "labels": y} for inputs, y in rows])
    split = lambda rows: ({"ids": rows["ids"], "mask": rows["mask"]}, rows["labels"])
    found = run.evaluate(flat, {"mse": torch.nn.functional.mse_loss}, split)["mse"].clients.tolist()
    for (inputs, y), score in zip(rows, found):
        output = Named.forward(run.global_module(), **inputs)  # type: ignore[arg-type]
        assert score == pytest.approx(float((output - y).square().mean().detach()), rel=ROUNDING)
