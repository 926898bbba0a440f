"""Metrics in awkward situations: functions, losses and torchmetrics, of clients' own rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from sklearn import metrics as sklearn
from torch import Tensor, nn
from torchmetrics import classification, regression

COUNTS = (5, 9, 3, 4)


@dataclass(frozen=True)
class MetricCase:
    """A metric on four clients' outputs, which are their inputs.

    Args:
        name: of the situation, with the report where there is one.
        make: what is given to `run.evaluate`.
        rows: (number of rows, number of the client) -> (outputs, targets).
        right: (outputs, targets) -> value, in plain torch or another library; None: the metric itself.
        pooled: whether the value over all clients is that of all rows together.
        undefined: numbers of the clients on whose rows the metric is not defined.
        refused: regular expression of the refusal that may come instead.
    """

    name: str
    make: Callable[[], Any]
    rows: Callable[[int, int], tuple[Any, Any]]
    right: Callable[[Any, Any], Any] | None = None
    pooled: bool = True
    undefined: tuple[int, ...] = ()
    refused: str = ""


def numbers(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1), torch.randn(n)


def columns(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1), torch.randn(n, 1)


def three(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randn(n, 3)


def flat(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n), torch.randn(n)


def classes(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Logits and labels; the third client lacks the last class."""
    return torch.randn(n, 3), torch.arange(n) % (2 if k == 2 else 3)


