"""Losses of torch with their options, and labels of every dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from situations.case import Case, labelled, mlp, net, regression, step

WEIGHT = torch.tensor([1.0, 9.0, 0.2], dtype=torch.float64)


def loss(
    name: str,
    function: Callable[[Any, Any], Tensor],
    rows: Any,
    outputs: int = 3,
    rowwise: bool = False,
    **options: Any,
) -> Case:
    return net(f"loss of torch: {name}", lambda: mlp(4, outputs), rows, function, rowwise=rowwise, **options)


def with_ignored(n: int) -> tuple[Tensor, Tensor]:
    x, y = labelled()(n)
    return x, torch.where(torch.arange(n) % 4 == 1, -100, y)


def ignored_in_order(n: int) -> tuple[Tensor, Tensor]:
    x, y = with_ignored(n)
    return x, y.sort(descending=True).values


def probabilities(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randn(n, 3).softmax(1)


def flags(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), (torch.rand(n, 3) > 0.5).to(torch.get_default_dtype())


def signs(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.where(torch.rand(n, 3) > 0.5, 1.0, -1.0)


def counts(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randint(0, 5, (n, 3)).to(torch.get_default_dtype())


def sets(n: int) -> tuple[Tensor, Tensor]:
    """Labels of a row in order, ended by −1."""
    first = torch.randint(3, (n,))
    second = torch.where(torch.rand(n) > 0.5, (first + 1) % 3, -1)
    return torch.randn(n, 4), torch.stack([first, second, torch.full((n,), -1)], 1)


def of_dtype(dtype: torch.dtype) -> Callable[[int], tuple[Tensor, Tensor]]:
    def rows(n: int) -> tuple[Tensor, Tensor]:
        x, y = labelled()(n)
        return x, y.to(dtype)

    return rows


def targets_of(dtype: torch.dtype) -> Callable[[int], tuple[Tensor, Tensor]]:
    def rows(n: int) -> tuple[Tensor, Tensor]:
        x, y = regression(4, 3)(n)
        return x, y.mul(5).to(dtype)

    return rows


def truth(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.rand(n, 3) > 0.5


class PerToken(nn.Module):
    """Logits of each of three tokens (n, 3 classes, 3 tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).view(len(x), 3, 3)


def token_labels(n: int) -> tuple[Tensor, Tensor]:
    """Labels of tokens, of which rows have different numbers; the rest is −100."""
    known = torch.arange(3) < 1 + torch.randint(3, (n, 1))
    return torch.randn(n, 4), torch.where(known, torch.randint(3, (n, 3)), -100)


def flattened(p: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(p.transpose(1, 2).reshape(-1, 3), t.reshape(-1), ignore_index=-100)


def gaussian(p: Tensor, t: Tensor) -> Tensor:
    return F.gaussian_nll_loss(p[:, :1], t[:, :1], p[:, 1:2].exp(), full=True)


def triplet(p: Tensor, t: Tensor) -> Tensor:
    return F.triplet_margin_loss(p[:, :1], p[:, 1:2], p[:, 2:], margin=2.0)


def cosine(p: Tensor, t: Tensor) -> Tensor:
    return F.cosine_embedding_loss(p[:, :2], p[:, 1:], t[:, 0], margin=0.1)


def ranking(p: Tensor, t: Tensor) -> Tensor:
    return F.margin_ranking_loss(p[:, 0], p[:, 1], t[:, 0], margin=0.5)


def transcribed(s: Any, batch: Any) -> Tensor:
    """CTC of ten steps, four symbols, one or two labels."""
    x, y = batch
    logits = s.net(x).view(len(x), 6, 4).transpose(0, 1).log_softmax(2)
    lengths = 1 + (y[:, 1] > 0).long()
    return F.ctc_loss(logits, 1 + y.clamp(min=0), torch.full((len(x),), 6), lengths, zero_infinity=True)


def gaussian_by_distribution(p: Tensor, t: Tensor) -> Tensor:
    return -torch.distributions.Normal(p[:, 0], F.softplus(p[:, 1]) + 0.1).log_prob(t[:, 0]).mean()


def mixture(p: Tensor, t: Tensor) -> Tensor:
    parts = torch.distributions.Normal(p, torch.ones_like(p))
    mixed = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=p.detach()), parts)
    return -mixed.log_prob(t[:, 0]).mean()


def by_categorical(p: Tensor, t: Tensor) -> Tensor:
    return -torch.distributions.Categorical(logits=p, validate_args=True).log_prob(t).mean()


def divergence(p: Tensor, t: Tensor) -> Tensor:
    first = torch.distributions.Normal(p[:, 0], p[:, 1].exp())
    return torch.distributions.kl_divergence(first, torch.distributions.Normal(0.0, 1.0)).mean()


