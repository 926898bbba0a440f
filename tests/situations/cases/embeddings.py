"""Embeddings: rows without gradients, gradients by frequency, norms that are cut in place, bags, ties."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from situations.case import Case, adam, adamw, net, sgd, step, tokens


def table(**options: object) -> nn.Sequential:
    """Return an embedding of three indices with a linear head."""
    return nn.Sequential(nn.Embedding(6, 2, **options), nn.Flatten(), nn.Linear(6, 1))  # type: ignore[arg-type]


def bag(**options: object) -> nn.Sequential:
    """Return a bag of indices with a linear head."""
    return nn.Sequential(nn.EmbeddingBag(6, 2, **options), nn.Linear(2, 1))  # type: ignore[arg-type]


class Functional(nn.Module):
    """A table that `F.embedding` reads, with options."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.table, self.head, self.options = nn.Parameter(torch.randn(6, 2)), nn.Linear(6, 1), options

    def forward(self, words: Tensor) -> Tensor:
        return self.head(F.embedding(words, self.table, **self.options).flatten(1))  # type: ignore[arg-type]


class WeightedBag(nn.Module):
    """A bag whose entries are weighted by trained numbers of each position."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, 2, mode="sum", padding_idx=padding), nn.Linear(2, 1)
        self.weights = nn.Parameter(torch.randn(3))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.bag(words, per_sample_weights=self.weights.expand(len(words), 3)))


class FlatBag(nn.Module):
    """A bag of all indices in one vector, with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, 2), nn.Linear(2, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.bag(words.flatten(), torch.arange(0, words.numel(), 3)))


class Tied(nn.Module):
    """A table that is also the output's weight."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, padding_idx=padding)
        self.head = nn.Linear(3, 6)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words).mean(1))


class Twice(nn.Module):
    """One table that is read twice, by words and by their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 2, padding_idx=0), nn.Linear(4, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.cat([self.table(words).sum(1), self.table(words.roll(1, 1)).amax(1)], 1))


class Sum(nn.Module):
    """Words and positions, whose tables are added."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(6, 2, padding_idx=0), nn.Embedding(3, 2), nn.Linear(2, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.head((self.words(words) + self.places(torch.arange(3))).mean(1))


def classes(n: int) -> tuple[Tensor, Tensor]:
    words, _ = tokens()(n)
    return words, torch.randint(6, (n,))


table_case = functools.partial(net, rows=tokens())
CASES: list[Case] = [
    table_case("embedding", table, rowwise=True, compiles=True),
    table_case("embedding, padding_idx=0 pytorch#26302", lambda: table(padding_idx=0), rowwise=True),
    table_case("embedding, padding_idx=3", lambda: table(padding_idx=3), rowwise=True),
    table_case("embedding, padding_idx=-1", lambda: table(padding_idx=-1), rowwise=True),
    table_case("embedding, padding_idx=-6 is the first row", lambda: table(padding_idx=-6), rowwise=True),
    table_case("embedding, padding_idx, Adam", lambda: table(padding_idx=0), optimizer=adam(), rowwise=True),
    table_case(
        "embedding, padding_idx, AdamW decays its row too",
        lambda: table(padding_idx=0),
        optimizer=adamw(),
        rowwise=True,
    ),
    table_case(
        "embedding, padding_idx, momentum", lambda: table(padding_idx=0), optimizer=sgd(momentum=0.9), rowwise=True
    ),
    table_case("embedding, padding_idx, minibatches", lambda: table(padding_idx=0), size=2),
    table_case(
        "embedding, padding_idx that no row has",
        lambda: table(padding_idx=5),
        rows=lambda n: (torch.randint(3, (n, 3)), torch.randn(n, 1)),
        rowwise=True,
    ),
    table_case("embedding, padding row that is not zero", lambda: _from_pretrained(padding_idx=2), rowwise=True),
    table_case("embedding, frozen from_pretrained", lambda: _from_pretrained(freeze=True), rowwise=True),
    table_case("F.embedding, padding_idx pytorch#28716", lambda: Functional(padding_idx=0), rowwise=True),
    table_case("F.embedding, padding_idx=-2", lambda: Functional(padding_idx=-2), rowwise=True),
    table_case("F.embedding, scale_grad_by_freq", lambda: Functional(scale_grad_by_freq=True)),
    table_case("embedding, scale_grad_by_freq pytorch#84491", lambda: table(scale_grad_by_freq=True)),
    table_case("embedding, scale_grad_by_freq and padding_idx", lambda: table(scale_grad_by_freq=True, padding_idx=0)),
    table_case("embedding, max_norm pytorch#26596", lambda: table(max_norm=0.5)),
    table_case("embedding, max_norm of the 1-norm pytorch#30899", lambda: table(max_norm=0.5, norm_type=1.0)),
    table_case("embedding, max_norm and padding_idx pytorch#28959", lambda: table(max_norm=0.5, padding_idx=0)),
    table_case("embedding, sparse", lambda: table(sparse=True)),
    table_case("embedding, one table read twice", Twice, rowwise=True),
    table_case("embedding, words and positions", Sum, rowwise=True),
    net("embedding, tied with the output", Tied, classes, F.cross_entropy, rowwise=True),
    net("embedding, tied, with padding_idx", lambda: Tied(0), classes, F.cross_entropy, rowwise=True),
    table_case("bag, mean pytorch#86819", bag, rowwise=True),
    table_case("bag, sum", lambda: bag(mode="sum"), rowwise=True),
    table_case("bag, max", lambda: bag(mode="max"), rowwise=True),
    table_case("bag, mean, padding_idx", lambda: bag(padding_idx=0), rowwise=True),
    table_case("bag, sum, padding_idx", lambda: bag(mode="sum", padding_idx=0), rowwise=True),
    table_case("bag, max, padding_idx", lambda: bag(mode="max", padding_idx=0), rowwise=True),
    table_case("bag, scale_grad_by_freq", lambda: bag(mode="sum", scale_grad_by_freq=True)),
    table_case("bag, max_norm", lambda: bag(max_norm=0.5)),
    table_case("bag, sparse", lambda: bag(mode="sum", sparse=True)),
    table_case("bag, trained per_sample_weights", WeightedBag, rowwise=True),
    table_case("bag, trained per_sample_weights, padding_idx", lambda: WeightedBag(0), rowwise=True),
    table_case("bag, flat indices with offsets", FlatBag),
    step(
        "embedding, mean of the words that are no padding",
        lambda s, b: F.mse_loss(_masked_mean(s.net, b[0]), b[1]),
        lambda: nn.ModuleList([nn.Embedding(6, 2, padding_idx=0), nn.Linear(2, 1)]),
        tokens(),
        metrics={},
        rowwise=True,
    ),
]


def _from_pretrained(**options: object) -> nn.Sequential:
    made = nn.Embedding.from_pretrained(torch.randn(6, 2), **{"freeze": False, **options})  # type: ignore[arg-type]
    return nn.Sequential(made, nn.Flatten(), nn.Linear(6, 1))


def _masked_mean(parts: nn.ModuleList, words: Tensor) -> Tensor:
    known = (words > 0).unsqueeze(-1)
    return parts[1]((parts[0](words) * known).sum(1) / known.sum(1).clamp(min=1))
