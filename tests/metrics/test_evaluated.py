"""Metrics of any kind in `run.evaluate`: of each client's rows, and of all, as their own library computes them."""

from __future__ import annotations

import math
import re
import warnings
from functools import partial
from typing import Any

import pytest
import sklearn.metrics
import torch
import torch.nn.functional as F
import torchmetrics
import torchmetrics.classification as classification
import torchmetrics.regression as regression
from torch import Tensor, nn
from torchmetrics.wrappers import BinaryTargetTransformer, ClasswiseWrapper, MultioutputWrapper

import fedtorch as ft
from fedtorch.metrics.stacked import as_stacked

pytestmark = pytest.mark.filterwarnings("ignore:Metric `.*` will save all targets")
SIZES = (7, 12, 1, 9, 16)
OUTPUTS = 3
double = torch.float64


class Reads(nn.Module):
    """Predicts its inputs, or what it reads of them."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.scale, self.read = nn.Parameter(torch.ones((), dtype=double)), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.scale * x)


def run_of(data: ft.data.FederatedData, read: Any = lambda x: x) -> ft.Run:
    local = ft.gradient_descent(
        Reads(read), epochs=1, loss=lambda output, y: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    return ft.Run(ft.fedavg(local), ft.InProcess(data))


def rows(kind: str, sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    clients = []
    for k, n in enumerate(sizes):
        x = torch.randn(n, OUTPUTS, generator=generator, dtype=double)
        if kind == "classes":
            y = torch.randint(OUTPUTS, (n,), generator=generator)
        elif kind == "binary":
            y = torch.randint(2, (n,), generator=generator) * (k != 1)  # the second client has one class
        elif kind == "tokens":
            x = torch.randn(n, OUTPUTS, 4, generator=generator, dtype=double)
            y = torch.randint(OUTPUTS, (n, 4), generator=generator)
        elif kind == "labels":
            y = torch.randint(2, (n, OUTPUTS), generator=generator)
        else:
            y = torch.randn(n, OUTPUTS, generator=generator, dtype=double)
        clients.append((x, y))
    return clients


def evaluated(clients: list[tuple[Tensor, Tensor]], metric: Any, **options: Any) -> ft.Score:
    data = ft.data.from_tensors(clients)
    return run_of(data).evaluate(data, {"m": metric}, **options)["m"]


def same(found: Any, wanted: Any) -> None:
    """Compare trees of numbers; torchmetrics keeps some states in float32, with rounding of 1e-6."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name in wanted:
            same(found[name], wanted[name])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted):
            same(a, b)
    else:
        a, b = torch.as_tensor(found, dtype=double), torch.as_tensor(wanted, dtype=double)
        assert a.numel() == b.numel()
        torch.testing.assert_close(a.reshape(b.shape), b, rtol=2e-6, atol=2e-6, equal_nan=True)


def pooled(clients: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients])