def one_class(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Probabilities and flags; the second client has no positives."""
    return torch.rand(n), torch.arange(n) % 2 if k != 1 else torch.zeros(n, dtype=torch.long)


def both_classes(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.rand(n), torch.arange(n) % 2


def some_ignored(n: int, k: int) -> tuple[Tensor, Tensor]:
    """As `classes`; the third client's labels are all ignored."""
    logits, labels = classes(n, k)
    return logits, torch.where(torch.arange(n) % 3 == 1, -100, labels) if k != 2 else torch.full((n,), -100)


def flags(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.rand(n, 3), torch.randint(2, (n, 3))


def probabilities(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3).log_softmax(1), torch.randn(n, 3).softmax(1)


def distributions(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3).softmax(1), torch.randn(n, 3).softmax(1)


def token_labels(n: int, k: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(3, (n, 4))
    return torch.randn(n, 3, 4), torch.where(torch.arange(4) < 1 + torch.arange(n)[:, None] % 4, labels, -100)


def samples(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.rand(n, 4), torch.randint(2, (n, 4))


def pictures(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.rand(n, 1, 12, 12), torch.rand(n, 1, 12, 12)


def signed(n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n), torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)


WEIGHT = torch.tensor([1.0, 9.0, 0.2], dtype=torch.float64)


def function(
    name: str, metric: Callable[[Any, Any], Any], rows: Any = numbers, pooled: bool = False, **more: Any
) -> MetricCase:
    """Return a case of a function, whose value of each row is averaged."""
    right = lambda p, t: torch.as_tensor(metric(p, t)).double().mean()
    return MetricCase(f"function: {name}", lambda: metric, rows, right, pooled, **more)


def loss(name: str, metric: Callable[[Any, Any], Any], rows: Any = classes, **more: Any) -> MetricCase:
    """Return a case of a loss of torch, whose value over all clients is that of all rows."""
    refused = r"reduction|loss|weight"
    return MetricCase(f"loss: {name}", lambda: metric, rows, metric, **{"refused": refused, **more})


def measured(name: str, make: Callable[[], torchmetrics.Metric], rows: Any, **more: Any) -> MetricCase:
    return MetricCase(f"torchmetrics: {name}", make, rows, **more)


def own_scores(p: Tensor, t: Tensor) -> Tensor:
    return torch.tensor(np.corrcoef(p[:, 0].numpy(), t.numpy())[0, 1])


CASES: list[MetricCase] = [
    function("first column", lambda p, t: (p[:, 0] - t).square(), pooled=True),
    function("last axis", lambda p, t: (p[..., 0] - t).abs(), pooled=True),
    function("squeezed", lambda p, t: (p.squeeze(1) - t).square(), pooled=True),
    function("flattened", lambda p, t: (p.flatten() - t).square(), pooled=True),
    function("against the targets' mean", lambda p, t: (t - t.mean()).square()),
    function("ranks", lambda p, t: (p[:, 0].argsort() == t.argsort()).double()),
    function("above the mean", lambda p, t: (p[:, 0] > p[:, 0].mean()).double()),
    function("one number", lambda p, t: (p[:, 0] - t).square().mean().sqrt()),
    function("a float", lambda p, t: float((p[:, 0] - t).abs().max())),
    function("a correlation by NumPy", own_scores),
    function("columns of three", lambda p, t: (p - t).square().mean(1), three, True),
    function("unexplained variance", lambda p, t: (p - t).square().sum() / (t - t.mean()).square().sum(), three),
    function("median", lambda p, t: (p - t).abs().median(), columns),
    function("weighted cross-entropy flower#1385", lambda p, t: F.cross_entropy(p, t, weight=WEIGHT), classes),
    function("hits", lambda p, t: (p.argmax(1) == t).double(), classes, True),
    function("hits of rows with labels", lambda p, t: (p.argmax(1) == t)[t >= 0].double().mean(), classes),
    function(
        "scikit-learn's F1",
        lambda p, t: sklearn.f1_score(t.numpy(), p.argmax(1).numpy(), average="macro", zero_division=0.0),
        classes,
    ),
    function("scikit-learn's kappa", lambda p, t: sklearn.cohen_kappa_score(t.numpy(), p.argmax(1).numpy()), classes),
    loss("squares", F.mse_loss, columns, refused=""),
    loss("squares, sum", nn.MSELoss(reduction="sum"), columns),
    loss("absolute", nn.L1Loss(), three, refused=""),
    loss("Huber", nn.HuberLoss(delta=0.3), three, refused=""),
    loss("smooth absolute", functools.partial(F.smooth_l1_loss, beta=0.3), three, refused=""),
    loss("cross-entropy", F.cross_entropy, refused=""),
    loss("cross-entropy, weights", nn.CrossEntropyLoss(WEIGHT)),
    loss("cross-entropy, weights, smoothed", nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)),
    loss("cross-entropy, weights, partial", functools.partial(F.cross_entropy, weight=WEIGHT)),
    loss("cross-entropy, sum", nn.CrossEntropyLoss(reduction="sum")),
    loss("cross-entropy, smoothed", nn.CrossEntropyLoss(label_smoothing=0.1), refused=""),
    loss("cross-entropy, ignored labels", nn.CrossEntropyLoss(), some_ignored, undefined=(2,)),
    loss("cross-entropy of tokens", nn.CrossEntropyLoss(), token_labels),
    loss(
        "logits, positive weights",
        nn.BCEWithLogitsLoss(pos_weight=WEIGHT),
        lambda n, k: (torch.randn(n, 3), torch.randint(2, (n, 3)).double()),
        refused="",
    ),
    loss(
        "logits, weights",
        nn.BCEWithLogitsLoss(weight=WEIGHT),
        lambda n, k: (torch.randn(n, 3), torch.randint(2, (n, 3)).double()),
        refused="",
    ),
    loss("multi-margin, weights", nn.MultiMarginLoss(weight=WEIGHT), refused=""),
    loss("Poisson", nn.PoissonNLLLoss(), lambda n, k: (torch.randn(n), torch.randint(5, (n,)).double()), refused=""),
    loss("soft margin", nn.SoftMarginLoss(), signed, refused=""),
    loss("KL, mean over rows", nn.KLDivLoss(reduction="batchmean"), probabilities),
    measured("accuracy", lambda: classification.MulticlassAccuracy(3), classes),
    measured(
        "accuracy of each class torchmetrics#483", lambda: classification.MulticlassAccuracy(3, average="none"), classes
    ),
    measured(
        "accuracy, micro, ignored labels",
        lambda: classification.MulticlassAccuracy(3, average="micro", ignore_index=-100),
        some_ignored,
    ),
    measured(
        "F1, macro, a class absent torchmetrics#295",
        lambda: classification.MulticlassF1Score(3, average="macro"),
        classes,
    ),
    measured(
        "F1, macro, more classes than there are torchmetrics#1664",
        lambda: classification.MulticlassF1Score(5, average="macro"),
        lambda n, k: (torch.randn(n, 5), torch.arange(n) % 3),
    ),
    measured(
        "F1, ignored class torchmetrics#486", lambda: classification.MulticlassF1Score(3, ignore_index=2), classes
    ),
    measured("F1 of batches torchmetrics#845", lambda: classification.BinaryF1Score(), one_class),
    measured(
        "precision, zero division torchmetrics#2535", lambda: classification.BinaryPrecision(zero_division=1), one_class
    ),
    measured("specificity", lambda: classification.BinarySpecificity(), one_class),
    measured("AUROC, a client of one class", lambda: classification.BinaryAUROC(), one_class, undefined=(1,)),
    measured(
        "AUROC by thresholds, a client of one class",
        lambda: classification.BinaryAUROC(thresholds=7),
        one_class,
        undefined=(1,),
    ),
    measured(
        "AUROC, macro",
        lambda: classification.MulticlassAUROC(3),
        lambda n, k: (torch.randn(n, 3).softmax(1), torch.arange(n) % 3),
    ),
    measured(
        "AUROC, all rows ignored",
        lambda: classification.BinaryAUROC(ignore_index=0),
        lambda n, k: (torch.rand(n), torch.arange(n) % 2 if k != 1 else torch.zeros(n).long()),
        undefined=(0, 1, 2, 3),
        pooled=False,
    ),
    measured("average precision torchmetrics#56", lambda: classification.BinaryAveragePrecision(), one_class),
    measured("confusion matrix", lambda: classification.MulticlassConfusionMatrix(3), classes),
    measured(
        "confusion matrix, normalised", lambda: classification.MulticlassConfusionMatrix(3, normalize="true"), classes
    ),
    measured("kappa", lambda: classification.MulticlassCohenKappa(3), classes),
    measured("Matthews' correlation", lambda: classification.MulticlassMatthewsCorrCoef(3), classes),
    measured("Jaccard's index", lambda: classification.MulticlassJaccardIndex(3), classes),
    measured("calibration", lambda: classification.BinaryCalibrationError(n_bins=4), one_class),
    measured("hinge", lambda: classification.BinaryHingeLoss(), both_classes),
    measured("Hamming distance of labels", lambda: classification.MultilabelHammingDistance(3), flags),
    measured("exact match", lambda: classification.MultilabelExactMatch(3), flags),
    measured("ranking loss of labels", lambda: classification.MultilabelRankingLoss(3), flags),
    measured("curve, thresholds", lambda: classification.BinaryROC(thresholds=5), both_classes),
    measured(
        "curve of precision and recall, thresholds",
        lambda: classification.BinaryPrecisionRecallCurve(thresholds=5),
        one_class,
    ),
    measured(
        "recall at a precision", lambda: classification.BinaryRecallAtFixedPrecision(0.5, thresholds=5), one_class
    ),
    measured(
        "by class",
        lambda: torchmetrics.wrappers.ClasswiseWrapper(classification.MulticlassAccuracy(3, average="none")),
        classes,
    ),
    measured(
        "statistics of each sample",
        lambda: classification.MultilabelStatScores(4, multidim_average="samplewise", average="micro"),
        lambda n, k: (torch.rand(n, 4, 2), torch.randint(2, (n, 4, 2))),
    ),
    measured("accuracy of each sample", lambda: classification.BinaryAccuracy(multidim_average="samplewise"), samples),
    measured("mean squared error", lambda: regression.MeanSquaredError(), flat),
    measured("root of the mean squared error", lambda: regression.MeanSquaredError(squared=False), flat),
    measured("mean squared error of each output", lambda: regression.MeanSquaredError(num_outputs=3), three),
    measured("relative error", lambda: regression.WeightedMeanAbsolutePercentageError(), flat),
    measured("R²", lambda: regression.R2Score(), flat),
    measured("R² of three outputs", lambda: torchmetrics.wrappers.MultioutputWrapper(regression.R2Score(), 3), three),
    measured("explained variance", lambda: regression.ExplainedVariance(), flat),
    measured("Pearson's correlation", lambda: regression.PearsonCorrCoef(), flat),
    measured("Spearman's correlation", lambda: regression.SpearmanCorrCoef(), flat),
    measured("Kendall's correlation", lambda: regression.KendallRankCorrCoef(), flat),
    measured("concordance", lambda: regression.ConcordanceCorrCoef(), flat),
    measured("cosines, sum", lambda: regression.CosineSimilarity(), three),
    measured("cosines of each row", lambda: regression.CosineSimilarity(reduction="none"), three),
    measured("KL divergence", lambda: regression.KLDivergence(), distributions),
    measured("KL divergence of each row", lambda: regression.KLDivergence(reduction="none"), distributions),
    measured("normalised error of four clients", lambda: regression.NormalizedRootMeanSquaredError(), flat),
    measured("log-cosh", lambda: regression.LogCoshError(), flat),
    measured(
        "Tweedie deviance",
        lambda: regression.TweedieDevianceScore(1.5),
        lambda n, k: (torch.rand(n) + 0.1, torch.rand(n) + 0.1),
    ),
    measured(
        "similarity of images", lambda: torchmetrics.image.StructuralSimilarityIndexMeasure(data_range=1.0), pictures
    ),
    measured("noise of images", lambda: torchmetrics.image.PeakSignalNoiseRatio(data_range=1.0), pictures),
    measured(
        "perplexity",
        lambda: torchmetrics.text.Perplexity(ignore_index=-100),
        lambda n, k: (torch.randn(n, 4, 3), token_labels(n, k)[1]),
    ),
    measured(
        "smallest and largest",
        lambda: torchmetrics.wrappers.MinMaxMetric(regression.MeanSquaredError()),
        flat,
        refused="wrapper|MinMax",
    ),
    measured(
        "a running value",
        lambda: torchmetrics.wrappers.Running(regression.MeanSquaredError(), 2),
        flat,
        refused="wrapper|Running",
    ),
]
