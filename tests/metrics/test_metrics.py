"""Metrics by sums: global = pooled rows, per client = looped, padding and empty clients change nothing."""

from __future__ import annotations

import math

import pytest
import sklearn.metrics
import torch
import torch.nn.functional as F
import torchmetrics.classification as classification
import torchmetrics.regression as regression
from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection

from fedtorch import metrics, tree
from fedtorch.metrics.stacked import StackedMetric, as_stacked, from_torchmetrics

ROWS = [7, 0, 1, 12, 4]  # ragged, one client without rows
CLASSES = 4


def stacked(kind: str, garbage: float = math.nan, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions, targets and the mask of ragged clients, with garbage in the padding."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(ROWS), max(ROWS))
    mask = torch.arange(max(ROWS)) < torch.tensor(ROWS)[:, None]
    if kind == "classes":
        prediction = 3 * torch.randn(*shape, CLASSES, generator=generator)
        target = torch.randint(CLASSES, shape, generator=generator).masked_fill(~mask, -999)
    elif kind == "binary":
        prediction = 3 * torch.randn(*shape, generator=generator)
        target = torch.randint(2, shape, generator=generator).masked_fill(~mask, -999)
    else:
        prediction = torch.randn(*shape, generator=generator)
        target = torch.randn(*shape, generator=generator).masked_fill(~mask, garbage)
    outside = ~mask.reshape(shape + (1,) * (prediction.ndim - 2))
    return prediction.masked_fill(outside, garbage), target, mask


def pooled(metric: StackedMetric, *data: Tensor) -> Tensor:
    return metric.compute(tree.map(lambda leaf: leaf.sum(0), metric.update(*data)))


def oracle(metric: Metric, prediction: Tensor, target: Tensor) -> float:
    """A metric on plain rows; what it warns of (a class without examples) is not at stake here."""
    metric.reset()
    metric.update(prediction, target)
    return float(metric.compute())


def sums_of_torchmetrics() -> list[tuple[str, Metric]]:
    return [
        ("classes", classification.MulticlassAccuracy(CLASSES, average="micro")),
        ("classes", classification.MulticlassAccuracy(CLASSES, average="macro")),
        ("classes", classification.MulticlassF1Score(CLASSES, average="macro")),
        ("classes", classification.MulticlassCohenKappa(CLASSES)),
        ("classes", classification.MulticlassAUROC(CLASSES, thresholds=50)),
        ("binary", classification.BinaryAccuracy()),
        ("binary", classification.BinaryAUROC(thresholds=50)),
        ("real", regression.MeanSquaredError()),
        ("real", regression.MeanSquaredError(squared=False)),
        ("real", regression.MeanAbsoluteError()),
        ("real", regression.ExplainedVariance()),
    ]


BUILT_IN = [
    ("classes", metrics.accuracy(), classification.MulticlassAccuracy(CLASSES, average="micro")),
    ("classes", metrics.calibration_error(), classification.MulticlassCalibrationError(CLASSES, norm="l1")),
    (
        "classes",
        metrics.calibration_error(bins=4),
        classification.MulticlassCalibrationError(CLASSES, n_bins=4),
    ),
    ("binary", metrics.accuracy(), classification.BinaryAccuracy()),
    ("real", metrics.mean_squared_error(), regression.MeanSquaredError()),
]
ADAPTED = [(kind, from_torchmetrics(metric), metric) for kind, metric in sums_of_torchmetrics()]
IDS = [f"{i}-{type(metric).__name__}" for i, (_, _, metric) in enumerate(BUILT_IN + ADAPTED)]


@pytest.mark.parametrize(("kind", "metric", "reference"), BUILT_IN + ADAPTED, ids=IDS)
@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
def test_global_is_the_metric_of_pooled_rows_and_clients_are_looped(kind, metric, reference):
    prediction, target, mask = stacked(kind)
    # the oracles sum in float32: 24 rows, relative rounding 1e-6
    expected = oracle(reference, prediction[mask], target[mask])
    assert pooled(metric, prediction, target, mask).item() == pytest.approx(expected, rel=2e-6, abs=2e-6)
    each = metric.compute(metric.update(prediction, target, mask))
    assert each.shape == (len(ROWS),)
    assert each.dtype == torch.float64
    for value, p, t, m in zip(each.tolist(), prediction, target, mask):
        expected = oracle(reference, p[m], t[m]) if m.any() else math.nan
        assert value == pytest.approx(expected, rel=2e-6, abs=2e-6, nan_ok=True)


@pytest.mark.parametrize(("kind", "metric", "reference"), BUILT_IN + ADAPTED, ids=IDS)
def test_padding_and_blocks_do_not_matter(kind, metric, reference):
    first, second = stacked(kind, garbage=math.nan), stacked(kind, garbage=-1e30)
    assert first[0].isnan().any()
    sums = metric.update(*first)
    torch.testing.assert_close(tree.flatten(metric.update(*second)), tree.flatten(sums), rtol=0, atol=0)
    one_by_one = tree.concatenate([metric.update(*(x[k : k + 1] for x in first)) for k in range(len(ROWS))])
    torch.testing.assert_close(tree.flatten(one_by_one), tree.flatten(sums))
    nobody = metric.update(*(x[:0] for x in first))
    assert metric.compute(nobody).shape == (0,)
    none_and_all = tree.flatten(tree.concatenate([nobody, sums]))
    torch.testing.assert_close(none_and_all, tree.flatten(sums), rtol=0, atol=0)
    assert pooled(metric, *(x[:0] for x in first)).isnan()


@pytest.mark.parametrize(("kind", "metric", "reference"), BUILT_IN + ADAPTED, ids=IDS)
def test_any_batch_shape(kind, metric, reference):
    sums = metric.update(*stacked(kind))
    grid = tree.map(lambda leaf: leaf[:4].unflatten(0, (2, 2)), sums)
    values = metric.compute(grid)
    assert values.shape == (2, 2)
    torch.testing.assert_close(values.flatten(), metric.compute(sums)[:4], equal_nan=True)


def test_scikit_learn_agrees():
    prediction, target, mask = stacked("classes")
    rows, classes = prediction[mask].double(), target[mask]
    accuracy = sklearn.metrics.accuracy_score(classes, rows.argmax(-1))
    assert pooled(metrics.accuracy(), prediction, target, mask).item() == pytest.approx(accuracy, abs=1e-15)
    loss = sklearn.metrics.log_loss(classes, rows.softmax(-1).numpy(), labels=range(CLASSES))
    doubled = pooled(metrics.cross_entropy(), prediction.double(), target, mask)
    assert doubled.item() == pytest.approx(loss, rel=1e-12)
    f1 = from_torchmetrics(classification.MulticlassF1Score(CLASSES, average="macro"))
    expected = sklearn.metrics.f1_score(classes, rows.argmax(-1), average="macro")
    assert pooled(f1, prediction, target, mask).item() == pytest.approx(expected, rel=1e-6)
    prediction, target, mask = stacked("real")
    error = sklearn.metrics.mean_squared_error(target[mask], prediction[mask])
    assert pooled(metrics.mean_squared_error(), prediction, target, mask).item() == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("metric", [metrics.accuracy(), metrics.cross_entropy(), metrics.calibration_error()])
def test_a_binary_logit_is_two_classes(metric):
    logit, target, mask = stacked("binary")
    pair = torch.stack([torch.zeros_like(logit), logit], -1)
    expected = tree.flatten(metric.update(pair, target, mask))
    for form in (logit, logit.unsqueeze(-1)):
        torch.testing.assert_close(tree.flatten(metric.update(form, target, mask)), expected, rtol=0, atol=0)


def test_binary_cross_entropy_is_that_of_torch():
    logit, target, mask = stacked("binary")
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logit[mask], target[mask].float())
    torch.testing.assert_close(
        pooled(metrics.cross_entropy(), logit, target, mask), expected.double(), rtol=1e-6, atol=0
    )