W = torch.tensor([1.0, 9.0, 0.5], dtype=double)
LOSSES = {
    "cross_entropy": ("classes", F.cross_entropy),
    "weighted": ("classes", nn.CrossEntropyLoss(weight=W)),
    "weighted smoothed": ("classes", nn.CrossEntropyLoss(weight=W, label_smoothing=0.2)),
    "weighted partial": ("classes", partial(F.cross_entropy, weight=W)),
    "weighted ignoring": ("classes", partial(F.cross_entropy, weight=W, ignore_index=1, label_smoothing=0.1)),
    "sum": ("classes", nn.CrossEntropyLoss(reduction="sum")),
    "weighted sum": ("classes", partial(F.cross_entropy, weight=W, reduction="sum")),
    "nll": ("classes", nn.NLLLoss(weight=W)),
    "multi_margin": ("classes", nn.MultiMarginLoss(weight=W)),
    "multilabel_soft_margin": ("labels", partial(F.multilabel_soft_margin_loss, weight=W)),
    "mse": ("real", F.mse_loss),
    "mse sum": ("real", nn.MSELoss(reduction="sum")),
    "l1": ("real", nn.L1Loss()),
    "huber": ("real", partial(F.huber_loss, delta=0.3)),
    "smooth_l1": ("real", partial(F.smooth_l1_loss, beta=0.3, reduction="sum")),
    "soft_margin": ("real", nn.SoftMarginLoss()),
    "poisson": ("real", nn.PoissonNLLLoss()),
    "kl batchmean": ("real", nn.KLDivLoss(reduction="batchmean", log_target=True)),
    "tokens": ("tokens", nn.CrossEntropyLoss(weight=W, ignore_index=2)),
    "kl mean": ("real", partial(F.kl_div, log_target=True)),
    "kl sum": ("real", partial(F.kl_div, log_target=True, reduction="sum")),
    "probabilities": ("real", lambda p, t: F.cross_entropy(p, t.softmax(-1), weight=W)),
    "own mean": ("classes", lambda p, t: F.cross_entropy(p, t, weight=W)),
    "own root": ("real", lambda p, t: F.mse_loss(p, t).sqrt()),
    "class of its own": ("real", type("Own", (nn.MSELoss,), {"forward": lambda self, p, t: (p - t).abs().amax()})()),
    "reduction of its own": ("real", lambda p, t, reduction="mean": (p - t).square().mean().sqrt()),
}
OPTIONS: list[dict[str, Any]] = [{}, {"batch_size": 4}]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_keeps_its_reduction_and_its_weights(name: str, options: Any) -> None:
    kind, loss = LOSSES[name]
    clients = [(x, y.to(double)) if kind == "labels" else (x, y) for x, y in rows(kind)]
    plain = lambda x, y: float(loss(x, y))
    score = evaluated(clients, loss, **options)
    assert score.overall == pytest.approx(plain(*pooled(clients)), rel=1e-12, nan_ok=True)
    assert score.clients.tolist() == pytest.approx([plain(x, y) for x, y in clients], rel=1e-12, nan_ok=True)


def test_weights_of_outputs_are_those_of_torch_and_of_rows_are_refused() -> None:
    clients = [(x, y.to(double)) for x, y in rows("labels")]
    loss = nn.BCEWithLogitsLoss(weight=W, pos_weight=2 * W)
    assert evaluated(clients, loss).overall == pytest.approx(float(loss(*pooled(clients))), rel=1e-12)
    one = as_stacked(nn.BCEWithLogitsLoss(weight=torch.ones(6)))
    with pytest.raises(ValueError, match=r"Expected weights of a row's outputs, but got shape \(6,\)"):
        one.update(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3).bool())


def test_a_reduction_that_a_loss_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected reduction='mean', 'sum' or 'none' of a loss, but got 'batchmean'"):
        evaluated(rows("real"), partial(F.mse_loss, reduction="batchmean"))


