"""Metrics of every client are those of its own rows, and the value over all clients is that of all rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.metrics.scores import Score
from situations.loop import seeded
from situations.metrics import CASES, COUNTS, MetricCase

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torchmetrics' own, of memory and of absent classes


class Outputs(nn.Module):
    """The inputs as they are, with a parameter of no influence."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.zero


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_metric_is_that_of_a_clients_own_rows(case: MetricCase) -> None:
    with seeded(7):
        clients = [case.rows(n, k) for k, n in enumerate(COUNTS)]
    score = _score_or_refusal(case, clients)
    if isinstance(score, str):
        assert re.search(case.refused or "none is expected", score), score
        return
    for k, rows in enumerate(clients):
        if k in case.undefined:
            assert torch.as_tensor(score.clients[k]).isnan().all()
        else:
            _compare(score.clients[k], _right(case, rows))
    if case.pooled:
        _compare(score.overall, _right(case, [torch.cat(parts) for parts in zip(*clients)]))


def test_a_metric_that_is_not_defined_at_a_client_is_counted_there() -> None:
    case = next(case for case in CASES if case.name == "torchmetrics: AUROC, a client of one class")
    with seeded(7):
        score = _score(case, [case.rows(n, k) for k, n in enumerate(COUNTS)])
    assert score.undefined is not None
    assert score.undefined.tolist() == [False, True, False, False]


def _score_or_refusal(case: MetricCase, clients: list[Any]) -> Score | str:
    try:
        return _score(case, clients)
    except (TypeError, ValueError) as error:
        return str(error)


def _score(case: MetricCase, clients: list[Any]) -> Score:
    data = ft.data.from_tensors(clients)
    local = ft.gradient_descent(
        Outputs(), epochs=1, loss=lambda p, t: p.square().mean(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    return ft.Run(ft.fedavg(local), ft.InProcess(data)).evaluate(data, {"m": case.make()})["m"]


def _right(case: MetricCase, rows: Any) -> Any:
    prediction, target = rows
    if case.right is not None:
        return case.right(prediction, target)
    metric: torchmetrics.Metric = case.make()
    metric.update(prediction, target)
    return metric.compute()


def _compare(got: Any, right: Any) -> None:
    if isinstance(right, dict):
        assert got.keys() == right.keys()
        for name in right:
            _compare(got[name], right[name])
    elif isinstance(right, (tuple, list)):
        assert len(got) == len(right)
        for one, other in zip(got, right):
            _compare(one, other)
    else:
        got, right = (torch.as_tensor(each).double() for each in (got, right))
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-7, equal_nan=True)