def test_saturated_confidences_are_calibrated_as_in_torchmetrics():
    prediction, target, mask = stacked("classes")
    prediction = 50 * prediction  # float32 softmax reaches exactly one
    reference = classification.MulticlassCalibrationError(CLASSES, norm="l1")
    expected = oracle(reference, prediction[mask], target[mask])
    value = pooled(metrics.calibration_error(), prediction, target, mask)
    assert value.item() == pytest.approx(expected, rel=2e-6)


def test_several_outputs_are_averaged_within_an_example():
    generator = torch.Generator().manual_seed(1)
    prediction, target = (torch.randn(3, 5, 2, 2, generator=generator) for _ in range(2))
    mask = torch.ones(3, 5, dtype=torch.bool)
    value = pooled(metrics.mean_squared_error(), prediction, target, mask)
    torch.testing.assert_close(value, (prediction.double() - target).square().mean())
    column = pooled(metrics.mean_squared_error(), prediction[..., :1, 0], target[..., 0, 0], mask)
    torch.testing.assert_close(column, (prediction - target)[..., 0, 0].double().square().mean(), rtol=1e-6, atol=0)


def test_sums_carry_no_gradient_and_are_float64():
    prediction, target, mask = stacked("real", garbage=0.0)
    for leaf in tree.leaves(metrics.mean_squared_error().update(prediction.requires_grad_(), target, mask)):
        assert not leaf.requires_grad
        assert leaf.dtype == torch.float64