PER_ROW = {
    "column": ("real", lambda p, t: (p[:, 0] - t[:, 0]) ** 2),
    "centred": ("real", lambda p, t: (t[:, 0] - t[:, 0].mean()) ** 2),
    "ranks": ("real", lambda p, t: p[:, 0].argsort() == t[:, 0].argsort()),
    "above the mean": ("real", lambda p, t: p[:, 0] > p[:, 0].mean()),
    "squeezed": ("real", lambda p, t: p[:, :1].squeeze(1)),
    "one column": ("real", lambda p, t: p[:, :1]),
    "flattened": ("real", lambda p, t: p[:, 0].flatten() - t[:, 0].flatten()),
    "ellipsis": ("real", lambda p, t: p[..., 0]),
    "numpy": ("real", lambda p, t: p[:, 0].numpy()),
    "without reduction": ("classes", lambda p, t: F.cross_entropy(p, t, reduction="none")),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", PER_ROW)
def test_a_value_per_row_is_averaged_over_a_clients_rows_and_over_all(name: str, options: Any) -> None:
    kind, function = PER_ROW[name]
    clients = rows(kind)
    values = [torch.as_tensor(function(x, y)).double().flatten() for x, y in clients]
    for given in (function, ft.metrics.mean_of(function, True)):
        score = evaluated(clients, given, **options)
        assert score.overall == pytest.approx(float(torch.cat(values).mean()), rel=1e-12, abs=1e-15)
        assert score.clients.tolist() == pytest.approx([float(each.mean()) for each in values], rel=1e-12, abs=1e-15)


NUMBERS = {
    "root": ("real", lambda p, t: (p - t).square().mean().sqrt()),
    "python": ("classes", lambda p, t: sklearn.metrics.f1_score(t, p.argmax(-1), average="macro")),
    "numpy": ("real", lambda p, t: sklearn.metrics.median_absolute_error(t, p)),
    "largest": ("real", lambda p, t: (p - t).abs().max()),
    "count": ("classes", lambda p, t: (p.argmax(-1) == t).sum()),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_one_number_is_the_functions_of_each_clients_rows_and_of_all(name: str, options: Any) -> None:
    kind, function = NUMBERS[name]
    clients = rows(kind)
    score = evaluated(clients, function, **options)
    assert score.overall == pytest.approx(float(function(*pooled(clients))), rel=1e-12)
    assert score.clients.tolist() == pytest.approx([float(function(x, y)) for x, y in clients], rel=1e-12)


def test_a_function_that_gives_neither_is_refused_by_name() -> None:
    for function, got in (
        (
            lambda p, t: p,
            r"ValueError.*Metric 'm': Expected one number or a value per row, shape \(1,\), but got shape",
        ),
        (lambda p, t: "no", "TypeError.*Metric 'm': Expected one number or a value per row, but got str"),
        (lambda p, t: p[:, 0] if len(p) > 7 else p.mean(), "ValueError.*metric 'm' to give a value per row at every"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            evaluated(rows("real"), function)
        assert re.search(got, f"{type(caught.value).__name__}: {caught.value}")


def test_a_function_may_give_a_tree() -> None:
    table = lambda p, t: {"by output": (p - t).square().mean(0), "bias": (p - t).mean()}
    clients = rows("real")
    score = evaluated(clients, table)
    same(score.overall, table(*pooled(clients)))
    same(score.clients, [table(x, y) for x, y in clients])
    with pytest.raises(ValueError, match="Expected a metric of one number, but got values of each client in a list"):
        score.mean()


TORCHMETRICS: dict[str, tuple[str, Any]]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of how much memory examples take
    TORCHMETRICS = {
        "accuracy": ("classes", classification.MulticlassAccuracy(3)),
        "by class": ("classes", classification.MulticlassAccuracy(3, average=None)),
        "f1, zero_division": ("classes", classification.MulticlassF1Score(3, zero_division=1)),
        "confusion": ("classes", classification.MulticlassConfusionMatrix(3)),
        "kappa": ("classes", classification.MulticlassCohenKappa(3)),
        "matthews": ("classes", classification.MulticlassMatthewsCorrCoef(3)),
        "calibration": ("classes", classification.MulticlassCalibrationError(3)),
        "average precision": ("classes", classification.MulticlassAveragePrecision(3)),
        "classwise": ("classes", ClasswiseWrapper(classification.MulticlassAccuracy(3, average=None))),
        "curve": ("classes", classification.MulticlassPrecisionRecallCurve(3)),
        "curve at thresholds": ("classes", classification.MulticlassPrecisionRecallCurve(3, thresholds=5)),
        "recall at precision": ("classes", classification.MulticlassRecallAtFixedPrecision(3, 0.5)),
        "labels": ("labels", classification.MultilabelF1Score(3)),
        "samplewise": ("tokens", classification.MulticlassF1Score(3, multidim_average="samplewise")),
        "samplewise exact match": ("tokens", classification.MulticlassExactMatch(3, multidim_average="samplewise")),
        "samplewise table": (
            "tokens",
            classification.MulticlassStatScores(3, average=None, multidim_average="samplewise"),
        ),
        "cosine": ("real", regression.CosineSimilarity(reduction="none")),
        "mean cosine": ("real", regression.CosineSimilarity(reduction="mean")),
        "divergence": ("probabilities", regression.KLDivergence(reduction="none")),
        "mse": ("real", regression.MeanSquaredError()),
        "mse of outputs": ("real", regression.MeanSquaredError(num_outputs=3)),
        "pearson": ("real", regression.PearsonCorrCoef(num_outputs=3)),
        "spearman": ("real", regression.SpearmanCorrCoef(num_outputs=3)),
        "r2": ("real", regression.R2Score()),
        "r2 of outputs": ("real", regression.R2Score(multioutput="raw_values")),
        "explained": ("real", regression.ExplainedVariance(multioutput="raw_values")),
        "wrapped r2": ("real", MultioutputWrapper(regression.R2Score(), 3)),
        "nrmse range": ("real", regression.NormalizedRootMeanSquaredError("range", num_outputs=3)),
        "nrmse std": ("real", regression.NormalizedRootMeanSquaredError("std", num_outputs=3)),
        "nrmse mean": ("real", regression.NormalizedRootMeanSquaredError("mean", num_outputs=3)),
        "nrmse l2": ("real", regression.NormalizedRootMeanSquaredError("l2", num_outputs=3)),
        "composed": ("classes", classification.MulticlassAccuracy(3) * 100),
        "collected": ("classes", torchmetrics.wrappers.MinMaxMetric(classification.MulticlassAccuracy(3))),
    }


def of_one_object(metric: Any, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """What one object gives that has seen these rows; NaN where it raises an error."""
    alone = metric.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for x, y in batches:
                alone.update(x, y)
            return alone.compute()
        except (ValueError, IndexError, RuntimeError):
            return math.nan


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", TORCHMETRICS)
def test_torchmetrics_of_any_value_are_those_of_one_object(name: str, options: Any) -> None:
    kind, metric = TORCHMETRICS[name]
    clients = rows(kind)
    if kind == "probabilities":
        clients = [(x.softmax(-1), y.softmax(-1)) for x, y in clients]
    size = options.get("batch_size", 100)
    score = evaluated(clients, metric, **options)
    batches = [list(zip(x.split(size), y.split(size))) for x, y in clients]
    same(score.overall, of_one_object(metric, [part for parts in batches for part in parts]))
    for found, parts in zip(score.clients, batches):
        wanted = of_one_object(metric, parts)
        if isinstance(wanted, float):
            assert bool(torch.as_tensor(found).isnan().all())
        else:
            same(found, wanted)


UNDEFINED: dict[str, Any] = {
    "auroc": classification.BinaryAUROC(),
    "auroc at thresholds": classification.BinaryAUROC(thresholds=20),
    "composed": classification.BinaryAUROC() * 100,
    "sensitivity": classification.BinarySensitivityAtSpecificity(0.5),
    "roc": classification.BinaryROC(),
    "roc at thresholds": classification.BinaryROC(thresholds=5),
    "eer": classification.BinaryEER(),
    "sklearn": lambda p, t: sklearn.metrics.roc_auc_score(t, p),
    "raising": lambda p, t: p[t == 1].amax() - p[t == 0].amax(),
    "within": BinaryTargetTransformer(classification.BinaryAUROC(), threshold=0),
}


def first(x: Tensor) -> Tensor:
    return x[:, 0].sigmoid()


@pytest.mark.filterwarnings("ignore:Only one class is present")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", UNDEFINED)
def test_undefined_scores_are_nan_and_counted(name: str, options: Any) -> None:
    metric, clients = UNDEFINED[name], rows("binary")
    data = ft.data.from_tensors(clients)
    score = run_of(data, first).evaluate(data, {"m": metric}, **options)["m"]
    one_class = [len(y.unique()) < 2 for _, y in clients]
    assert one_class == [False, True, True, False, False]
    assert score.undefined is not None
    assert score.undefined.tolist() == one_class
    assert score.count_undefined() == 2
    assert score.failed is not None
    assert not bool(score.failed.any())
    alone = lambda x, y: (
        metric(first(x), y) if name in ("sklearn", "raising") else of_one_object(metric, [(first(x), y)])
    )
    same(score.overall, alone(*pooled(clients)))
    known = [k for k in range(len(clients)) if not one_class[k]]
    for k in known:
        same(score.clients[k], alone(*clients[k]))
    if score.is_number:
        values = torch.tensor([float(alone(*clients[k])) for k in known], dtype=double)
        assert score.mean() == pytest.approx(float(values.mean()), rel=1e-6)
        assert score.worst(True) == pytest.approx(float(values.min()), rel=1e-6)


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
@pytest.mark.parametrize("thresholds", [None, 10])
def test_several_classes_are_undefined_where_there_is_one(task: Any, thresholds: Any) -> None:
    kind = "classes" if task == "multiclass" else "labels"
    clients = [(x.softmax(-1), y * (k != 0)) for k, (x, y) in enumerate(rows(kind))]
    metric = torchmetrics.AUROC(task, num_classes=3, num_labels=3, thresholds=thresholds)
    score = evaluated(clients, metric)
    assert score.undefined is not None
    assert score.undefined.tolist() == [True, False, True, False, False]
    same(score.overall, of_one_object(metric, [pooled(clients)]))
    for k in (1, 3, 4):
        same(score.clients[k], of_one_object(metric, [clients[k]]))


def test_zero_division_equals_torchmetrics() -> None:
    clients = [(x, torch.zeros_like(y)) for x, y in rows("classes")]
    for metric in (
        classification.MulticlassF1Score(3, zero_division=1),
        classification.MulticlassRecall(3, average=None),
    ):
        score = evaluated(clients, metric)
        for found, rows_of_client in zip(score.clients, clients):
            same(found, of_one_object(metric, [rows_of_client]))
        assert score.count_undefined() == 0


def test_rows_with_which_alone_a_metric_cannot_be_updated_count_with_those_of_others() -> None:
    clients = [(x, y * 0 if k in (0, 3) else y) for k, (x, y) in enumerate(rows("binary"))]
    for metric in (classification.BinaryHingeLoss(ignore_index=0), classification.BinaryAUROC(ignore_index=0)):
        data = ft.data.from_tensors(clients)
        x, y = pooled(clients)
        score = run_of(data, first).evaluate(data, {"m": metric})["m"]
        same(score.overall, of_one_object(metric, [(first(x), y)]))
        assert score.undefined is not None
        assert bool(score.undefined[[0, 3]].all())


def test_labels_out_of_range_at_one_client_do_not_end_the_evaluation_of_others() -> None:
    clients = [(x, y + 7 * (k == 1)) for k, (x, y) in enumerate(rows("classes"))]
    others = [each for k, each in enumerate(clients) if k != 1]
    for metric in (F.cross_entropy, lambda p, t: F.cross_entropy(p, t), ft.metrics.cross_entropy()):
        score = evaluated(clients, metric)
        assert score.undefined is not None
        assert score.undefined.tolist() == [False, True, False, False, False]
        assert [score.clients[k] for k in (0, 2, 3, 4)] == pytest.approx(
            [float(F.cross_entropy(x, y)) for x, y in others], rel=1e-12
        )
        assert math.isfinite(score.mean())


def test_a_metric_that_raises_at_every_client_ends_the_evaluation_by_name() -> None:
    def broken(prediction: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("out of order")

    with pytest.raises(
        ValueError, match=r"Expected metric 'm' to have a value .* RuntimeError for every client: out of"
    ):
        evaluated(rows("real"), broken)
    with pytest.raises(ValueError, match=r"[Mm]etric 'm'"):
        evaluated(rows("tokens"), regression.MeanSquaredError())


@pytest.mark.parametrize(
    "metric", [torchmetrics.aggregation.RunningMean(), torchmetrics.wrappers.Running(torchmetrics.SumMetric())]
)
def test_metrics_of_the_latest_updates_are_refused_by_name(metric: Any) -> None:
    with pytest.raises(
        TypeError, match=r"Expected a metric of all of a client's rows, but got Running.*give the metric"
    ):
        evaluated(rows("real"), metric)


def test_examples_that_a_metric_keeps_are_lists_in_the_order_of_clients() -> None:
    clients = rows("real")
    data = ft.data.from_tensors(clients)
    split = lambda rows: (rows[0], {})
    score = run_of(data, lambda x: x[:, 0]).evaluate(data, {"m": torchmetrics.CatMetric()}, split)["m"]
    assert isinstance(score.clients, list)
    same(score.clients, [x[:, 0] for x, _ in clients])
    same(score.overall, pooled(clients)[0][:, 0])


def test_clients_without_rows_are_neither_failed_nor_undefined() -> None:
    sizes, clients = (5, 0, 4), rows("classes", (5, 4))
    data = ft.data.FederatedData(pooled(clients), torch.tensor(sizes), allow_empty=True)
    metrics = {
        "loss": F.cross_entropy,
        "rows": lambda p, t: p.argmax(-1) == t,
        "number": lambda p, t: sklearn.metrics.accuracy_score(t, p.argmax(-1)),
        "tree": lambda p, t: {"a": (p.argmax(-1) == t).double().mean()},
        "auroc": classification.MulticlassAUROC(3),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = run_of(data.select([0, 2])).evaluate(data, metrics, unseen=True)
    for name, score in scores.items():
        assert not bool(score.failed[1])
        assert not bool(score.undefined[1])
        empty = score.clients[1]["a"] if name == "tree" else score.clients[1]
        assert bool(empty.isnan())


def test_over_other_processes_sums_give_the_same_and_numbers_are_refused_by_name() -> None:
    clients = rows("classes")
    data, weighted = ft.data.from_tensors(clients), partial(F.cross_entropy, weight=W)
    metrics = {"loss": weighted, "rows": lambda p, t: p.argmax(-1) == t, "sum": nn.CrossEntropyLoss(reduction="sum")}
    run = run_of(data)
    here = run.evaluate(data, metrics)
    run.clients.in_process = False
    there = run.evaluate(data, metrics)
    for name in metrics:
        assert there[name].overall == pytest.approx(here[name].overall, rel=1e-12)
        torch.testing.assert_close(there[name].clients, here[name].clients)
    with pytest.raises(TypeError, match=r"Metric 'root': Expected a value per row, .*, but got one number"):
        run.evaluate(data, {"root": lambda p, t: F.cross_entropy(p, t)})
    clients[1] = (clients[1][0], clients[1][1] + 7)
    some = run.evaluate(ft.data.from_tensors(clients), {"loss": weighted})["loss"]
    assert some.undefined is not None
    assert some.undefined.tolist() == [False, True, False, False, False]
    others = [each for k, each in enumerate(clients) if k != 1]
    assert some.overall == pytest.approx(float(weighted(*pooled(others))), rel=1e-12)


def test_a_tree_is_no_number_to_compare_settings_by() -> None:
    data = ft.data.from_tensors(rows("real"))
    build = lambda lr: run_of(data).algorithm
    metric = ft.metrics.mean_of(lambda prediction, target: {"a": prediction.mean()}, True)
    with pytest.raises(TypeError, match="Expected a metric that is one number to compare settings by, but got a dict"):
        ft.grid(build, {"lr": [0.1]}, ft.InProcess(data), validation=data, rounds=1, metric=metric)
