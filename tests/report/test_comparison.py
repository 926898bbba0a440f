"""Training, validation and a baseline side by side, against the metrics of pooled rows."""

import pytest
import torch
from support.oracles.closed_forms import linear_clients

import fedtorch as ft

DATA = linear_clients([5, 9, 14, 7])
TRAINING, VALIDATION = DATA.split(0.6, seed=0)
PARTS = {"training": TRAINING, "validation": VALIDATION}


def squares(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction.reshape(target.shape) - target).square()


def federation() -> ft.Federation:
    width = TRAINING.rows[0].shape[1]
    local = ft.least_squares(torch.nn.Linear(width, 1).double())
    model = ft.Federation(ft.fedavg(local), ft.InProcess(TRAINING))
    return model


def test_lines_are_the_scores_of_each_model_on_each_set_of_rows() -> None:
    model, metrics = federation(), {"mse": squares}
    comparison = ft.report.compare({"FedAvg": model, "baseline": ft.report.baseline(TRAINING)}, PARTS, metrics)
    assert [line[:3] for line in comparison.lines] == [
        (name, rows, "mse") for name in ("FedAvg", "baseline") for rows in PARTS
    ]
    direct = model.evaluate(VALIDATION, metrics)["mse"]
    assert comparison.lines[1].score.overall == direct.overall
    assert torch.equal(comparison.lines[1].score.clients, direct.clients)
    table = str(comparison).splitlines()
    assert len(table) == 5
    assert f"{direct.overall:.4f}" in table[2]


def test_the_baseline_of_real_targets_is_their_mean() -> None:
    line = ft.report.compare({"mean": ft.report.baseline(TRAINING)}, {"training": TRAINING}, {"mse": squares}).lines[0]
    target = TRAINING.rows[1]
    assert line.score.overall == pytest.approx(float(target.var(correction=0)), rel=1e-12)
    for k, (_, y) in enumerate(TRAINING):
        expected = float((y - target.mean()).square().mean())
        assert float(line.score.clients[k]) == pytest.approx(expected, rel=1e-12)


def test_the_baseline_of_classes_is_their_frequency() -> None:
    x, y = torch.zeros(10, 2), torch.tensor([0, 0, 0, 1, 2, 2, 0, 1, 0, 0])
    data = ft.data.FederatedData((x, y), torch.tensor([4, 6]))
    metrics = {"accuracy": ft.metrics.accuracy(), "nats": ft.metrics.cross_entropy()}
    accuracy, nats = ft.report.compare({"frequency": ft.report.baseline(data)}, {"all": data}, metrics).lines
    assert accuracy.score.overall == pytest.approx(0.6)
    assert accuracy.score.clients.tolist() == pytest.approx([0.75, 0.5])
    share = torch.tensor([0.6, 0.2, 0.2])
    assert nats.score.overall == pytest.approx(-float((share * share.log()).sum()), rel=1e-6)