def test_the_metric_itself_is_left_alone():
    metric = regression.MeanSquaredError()
    metric.update(torch.tensor([1.0]), torch.tensor([3.0]))
    adapted = from_torchmetrics(metric)
    prediction, target, mask = stacked("real")
    sums = adapted.update(prediction, target, mask)
    before = tree.map(torch.clone, sums)
    values = adapted.compute(sums)
    torch.testing.assert_close(tree.flatten(sums), tree.flatten(before), rtol=0, atol=0)
    torch.testing.assert_close(adapted.compute(sums), values, rtol=0, atol=0, equal_nan=True)
    assert metric.compute() == 4.0


def test_too_few_rows_give_nan():
    r2 = from_torchmetrics(regression.R2Score())
    prediction, target, mask = stacked("real")
    each = r2.compute(r2.update(prediction, target, mask))
    assert each.isnan().tolist() == [rows < 2 for rows in ROWS]
    expected = sklearn.metrics.r2_score(target[mask], prediction[mask])
    assert pooled(r2, prediction, target, mask).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            classification.MulticlassCalibrationError(3),
            r"got MulticlassCalibrationError\.confidences, a list.*calib",
        ),
        (
            classification.MulticlassAUROC(3),
            r"got MulticlassAUROC\.preds, a list of examples; give thresholds=",
        ),
        (regression.PearsonCorrCoef(), r"got PearsonCorrCoef\.mean_x, reduced by None"),
        (regression.CosineSimilarity(), r"got CosineSimilarity\.preds, a list"),
        (classification.MulticlassConfusionMatrix(3), r"MulticlassConfusionMatrix gives shape \(3, 3\)"),
        (
            classification.MulticlassAccuracy(3, average=None),
            r"MulticlassAccuracy gives shape \(3,\); choose an av",
        ),
        (classification.BinaryAccuracy() * 100, r"states of its own, but got CompositionalMetric"),
    ],
)
def test_metrics_without_sums_are_refused_by_name(metric, message):
    with pytest.raises(TypeError, match=message):
        from_torchmetrics(metric)


def test_states_reduced_by_a_mean_are_refused_by_name():
    class RunningMean(MeanMetric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("level", torch.tensor(0.0), dist_reduce_fx="mean")

    with pytest.raises(TypeError, match=r"got RunningMean\.level, reduced by mean"):
        from_torchmetrics(RunningMean())


def test_states_that_grow_are_refused():
    class Growing(regression.MeanSquaredError):
        def update(self, preds: Tensor, target: Tensor) -> None:
            self.sum_squared_error = (preds - target).square()

    metric = from_torchmetrics(Growing())
    with pytest.raises(TypeError, match=r"sum_squared_error to keep its shape \(1,\), but got \(7,\)"):
        metric.update(*stacked("real"))


def test_as_stacked():
    accuracy = metrics.accuracy()
    assert as_stacked(accuracy) is accuracy
    prediction, target, mask = stacked("real")
    absolute = (prediction - target)[mask].abs().double().mean()
    for metric in (
        regression.MeanAbsoluteError(),
        lambda p, t: (p - t).abs(),
        torch.nn.L1Loss(reduction="none"),
    ):
        value = pooled(as_stacked(metric), prediction, target, mask)
        torch.testing.assert_close(value, absolute, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("accuracy", r"Expected a StackedMetric, .*, but got str"),
        (regression.MeanSquaredError, "but got the class MeanSquaredError; call it first"),
        (MetricCollection([regression.MeanSquaredError()]), "but got a MetricCollection"),
    ],
)
def test_as_stacked_refuses(metric, message):
    with pytest.raises(TypeError, match=message):
        as_stacked(metric)


