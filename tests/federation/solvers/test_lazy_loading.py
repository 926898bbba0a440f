"""Rows that are read anew in every round: lazily, at random, and the same in every population."""

from __future__ import annotations

import random as python_random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import fedtorch as ft

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3
COUNTS = torch.tensor([5, 9, 3, 7])


class Augmented(Dataset):
    """Images of the trade: noise of all three generators on every reading."""

    def __init__(self, noise: float = 0.1) -> None:
        self.noise, self.reads = noise, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.randn(3) + python_random.gauss() + float(np.random.normal())  # noqa: NPY002
        self.reads.append((i, float(noise[0])))
        return X[i] + self.noise * noise, int(Y[i])


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.linear(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SOLVERS = {
    "stacked": lambda: ft.gradient_descent(Classifier(), epochs=1, batch_size=4),
    "one by one": lambda: ft.gradient_descent(Classifier(), epochs=1, batch_size=4, batched=False),
    "Lightning": lambda: ft.lightning_fit(Classifier(), max_epochs=1, batch_size=4),
}


def numbers() -> ft.data.FederatedData:
    return ft.data.FederatedData(torch.randperm(24, generator=torch.Generator().manual_seed(2)), COUNTS)


def weights(run: ft.Run) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in run.server.values()])


@pytest.mark.parametrize("name", SOLVERS)
def test_without_random_transforms_it_is_training_on_the_rows(name: str) -> None:
    plain = Augmented(noise=0.0)
    lazy = ft.run(ft.fedavg(ft.lazy_loading(SOLVERS[name](), plain)), ft.InProcess(numbers()), rounds=3)
    read = ft.run(ft.fedavg(SOLVERS[name]()), ft.InProcess(ft.data.read(numbers(), plain)), rounds=3)
    torch.testing.assert_close(weights(lazy), weights(read))


@pytest.mark.parametrize("name", SOLVERS)
def test_transforms_draw_in_every_round_by_the_clients_keys(name: str) -> None:
    def trained(seed: int, **options: Any) -> tuple[Tensor, dict[int, list[float]]]:
        dataset = Augmented()
        run = ft.Run(
            ft.fedavg(ft.lazy_loading(SOLVERS[name](), dataset)), ft.InProcess(numbers(), **options), seed=seed
        )
        assert len(dataset.reads) <= 4 * 8  # lazily: a look at a few
        dataset.reads.clear()
        for _ in run.rounds(3):
            pass
        drawn: dict[int, list[float]] = {}
        for i, noise in dataset.reads:
            drawn.setdefault(i, []).append(noise)
        return weights(run), drawn

    torch.manual_seed(5)
    before = torch.get_rng_state(), python_random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first, drawn = trained(0)
    after = torch.get_rng_state(), python_random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert sorted(drawn) == list(range(24))
    assert all(len(set(noises)) == 3 for noises in drawn.values())  # each row once a round, and never the same
    again, same = trained(0, chunk=1)
    torch.testing.assert_close(again, first)
    assert same == drawn
    assert trained(1)[1] != drawn


def test_only_the_cohort_is_read() -> None:
    dataset = Augmented()
    local = ft.lazy_loading(SOLVERS["stacked"](), dataset)
    run = ft.Run(ft.fedavg(local), ft.InProcess(numbers()), cohort=[2])
    dataset.reads.clear()
    run.step()
    assert sorted(i for i, _ in dataset.reads) == sorted(numbers()[2].tolist())


def test_partitions_of_a_data_set() -> None:
    dataset = Augmented()
    data = ft.data.partition(dataset, ft.data.labels_per_client(1, label=Y), clients=3)
    assert not dataset.reads  # nothing is read
    assert [Y[rows].unique().numel() for rows in data] == [1, 1, 1]
    assert sorted(data.rows.tolist()) == list(range(24))
    assert len(ft.data.partition(dataset, ft.data.dirichlet(0.3, label=Y.tolist()), clients=3)) == 3
    tensors = ft.data.partition(TensorDataset(X, Y), ft.data.dirichlet(0.3), clients=3)
    assert [leaf.shape for leaf in tensors.rows] == [(24, 3), (24,)]
    with pytest.raises(ValueError, match=r"pass label=… \(of a Dataset its classes\)"):
        ft.data.partition(dataset, ft.data.dirichlet(0.3), clients=3)
    with pytest.raises(ValueError, match=r"Expected one value per row, shape \(24,\), but got shape \(2,\)"):
        ft.data.partition(dataset, ft.data.dirichlet(0.3, label=[0, 1]), clients=3)


def test_reading_once_is_for_evaluation() -> None:
    data, again = (ft.data.read(numbers(), Augmented(), seed=1) for _ in range(2))
    assert torch.equal(data.rows[0], again.rows[0])
    plain = ft.data.read(numbers(), Augmented(0.0))
    torch.testing.assert_close(plain[1][0], X[numbers()[1]])
    run = ft.run(ft.fedavg(ft.lazy_loading(SOLVERS["stacked"](), Augmented())), ft.InProcess(numbers()), rounds=1)
    score = run.evaluate(plain, {"loss": F.cross_entropy})["loss"].clients[1]
    output = run.client_module(1)(plain[1][0]).detach()
    assert float(score) == pytest.approx(float(F.cross_entropy(output, plain[1][1])), rel=1e-5)  # float32


class Double(Augmented):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(i)
        return x.double(), y


def test_what_does_not_fit_is_refused() -> None:
    local, there = SOLVERS["stacked"](), ft.InProcess(numbers())
    with pytest.raises(ValueError, match=r"Expected numbers of items as rows, .*ft.data.partition\(dataset"):
        ft.Run(ft.fedavg(ft.lazy_loading(local, Augmented())), ft.InProcess(ft.data.from_tensors([(X, Y)])))
    with pytest.raises(ValueError, match=r"Client '0': Expected rows that Classifier can train on, but got 0: float64"):
        ft.Run(ft.fedavg(ft.lazy_loading(local, Double())), there)
    with pytest.raises(ValueError, match=r"Expected rows .*int64"):  # numbers themselves, without ft.lazy_loading
        ft.Run(ft.fedavg(local), there)
