"""Evaluation of modules that a stack cannot run, or that keep something, is that of each client's module alone."""

from __future__ import annotations

import collections
import dataclasses
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedtorch as ft
from fedtorch import random

WAYS = [{}, {"batched": False}]
VECTORS = [(torch.randn(n, 4, generator=g), torch.randn(n, 1, generator=g)) for n, g in ((4, torch.Generator()),) * 3]
WORDS = [
    (1 + torch.randint(5, (4, 5), generator=torch.Generator()) * (torch.arange(5) < 3 + k), y)
    for k, (_, y) in enumerate(VECTORS)
]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.a = nn.Embedding(7, 4), nn.Linear(4, 1)
        self.t = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.t(self.e(x), src_key_padding_mask=x == 1)[:, 0])


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.a(x)


class Branch(One):
    def forward(self, x: Tensor) -> Tensor:
        output = self.a(x)
        return output * 2 if not self.training and output.mean().item() > 0 else output


class WithNone(One):
    def forward(self, x: Tensor) -> Any:
        return {"logits": self.a(x), "cache": None}


@dataclasses.dataclass
class Output:
    logits: Tensor
    cache: Tensor | None = None


class AsDataclass(One):
    def forward(self, x: Tensor) -> Any:
        return Output(self.a(x))


class AsMapping(One):
    def forward(self, x: Tensor) -> Any:
        return collections.OrderedDict(logits=self.a(x))


class Counting(One):
    """Writes in a buffer in evaluation, in place or by another one, and in a table of Python."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.in_place, self.seen = in_place, []

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen.append(1)
            if self.in_place:
                self.n.add_(1)
            else:
                self.n = self.n + 1
        return self.a(x) * (self.n.clamp(min=1) + max(0, len(self.seen) - 1))


class Remembering(Counting):
    """Adds up what it has seen."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.n.add_(x.abs().sum())
        return self.a(x) * (1 + self.n)


def logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output["logits"] if isinstance(output, dict) else output.logits


def trained(module: nn.Module, rows: Any, **says: Any) -> ft.Run:
    local = ft.gradient_descent(
        module,
        epochs=1,
        loss=lambda output, target: F.mse_loss(logits(output), target),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **says,
    )
    return ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=1, progress=False)


METRICS = {"m": lambda output, target: logits(output).abs().mean()}


@pytest.mark.parametrize("says", WAYS)
@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (Encoder, WORDS),
        (Branch, VECTORS),
        (WithNone, VECTORS),
        (AsDataclass, VECTORS),
        (AsMapping, VECTORS),
        (Counting, VECTORS),
        (lambda: Counting(in_place=False), VECTORS),
        (Remembering, VECTORS),
    ],
)
def test_scores_are_those_of_each_module_alone_however_often(make: Any, rows: Any, says: dict[str, Any]) -> None:
    torch.manual_seed(0)
    run, data = trained(make(), rows, **says), ft.data.from_tensors(rows)
    for _ in range(2):
        found = run.evaluate(data, METRICS)["m"].clients
        with torch.no_grad():
            alone = [METRICS["m"](run.client_module(k).eval()(x), None) for k, (x, _) in enumerate(rows)]
        torch.testing.assert_close(found, torch.stack(alone).to(found), rtol=1e-5, atol=1e-6)


def test_buffers_of_clients_are_not_written_in() -> None:
    run = trained(Remembering(), VECTORS, buffers="local")
    before = [float(run.client_module(k).n) for k in range(3)]
    first, second = (run.evaluate(ft.data.from_tensors(VECTORS), METRICS)["m"].clients for _ in range(2))
    assert torch.equal(first, second)
    assert [float(run.client_module(k).n) for k in range(3)] == before


def test_what_a_batch_leaves_for_the_next_is_refused() -> None:
    run, data = trained(Counting(), VECTORS), ft.data.from_tensors(VECTORS)
    with pytest.raises(ValueError, match=r"keeps nothing from batch to batch.*writes in n; .*run\.client_module"):
        run.evaluate(data, METRICS, batch_size=2)
    loaders = {name: DataLoader(TensorDataset(*rows), batch_size=2) for name, rows in zip(data.names, VECTORS)}
    with pytest.raises(ValueError, match="keeps nothing from batch to batch"):
        run.evaluate(ft.data.from_loaders(loaders), METRICS)


def test_sequential_clients_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    run = trained(Branch(), VECTORS)
    with caplog.at_level(logging.INFO, logger="fedtorch"):
        run.evaluate(ft.data.from_tensors(VECTORS), METRICS)
        run.evaluate(ft.data.from_tensors(VECTORS), METRICS)
    assert caplog.text.count("Branch are predicted one by one") == 1


@pytest.mark.parametrize("says", WAYS)
def test_draws_in_evaluation_depend_on_the_client_only(says: dict[str, Any]) -> None:
    class Noisy(One):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + torch.randn(len(x), 1)

    rows = [*VECTORS, (random.normal(random.key(1), (2, 4)), torch.zeros(2, 1))]
    run, data = trained(Noisy(), rows, **says), ft.data.from_tensors(rows)
    before = torch.get_rng_state()
    together = run.evaluate(data, METRICS)["m"].clients
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(run.evaluate(data, METRICS)["m"].clients, together)
    swapped = [rows[1], rows[0], *rows[2:]]
    other = run.evaluate(ft.data.from_tensors(swapped), METRICS)["m"].clients
    torch.testing.assert_close(other[[1, 0, 2, 3]], together)


@pytest.mark.parametrize("says", WAYS)
def test_outputs_of_other_lengths_have_one_error(says: dict[str, Any]) -> None:
    class Some(One):
        def forward(self, x: Tensor) -> Tensor:
            output = self.a(x)
            return output if self.training else output[x[:, 0] > 0]

    class Text(One):
        def forward(self, x: Tensor) -> Any:
            return self.a(x) if self.training else {"logits": self.a(x), "name": "text"}

    for make, said in ((Some, r"one shape for clients.*run\.client_module"), (Text, "but got str; return a tensor")):
        run = trained(make(), VECTORS, **says)
        with pytest.raises(ValueError, match=said):
            run.evaluate(ft.data.from_tensors(VECTORS), METRICS)