def test_wrong_shapes_are_refused():
    prediction, target, mask = stacked("real")
    with pytest.raises(TypeError, match=r"Expected a value per row, .*, but got one number; leave the mean"):
        as_stacked(lambda output, y: (output - y).square().mean()).update(prediction, target, mask)
    with pytest.raises(ValueError, match=r"one number or a value per row, shape \(7,\), but got shape \(7, 2\)"):
        as_stacked(lambda output, y: torch.stack([output, y], 1)).update(prediction, target, mask)
    with pytest.raises(ValueError, match=r"but got \(5, 12\) and \(5, 11\)"):
        metrics.accuracy().update(prediction, target, mask[:, 1:])
    with pytest.raises(ValueError, match=r"shape of the target, \(5, 12\), but got \(5, 12, 3\)"):
        metrics.mean_squared_error().update(prediction.unsqueeze(-1).expand(-1, -1, 3), target, mask)
    with pytest.raises(ValueError, match=r"Expected logits \(K, N, C\)"):
        metrics.accuracy().update(prediction[..., None, None], target, mask)
    with pytest.raises(ValueError, match="at least one bin, but got 0"):
        metrics.calibration_error(0)


def test_evaluation_in_inference_mode_leaves_no_trace():
    metric = from_torchmetrics(classification.BinaryAccuracy())
    data = stacked("binary")
    with torch.inference_mode():
        inside = metric.compute(metric.update(*data))
    torch.testing.assert_close(metric.compute(metric.update(*data)), inside.clone(), equal_nan=True)


@pytest.mark.parametrize(
    ("loss", "prediction", "target"),
    [
        (F.mse_loss, (2, 5), torch.randn(2, 5)),
        (F.mse_loss, (2, 5, 1), torch.randn(2, 5)),
        (F.l1_loss, (2, 5, 3), torch.randn(2, 5, 3)),
        (F.cross_entropy, (2, 5, 4), torch.randint(0, 4, (2, 5))),
        (F.binary_cross_entropy_with_logits, (2, 5), torch.randint(0, 2, (2, 5)).float()),
        (torch.nn.HuberLoss(), (2, 5), torch.randn(2, 5)),
        (torch.nn.CrossEntropyLoss(), (2, 5, 4, 3), torch.randint(0, 4, (2, 5, 3))),
    ],
)
def test_losses_of_torch_are_metrics(loss, prediction, target):
    prediction, rows = torch.randn(prediction), (5, 3)
    mask = torch.arange(5) < torch.tensor(rows)[:, None]
    metric = as_stacked(loss)
    found = metric.compute(metric.update(prediction, target, mask))
    for k, n in enumerate(rows):
        output = prediction[k, :n].squeeze(-1) if prediction.shape[2:] == (1,) else prediction[k, :n]
        assert float(found[k]) == pytest.approx(float(loss(output, target[k, :n])), rel=1e-5)  # float32


def test_functions_without_a_signature_are_metrics():
    metric = as_stacked(torch.eq)
    found = metric.update(torch.ones(1, 2), torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert metric.compute(found).tolist() == [0.5]


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_of_other_shapes_is_refused():
    metric = as_stacked(F.mse_loss)
    with pytest.raises(ValueError, match=r"Expected a loss of every example, but got .*predictions \(2, 5, 3\)"):
        metric.update(torch.zeros(2, 5, 3), torch.zeros(2, 5, 1), torch.ones(2, 5, dtype=torch.bool))