CE = F.cross_entropy
CASES: list[Case] = [
    loss("cross-entropy", CE, labelled(), rowwise=True, compiles=True),
    loss("cross-entropy, weights", nn.CrossEntropyLoss(WEIGHT), labelled()),
    loss("cross-entropy, weights, partial", functools.partial(CE, weight=WEIGHT), labelled()),
    loss("cross-entropy, smoothed", nn.CrossEntropyLoss(label_smoothing=0.1), labelled(), rowwise=True),
    loss("cross-entropy, weights and smoothed", nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), labelled()),
    loss("cross-entropy, sum", nn.CrossEntropyLoss(reduction="sum"), labelled()),
    loss("cross-entropy, ignored labels", CE, with_ignored),
    loss("cross-entropy, ignored labels at the end", CE, ignored_in_order),
    loss("cross-entropy, an ignored class", functools.partial(CE, ignore_index=1), labelled()),
    loss("cross-entropy, an ignored class, minibatches", functools.partial(CE, ignore_index=1), labelled(), size=4),
    loss("cross-entropy, ignored and smoothed", nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.2), labelled()),
    loss("cross-entropy, probabilities", CE, probabilities, rowwise=True),
    loss("cross-entropy, probabilities and weights", nn.CrossEntropyLoss(WEIGHT), probabilities, rowwise=True),
    loss("cross-entropy, none and mean", lambda p, t: CE(p, t, reduction="none").mean(), labelled(), rowwise=True),
    net("loss of torch: cross-entropy of tokens", PerToken, token_labels, CE),
    net("loss of torch: cross-entropy of tokens, flattened", PerToken, token_labels, flattened),
    loss("NLL, weights", lambda p, t: F.nll_loss(p.log_softmax(1), t, weight=WEIGHT), labelled()),
    loss("multi-margin", nn.MultiMarginLoss(), labelled(), rowwise=True),
    loss("multi-margin, weights", nn.MultiMarginLoss(weight=WEIGHT), labelled(), rowwise=True),
    loss("multilabel margin", nn.MultiLabelMarginLoss(), sets, rowwise=True),
    loss("multilabel soft margin", nn.MultiLabelSoftMarginLoss(WEIGHT), flags, rowwise=True),
    loss("binary cross-entropy", lambda p, t: F.binary_cross_entropy(p.sigmoid(), t), flags, rowwise=True),
    loss("binary cross-entropy, sum", lambda p, t: F.binary_cross_entropy(p.sigmoid(), t, reduction="sum"), flags),
    loss("logits, positive weights", nn.BCEWithLogitsLoss(pos_weight=WEIGHT), flags, rowwise=True),
    loss("logits, weights of classes", nn.BCEWithLogitsLoss(weight=WEIGHT), flags, rowwise=True),
    loss("logits, sum", nn.BCEWithLogitsLoss(reduction="sum"), flags),
    loss("soft margin", nn.SoftMarginLoss(), signs, rowwise=True),
    loss("hinge of embeddings", nn.HingeEmbeddingLoss(), signs, rowwise=True),
    loss("cosines of embeddings", cosine, signs, rowwise=True),
    loss("margins of ranks", ranking, signs, rowwise=True),
    loss("triplets", triplet, regression(4, 3), rowwise=True),
    loss("squares, sum", nn.MSELoss(reduction="sum"), regression(4, 3)),
    loss("absolute, sum", nn.L1Loss(reduction="sum"), regression(4, 3)),
    loss("Huber", nn.HuberLoss(delta=0.3), regression(4, 3), rowwise=True),
    loss("smooth absolute", nn.SmoothL1Loss(beta=0.3), regression(4, 3), rowwise=True),
    loss("Poisson", nn.PoissonNLLLoss(), counts, rowwise=True),
    loss(
        "Poisson, full, without logarithm",
        lambda p, t: F.poisson_nll_loss(p.exp(), t, log_input=False, full=True),
        counts,
        rowwise=True,
    ),
    loss("Gaussian, full", gaussian, regression(4, 3), rowwise=True),
    loss(
        "KL, mean over rows",
        lambda p, t: F.kl_div(p.log_softmax(1), t, reduction="batchmean"),
        probabilities,
        rowwise=True,
    ),
    loss("KL, sum", lambda p, t: F.kl_div(p.log_softmax(1), t, reduction="sum"), probabilities),
    loss(
        "KL, of logarithms",
        lambda p, t: F.kl_div(p.log_softmax(1), t.log(), reduction="batchmean", log_target=True),
        probabilities,
        rowwise=True,
    ),
    step("loss of torch: CTC", transcribed, lambda: nn.Linear(4, 24), sets, rowwise=True),
    loss("a normal distribution", gaussian_by_distribution, regression(4, 3), rowwise=True),
    loss("a mixture distribution", mixture, regression(4, 3), rowwise=True),
    loss("a categorical distribution", by_categorical, labelled(), rowwise=True),
    loss("a divergence of distributions", divergence, regression(4, 3), rowwise=True),
    *(
        loss(
            f"cross-entropy, labels of {str(dtype).removeprefix('torch.')}",
            CE,
            of_dtype(dtype),
            rowwise=True,
            **refused,
        )
        for dtype, refused in (
            (torch.uint8, {}),
            (torch.int32, {"refused": dict.fromkeys(("default", "batched=False", "batched=True"), r"long\(\)")}),
        )
        if dtype == torch.uint8
    ),
    *(
        loss(
            f"squares, targets of {str(dtype).removeprefix('torch.')}",
            F.mse_loss,
            targets_of(dtype),
            rowwise=True,
            metrics={},
        )
        for dtype in (torch.float32, torch.int64, torch.int32, torch.uint8)
    ),
    loss(
        "squares, targets of float64 under float32",
        F.mse_loss,
        targets_of(torch.float64),
        rowwise=True,
        dtype=torch.float32,
        tolerance=1e-5,
    ),
    loss(
        "logits, targets of bool made float",
        lambda p, t: F.binary_cross_entropy_with_logits(p, t.to(p.dtype)),
        truth,
        rowwise=True,
    ),
    loss(
        "cross-entropy, labels (n, 1) squeezed",
        lambda p, t: CE(p, t.squeeze(1)),
        lambda n: (torch.randn(n, 4), torch.randint(3, (n, 1))),
        rowwise=True,
    ),
    loss(
        "cross-entropy, labels of float made long", lambda p, t: CE(p, t.long()), of_dtype(torch.float64), rowwise=True
    ),
]
