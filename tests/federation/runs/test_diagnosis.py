"""What training, validation and reference errors say of a run, beside errors by hand."""

from __future__ import annotations

import pytest
import torch

import fedtorch as ft
from fedtorch.federation.runs.diagnosis import diagnosis

SQUARED = torch.nn.functional.mse_loss


def rows(*y: float) -> ft.data.FederatedData:
    return ft.data.from_tensors([(torch.eye(len(y), dtype=torch.float64), torch.tensor(y).double())] * 2)


def trained() -> ft.Run:
    return ft.run(
        ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False).double())), ft.InProcess(rows(1.0, -1.0)), rounds=1
    )


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ((1.0, 1.0, 1.0), ["is near the reference"]),
        ((1.0, 1.4, 0.9), ["is near the reference"]),
        ((1.0, 2.0, 1.0), ["overfits: the validation error is 2 times"]),
        ((2.0, 2.0, 1.0), ["underfits: the training error is 2 times"]),
        ((2.0, 4.0, 1.0), ["overfits", "underfits"]),
        ((3.0, 1.0, 3.0), ["the training error is 3 times the validation error"]),
        ((1.0, 1.0, None), ["does not overfit; whether more can be reached"]),
        ((0.0, 1.0, None), ["infinitely many times"]),
        ((0.0, 0.0, 0.0), ["is near the reference"]),
    ],
)
def test_errors_in_words(errors: tuple[float, float, float | None], words: list[str]) -> None:
    verdict = diagnosis(*errors, much=1.5).verdict
    assert all(each in verdict for each in words)
    told = " ".join(words)
    if errors[0]:
        assert ("overfits: " in verdict, "underfits: " in verdict) == ("overfits" in told, "underfits" in told)


def test_a_run_compares_its_own_errors() -> None:
    run = trained()
    found = run.diagnosis(rows(1.5, -1.0), SQUARED, reference=0.1)
    assert found.training == pytest.approx(0.0, abs=1e-12)
    assert found.validation == pytest.approx(0.125)  # (0.5² + 0) / 2
    assert found.reference == 0.1
    assert str(found).startswith("overfits")
    given = run.diagnosis(rows(1.5, -1.0), SQUARED, training=rows(1.5, -1.0))
    assert given.training == given.validation
    assert str(given).startswith("does not overfit")


def test_what_cannot_be_compared_is_refused() -> None:
    run = trained()
    with pytest.raises(ValueError, match="Expected much= above 1"):
        run.diagnosis(rows(1.0, 1.0), SQUARED, much=1.0)
    with pytest.raises(ValueError, match="got a reference error of -1"):
        run.diagnosis(rows(1.0, 1.0), SQUARED, reference=-1.0)
    with pytest.raises(ValueError, match="of which less is better, but got a metric of which more is better"):
        run.diagnosis(rows(1.0, 1.0), ft.metrics.accuracy())
