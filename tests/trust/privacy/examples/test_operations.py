"""Recurrent layers, their cells and PReLU: gradients of examples against a loop over them in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fedtorch as ft
from fedtorch.trust import privacy
from fedtorch.trust.privacy.examples._operations import ExampleOperations
from fedtorch.trust.privacy.examples._per_example import PrivateLoss

mse = nn.functional.mse_loss


class Sequences(nn.Module):
    """A recurrent layer on three steps of four numbers, and a head."""

    def __init__(self, core: nn.Module, width: int = 5) -> None:
        super().__init__()
        self.core, self.head = core, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs, last = self.core(x)
        last = last[-1] if isinstance(last, tuple) else last  # the cell states of an LSTM
        return self.head(outputs.mean(1)) + last.transpose(0, 1).flatten(1).mean(1, keepdim=True)


class Steps(nn.Module):
    """A cell that goes through the steps, from a state of its own or from zeros."""

    def __init__(self, cell: nn.Module, start: bool = False) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(5, 1)
        self.start = nn.Parameter(torch.randn(5)) if start else None

    def forward(self, x: Tensor) -> Tensor:
        state = None if self.start is None else self.start.expand(len(x), 5)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Started(nn.Module):
    """A GRU whose first state is a parameter, and whose inputs come with time in front."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.start = nn.GRU(4, 5), nn.Parameter(torch.randn(1, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x.transpose(0, 1), self.start.expand(1, len(x), 5).contiguous())[0][-1, :, :1]


class Channels(nn.Module):
    """PReLU with a weight of each channel, after a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(3, 4, 2), nn.PReLU(4), nn.Flatten(), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Functional(nn.Module):
    """Calls of the function and of the method, with a parameter that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.slope = nn.Linear(4, 3), nn.Linear(3, 1), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.prelu(self.inner(x[:, 0]), self.slope)
        return self.head((h - 1).prelu(self.slope[:1]))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: Sequences(nn.GRU(4, 5, batch_first=True)),
    "GRU of two layers": lambda: Sequences(nn.GRU(4, 5, 2, batch_first=True)),
    "GRU both ways": lambda: Sequences(nn.GRU(4, 5, batch_first=True, bidirectional=True), 10),
    "GRU without bias": lambda: Sequences(nn.GRU(4, 5, batch_first=True, bias=False)),
    "GRU from a state of its own": Started,
    "RNN": lambda: Sequences(nn.RNN(4, 5, batch_first=True)),
    "RNN with relu": lambda: Sequences(nn.RNN(4, 5, batch_first=True, nonlinearity="relu")),
    "RNN of two layers both ways": lambda: Sequences(nn.RNN(4, 5, 2, batch_first=True, bidirectional=True), 10),
    "LSTM of two layers both ways": lambda: Sequences(nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), 10),
    "LSTM with a projection": lambda: Sequences(nn.LSTM(4, 6, 2, batch_first=True, proj_size=5)),
    "LSTM with a projection, without bias": lambda: Sequences(nn.LSTM(4, 6, batch_first=True, proj_size=5, bias=False)),
    "GRUCell": lambda: Steps(nn.GRUCell(4, 5)),
    "GRUCell from a state of its own": lambda: Steps(nn.GRUCell(4, 5), start=True),
    "RNNCell": lambda: Steps(nn.RNNCell(4, 5)),
    "RNNCell with relu, without bias": lambda: Steps(nn.RNNCell(4, 5, bias=False, nonlinearity="relu")),
    "LSTMCell": lambda: Steps(nn.LSTMCell(4, 5)),
    "PReLU": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.PReLU(), nn.Linear(4, 1)),
    "PReLU of channels": Channels,
    "prelu called": Functional,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]().double()


def clients(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    return [(draw(n, 3, 4), draw(n, 1)) for n in sizes]


def private(module: nn.Module, **settings) -> ft.LocalSolver:
    settings = {"clip": 0.5, "noise": 1e-9, "sampling_rate": 0.5, "steps": 3, "delta": 1e-2, "loss": mse, **settings}
    return privacy.example_level(
        module, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), entropy=privacy.from_seed(0), **settings
    )


