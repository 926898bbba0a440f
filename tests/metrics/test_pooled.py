"""Metrics that keep examples or give matrices: of each client's rows and of all rows, whatever the blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    BinaryAveragePrecision,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.retrieval import RetrievalMRR
from torchmetrics.wrappers import BootStrapper

import fedtorch as ft
from fedtorch.metrics.scores import named_metrics

SIZES = (9, 4, 15, 6)


class First(torchmetrics.wrappers.abstract.WrapperMetric):
    """A metric of the first column of predictions."""

    def __init__(self, metric: torchmetrics.Metric) -> None:
        super().__init__()
        self.metric = metric

    def update(self, prediction: Tensor, **named: Tensor) -> None:
        self.metric.update(prediction[..., 0], **named)

    def compute(self) -> Tensor:
        return self.metric.compute()


def clients(sizes: Any = SIZES) -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(0)
    total = sum(sizes)
    x = torch.randn(total, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (total,), generator=generator)
    query = torch.arange(total) % 4
    return ft.data.FederatedData((x, y, query), torch.tensor(sizes), allow_empty=True)


@pytest.fixture(scope="module")
def run() -> ft.Run:
    torch.manual_seed(0)
    local = ft.gradient_descent(
        nn.Linear(3, 3, dtype=torch.float64), steps=1, loss=lambda output, y: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    return ft.Run(ft.fedavg(local), ft.InProcess(clients().map(lambda rows: rows[:2])))


def values(run: ft.Run, metric: Any, rows: Any, target: Any) -> Tensor:
    metric = metric.clone()
    metric.update(run.global_module()(rows[0]).detach(), **target(rows))
    return metric.compute().double()


METRICS = {
    "auroc": MulticlassAUROC(3),
    "confusion": MulticlassConfusionMatrix(3),
    "by_class": MulticlassAccuracy(3, average=None),
    "accuracy": MulticlassAccuracy(3),
}


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"unseen": True}], ids=str)
def test_scores_are_those_of_the_rows_of_each_and_of_all(run: ft.Run, options: Any) -> None:
    data, named = clients(), lambda rows: {"target": rows[1]}
    scores = run.evaluate(data, METRICS, lambda rows: (rows[0], rows[1]), **options)
    assert list(scores) == list(METRICS)
    for name, metric in METRICS.items():
        torch.testing.assert_close(
            torch.as_tensor(scores[name].overall).double(), values(run, metric, data.rows, named)
        )
        for k, rows in enumerate(data):
            torch.testing.assert_close(scores[name].clients[k], values(run, metric, rows, named))
    assert scores["auroc"].overall != pytest.approx(scores["auroc"].mean(), rel=1e-3)
    assert scores["confusion"].overall.sum() == sum(SIZES)
    for call in (scores["confusion"].mean, scores["by_class"].worst):
        with pytest.raises(ValueError, match=r"Expected a metric of one number, but got \(3"):
            call()


def test_a_client_without_rows_has_none_and_nan_is_a_failure(run: ft.Run) -> None:
    scores = run.evaluate(clients((5, 0, 6, 7)), METRICS, lambda rows: (rows[0], rows[1]))
    assert scores["confusion"].clients.isnan().flatten(1).any(1).tolist() == [False, True, False, False]
    assert scores["auroc"].clients.isnan().tolist() == [False, True, False, False]
    broken = lambda rows: (torch.where(rows[0] > 1.8, torch.nan, rows[0]), rows[1])
    failed = run.evaluate(clients(), {"confusion": METRICS["confusion"]}, broken)["confusion"].failed
    assert failed is not None
    assert failed.tolist() == [bool((x > 1.8).any()) for x, _, _ in clients()] != [True] * 4


def test_arguments_by_name_reach_retrieval_metrics(run: ft.Run) -> None:
    data = clients()
    target = lambda rows: {"target": rows[1] == 0, "indexes": rows[2]}
    score = run.evaluate(data, {"mrr": First(RetrievalMRR())}, lambda rows: (rows[0], target(rows)))["mrr"]
    for given, rows in [(score.overall, data.rows), *zip(score.clients.tolist(), data)]:
        alone = RetrievalMRR()
        alone.update(run.global_module()(rows[0])[:, 0].detach(), **target(rows))
        assert given == pytest.approx(float(alone.compute()))


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
def test_collections_are_taken_apart(run: ft.Run) -> None:
    collection = MetricCollection([MulticlassF1Score(3), MulticlassAUROC(3)], prefix="m/")
    rows = lambda rows: (rows[0], rows[1])
    assert list(run.evaluate(clients(), collection, rows)) == ["m/MulticlassF1Score", "m/MulticlassAUROC"]
    assert set(named_metrics({"all": collection})) == {"all_m/MulticlassF1Score", "all_m/MulticlassAUROC"}
    tensors = run.evaluate(clients(), {"all": collection}, rows)
    alone = run.evaluate(clients(), {"f1": MulticlassF1Score(3)}, rows)
    assert tensors["all_m/MulticlassF1Score"].overall == alone["f1"].overall


def test_wrapped_metrics_in_process_and_refusal_over_sites(run: ft.Run) -> None:
    rows = lambda rows: (rows[0], rows[1])
    score, again = (
        run.evaluate(clients(), {"bootstrap": BootStrapper(MulticlassAccuracy(3), num_bootstraps=4)}, rows)["bootstrap"]
        for _ in range(2)
    )
    assert {"mean", "std"} == set(score.overall) == set(score.clients[0])
    assert torch.equal(score.clients[2]["mean"], again.clients[2]["mean"])  # draws are those of the evaluation
    run.clients.in_process = False
    try:
        with pytest.raises(TypeError, match=r"states that are sums, but got BinaryAveragePrecision.*thresholds="):
            run.evaluate(clients(), {"ap": BinaryAveragePrecision()}, rows)
    finally:
        run.clients.in_process = True
