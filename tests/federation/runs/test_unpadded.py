"""Modules that couple a client's rows predict with these rows alone, in every way to evaluate them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import functional, tree
from fedtorch.federation.solvers.prediction import Rowwise, predictor, shared_sizes, unpadded
from fedtorch.models.linear import is_rowwise, polynomial

SIZES = (5, 9, 3, 9, 1)
double = torch.float64


class Coupled(nn.Module):
    """A linear layer of what a function makes of all rows."""

    def __init__(self, couple: Any) -> None:
        super().__init__()
        self.couple, self.linear = couple, nn.Linear(2, 1, dtype=double)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.couple(x))


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


COUPLED = {
    "centred": lambda x: x - x.mean(0),
    "batch norm of the batch": lambda x: F.batch_norm(x, None, None, training=True) if len(x) > 1 else x,
    "softmax over rows": lambda x: x.softmax(0),
    "attention over rows": attention,
    "largest row": lambda x: x / x.abs().amax(),
    "cumulative": lambda x: x.cumsum(0),
    "reversed": lambda x: x.flip(0),
    "ranks": lambda x: x.argsort(0).argsort(0).to(x) + x,
    "count": lambda x: x * len(x),
    "sorted": lambda x: x.sort(0).values,
}


def clients() -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=double)
    return ft.data.from_tensors([(draw(n, 2), draw(n, 1)) for n in SIZES])


def run_of(name: str, batched: Any = True) -> ft.Run:
    torch.manual_seed(0)
    local = ft.gradient_descent(
        Coupled(COUPLED[name]), epochs=1, loss=F.mse_loss, batched=batched,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    return ft.Run(ft.separate(local), ft.InProcess(clients()))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("name", COUPLED)
def test_rows_of_a_client_meet_no_padding(name: str, size: int | None, batched: bool) -> None:
    run, data = run_of(name, batched), clients()
    outputs = []
    for k, (x, _) in enumerate(data):
        module = run.client_module(k)
        with torch.no_grad():
            outputs.append(torch.cat([module(part) for part in x.split(size or len(x))]))
    targets = [y for _, y in data]
    metrics = {
        "loss": F.mse_loss,
        "function": lambda p, t: (p - t).square().mean(),
        "rows": lambda p, t: (p[:, 0] - t[:, 0]).square(),
        "torchmetrics": torchmetrics.MeanSquaredError(),
        "stacked": ft.metrics.mean_squared_error(),
    }
    scores = run.evaluate(data, metrics, batch_size=size)
    each = [float(F.mse_loss(p, t)) for p, t in zip(outputs, targets)]
    whole = float(F.mse_loss(torch.cat(outputs), torch.cat(targets)))
    for score in scores.values():
        assert score.clients.tolist() == pytest.approx(each, rel=1e-6)  # torchmetrics sums in float32
        assert score.overall == pytest.approx(whole, rel=1e-6)
    assert scores["loss"].clients.tolist() == pytest.approx(each, rel=1e-12)
    found = run.predict(data, batch_size=size)
    for k, output in enumerate(outputs):
        torch.testing.assert_close(torch.cat(found[str(k)]), output, rtol=1e-12, atol=1e-14)


def test_validation_of_a_trainer_meets_no_padding() -> None:
    import lightning as L

    run = run_of("centred")
    federation = ft.Federation(
        run.algorithm, ft.InProcess(clients()), validation=clients(), metrics={"loss": F.mse_loss}
    )
    trainer = L.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu",
    )  # fmt: skip
    trainer.fit(federation)
    each = [float(F.mse_loss(federation.client_module(k)(x), y).detach()) for k, (x, y) in enumerate(clients())]
    assert federation.scores["val_loss"].clients.tolist() == pytest.approx(each, rel=1e-12)


def test_clients_of_as_many_rows_share_a_call_and_those_without_come_last() -> None:
    counts = torch.tensor([3, 0, 2, 3])
    found = [(rows.tolist(), count) for rows, count in shared_sizes(lambda tensors, x: x, counts, 3)]
    assert found == [([2], 2), ([0, 3], 3), ([1], 0)]
    rowwise = [(rows.tolist(), count) for rows, count in shared_sizes(Rowwise(lambda tensors, x: x), counts, 3)]
    assert rowwise == [([0, 1, 2, 3], 3)]


@pytest.mark.parametrize("rowwise", [True, False])
def test_predictions_without_padding_are_zero_outside_the_mask(rowwise: bool) -> None:
    module = nn.Linear(2, 1, dtype=double)
    predict = predictor(module, rowwise=rowwise)
    assert isinstance(predict, Rowwise) is rowwise
    block = clients().stack(torch.arange(len(SIZES)))
    tensors = tree.expand(functional.parameters(module), len(SIZES))
    found = unpadded(predict, tensors, block.batch[0], block.mask)
    for k, (x, _) in enumerate(clients()):
        torch.testing.assert_close(found[k, : len(x)], module(x).detach(), rtol=1e-12, atol=1e-14)
        assert not bool(found[k, len(x) :].any())


def test_linear_models_are_known_to_work_row_by_row_by_type() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(-2, keepdim=True))

    hooked = nn.Linear(2, 1)
    hooked.register_forward_hook(lambda module, args, output: output - output.mean())
    known = [nn.Linear(2, 1), ft.LinearHead(2), ft.LinearHead(4, polynomial(2))]
    unknown = [Own(2, 1), hooked, ft.LinearHead(2, lambda x: x - x.mean(-2, keepdim=True)), ft.LinearHead(2, nn.Tanh())]
    assert [is_rowwise(module) for module in known] == [True] * 3
    assert [is_rowwise(module) for module in unknown] == [False] * 4
    assert isinstance(ft.least_squares(nn.Linear(2, 1)).predict, Rowwise)