def gradient(module: nn.Module, values: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of one example, by torch's own operations."""
    own = {name: value.clone().requires_grad_() for name, value in values.items()}
    found = torch.autograd.grad(mse(functional_call(module, own, (x[None],)), y[None]), list(own.values()))
    return dict(zip(own, found))


@pytest.mark.parametrize("sizes", [[4], [7, 2], [2, 5, 3]], ids=["one client", "two", "three"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_examples_are_those_of_a_loop(name: str, sizes: list[int]) -> None:
    """Of as many rows as there are clients, of fewer, and of more."""
    module, data = made(name), clients(sizes)
    local = private(module)
    ft.Run(ft.separate(local), ft.InProcess(ft.data.from_tensors(data)))
    loss: PrivateLoss = local.solve.__self__.loss
    scale = 1 + 0.3 * torch.arange(len(sizes), dtype=torch.float64)
    own = {n: p.detach() for n, p in module.named_parameters()}
    values = [torch.stack([s * own[n] for s in scale]) for n in loss.tensors]
    for count in {1, len(sizes), 5}:
        x, y = (torch.stack([leaf[torch.arange(count) % len(leaf)] for leaf in leaves]) for leaves in zip(*data))
        found, losses = loss.by_example(values, (x, y), 0, None)
        assert losses.shape == (len(sizes), count)
        for k in range(len(sizes)):
            for i in range(count):
                expected = gradient(module, {n: v[k] for n, v in zip(loss.tensors, values)}, x[k, i], y[k, i])
                for n, leaf in zip(loss.tensors, found):
                    torch.testing.assert_close(leaf[k, i], expected[n], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ghost", [False, True])
@pytest.mark.parametrize("name", ["GRU", "RNN with relu", "GRUCell", "LSTM with a projection", "PReLU", "prelu called"])
def test_steps_are_those_of_a_loop(name: str, ghost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, data, drawn, draw = made(name), clients([7, 2, 5]), [], PrivateLoss._draw

    def see(self, *arguments) -> Tensor:
        drawn.append(draw(self, *arguments))
        return drawn[-1]

    monkeypatch.setattr(PrivateLoss, "_draw", see)
    run = ft.run(ft.separate(private(module, ghost=ghost)), ft.InProcess(ft.data.from_tensors(data)), rounds=1)
    for k, (x, y) in enumerate(data):
        values = {n: p.detach().clone() for n, p in module.named_parameters()}
        for taken in drawn:
            total = {n: torch.zeros_like(p) for n, p in values.items()}
            for i in taken[k].nonzero()[:, 0].tolist():
                found = gradient(module, values, x[i], y[i])
                norm = math.sqrt(sum(float(g.square().sum()) for g in found.values()))
                for n, g in found.items():
                    total[n] += g * min(1.0, 0.5 * (1 - 2**-20) / norm)
            values = {n: value - 0.1 * total[n] / (0.5 * len(x)) for n, value in values.items()}
        for n, leaf in run.tensors().items():
            torch.testing.assert_close(leaf[k], values[n], rtol=0, atol=1e-8)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_they_train_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    rows = [(x.to(dtype), y.to(dtype)) for x, y in clients([6, 11])]
    run = ft.Run(ft.fedavg(private(made(name).to(dtype))), ft.InProcess(ft.data.from_tensors(rows)))
    run.step()
    assert all(leaf.dtype == dtype and bool(leaf.isfinite().all()) for leaf in run.server.values())


def test_attention_with_dropout_trains_and_draws_by_example() -> None:
    """Shares are kept with probability 1 / 2, and then doubled, so that many draws have the mean without dropout."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
            self.head = nn.Linear(12, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.core(x, x, x, need_weights=False)[0].flatten(1))

    torch.manual_seed(0)
    module, data = Attending().double(), clients([6, 4])
    run = ft.Run(ft.fedavg(private(module)), ft.InProcess(ft.data.from_tensors(data)))
    assert all(bool(leaf.isfinite().all()) for leaf in ft.tree.leaves(run.step().server))
    local = private(module)
    ft.Run(ft.separate(local), ft.InProcess(ft.data.from_tensors(data)))
    loss: PrivateLoss = local.solve.__self__.loss
    values = [torch.stack([p.detach()] * 2) for p in dict(module.named_parameters()).values()]
    x, y = (torch.stack([leaf[:1].expand(400, *leaf.shape[1:]) for leaf in leaves]) for leaves in zip(*data))
    drawn, _ = loss.by_example(values, (x, y), 0, ft.random.fold_in(ft.random.key(0), torch.arange(2)))
    last = next(leaf for name, leaf in zip(loss.tensors, drawn) if name == "head.bias")[..., 0]  # 2 (f(x) - y)
    assert len(last[0].unique()) > 300, "every example has draws of its own"
    module.eval()
    for k in range(2):
        expected = 2 * (module(x[k, :1]) - y[k, :1]).item()
        assert abs(float(last[k].mean()) - expected) < 5 * float(last[k].std()) / 400**0.5


def test_dropout_between_recurrent_layers_draws_alike_in_batches_and_alone() -> None:
    """A run begins only if the gradient of a batch is the mean of its examples'."""
    torch.manual_seed(0)
    module = Sequences(nn.GRU(4, 5, 2, batch_first=True, dropout=0.5)).double()
    run = ft.Run(ft.separate(private(module)), ft.InProcess(ft.data.from_tensors(clients([7, 4]))))
    run.step()
    assert all(bool(leaf.isfinite().all()) for leaf in run.tensors().values())


@pytest.mark.parametrize("name", [n for n in LAYERS if "PReLU" not in n and "prelu" not in n])
def test_a_batch_has_the_outputs_of_torch(name: str) -> None:
    module, (x, _) = made(name), clients([6])[0]
    expected = module(x)
    with ExampleOperations():
        torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shape", "weights"), [((), 1), ((3,), 1), ((4, 3), 3), ((4, 3, 2), 3), ((2, 3, 4, 5), 1)])
def test_prelu_is_that_of_torch(shape: tuple[int, ...], weights: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(shape, dtype=torch.float64).requires_grad_(), torch.rand(weights).double().requires_grad_()
    expected = torch.prelu(x, w)
    gradients = torch.autograd.grad(expected.square().sum(), [x, w])
    with ExampleOperations():
        found = torch.prelu(x, w)
        assert torch.equal(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), [x, w]), gradients)
        with pytest.raises(RuntimeError, match="parameter numbers"):
            torch.prelu(torch.ones(2, 3), torch.ones(2))


def test_packed_sequences_keep_the_operation_of_torch() -> None:
    torch.manual_seed(0)
    layer, x = nn.GRU(4, 5).double(), [torch.randn(n, 4).double() for n in (3, 2)]
    packed = nn.utils.rnn.pack_sequence(x)
    expected = layer(packed)[0].data
    with ExampleOperations():
        assert torch.equal(layer(packed)[0].data, expected)


def test_modules_and_torch_stay_as_they_are() -> None:
    module = made("GRU")
    local = private(module)
    ft.run(ft.separate(local), ft.InProcess(ft.data.from_tensors(clients([3, 2]))), rounds=1)
    assert type(module.core) is nn.GRU
    assert type(local.module.core) is nn.GRU


def test_an_infinite_input_has_no_share_in_the_weight_of_prelu_where_it_is_positive() -> None:
    w = torch.tensor([0.25], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([torch.inf, -2.0], dtype=torch.float64)
    with ExampleOperations():
        assert torch.autograd.grad(torch.prelu(x, w)[1], w)[0].tolist() == [-2.0]
