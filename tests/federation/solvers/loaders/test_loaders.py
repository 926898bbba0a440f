"""Clients with loaders of their own, against a plain loop over the same loaders in float64."""

from __future__ import annotations

import copy
import random as python_random
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
import torch.nn.functional as F
from support.plain_training import seeded
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import fedtorch as ft
from fedtorch import random
from fedtorch.data.items import seeded as draws
from fedtorch.federation.algorithm import Turn
from fedtorch.federation.solvers.batches import MODULE

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SIZES = (5, 9, 8, 3)


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("half", loss / 2)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Words(Lit):
    """Takes batches of sentences of several lengths, in which labels may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.words = nn.Linear(3, 2), nn.Embedding(10, 3)

    def training_step(self, batch: Any, index: int) -> Tensor:
        sentences, labels, remark = batch
        assert remark is None
        means = torch.stack([self.words(words).mean(0) for words in sentences])
        known = torch.tensor([label is not None for label in labels])
        given = torch.tensor([label for label in labels if label is not None], dtype=torch.int64)
        return F.cross_entropy(self.net(means)[known], given, reduction="sum")


def rows(count: int, place: int = 0) -> TensorDataset:
    x = random.normal(random.key(place + 1), (count, 3), torch.float64)
    return TensorDataset(x, torch.arange(count) % 2)


def loaders(**settings: Any) -> dict[str, DataLoader]:
    settings = {"batch_size": 4, "shuffle": True, **settings}
    return {f"c{place}": DataLoader(rows(count, place), **settings) for place, count in enumerate(SIZES)}


def sentences(place: int, count: int) -> list[Any]:
    lengths = [1 + (row + place) % 4 for row in range(count)]
    return [(torch.arange(length) + row % 5, None if row % 3 == 2 else row % 2) for row, length in enumerate(lengths)]


def collate(items: list[Any]) -> Any:
    words, labels = zip(*items)
    return list(words), labels, None


def word_loaders() -> dict[str, DataLoader]:
    return {
        f"c{place}": DataLoader(sentences(place, count), batch_size=3, shuffle=True, collate_fn=collate)
        for place, count in enumerate((4, 7))
    }


def plain(module: L.LightningModule, loader: Any, key: Tensor, epochs: int, round: int = 0) -> tuple[Any, int, float]:
    """Return parameters, steps and mean loss of a plain loop, the schedule standing where the round begins."""
    module = copy.deepcopy(module)
    (optimizer,), (schedule,) = module.configure_optimizers()
    module.log = lambda *arguments, **named: None  # type: ignore[method-assign]
    losses = []
    optimizer.step()
    for _ in range(round * epochs):
        schedule.step()
    with draws(int(random.fold_in(key, MODULE))):
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                loss = module.training_step(batch, 0)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            schedule.step()
    return dict(module.named_parameters()), len(losses), float(torch.stack(losses).mean())


def check(local: ft.LocalSolver, module: L.LightningModule, given: dict[str, Any], round: int = 0, **more: Any) -> None:
    """Solve a block of all clients and compare each with its plain loop."""
    data = ft.data.from_loaders(given, **more)
    block, count = local.prepare(data.stack(range(len(data)))), len(data)
    keys = random.fold_in(random.key(3), torch.arange(count))
    state = ft.tree.map(lambda leaf: leaf.expand(count, *leaf.shape).clone(), local.init(local.parameters))
    solved = local.solve(ft.tree.expand(local.parameters, count), state, block, None, Turn(keys, round))
    for k, loader in enumerate(given.values()):
        parameters, _, mean = plain(module, loader, keys[k], 2, round)
        for name, value in parameters.items():
            torch.testing.assert_close(solved.parameters[name][k], value.detach(), **CLOSE)
        assert float(solved.info["loss"][k]) == pytest.approx(mean, rel=1e-10)


SOLVERS = {
    "lightning": lambda module: ft.lightning_fit(module, max_epochs=2),
    "one by one": lambda module: ft.gradient_descent(module, epochs=2, batched=False),
    "stacked": lambda module: ft.gradient_descent(module, epochs=2),
}


@pytest.mark.parametrize("round", [0, 2])
@pytest.mark.parametrize("solver", SOLVERS)
def test_steps_are_those_of_a_plain_loop(solver: str, round: int) -> None:
    module = seeded(Lit)
    check(SOLVERS[solver](module), module, loaders(), round)


@pytest.mark.parametrize("solver", ["lightning", "one by one"])
def test_lists_none_and_ragged_items_are_taken_as_they_are(solver: str) -> None:
    module = seeded(Words)
    check(SOLVERS[solver](module), module, word_loaders())


class Stream(IterableDataset):
    """Rows one after the other, which nobody can count beforehand."""

    def __init__(self, count: int, place: int) -> None:
        self.rows = rows(count, place)

    def __iter__(self) -> Any:
        return (self.rows[row] for row in range(len(self.rows)))


@pytest.mark.parametrize("round", [0, 1])
@pytest.mark.parametrize("solver", SOLVERS)
def test_an_iterable_data_set_has_a_stated_length(solver: str, round: int) -> None:
    streams = {"a": DataLoader(Stream(7, 0), batch_size=3), "b": DataLoader(Stream(4, 1), batch_size=4)}
    module = seeded(Lit)
    check(SOLVERS[solver](module), module, streams, round, lengths={"a": 7, "b": 4})
    with pytest.raises(ValueError, match=r"known number of rows of client 'a', .* lengths=\{'a': rows\}"):
        ft.data.from_loaders(streams)


class Wild(Dataset):
    """Rows with noise from all three generators, as random transforms have it."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> Any:
        noise = torch.randn(3, dtype=torch.float64) + numpy.random.rand() + python_random.random()  # noqa: NPY002
        return noise, row % 2


def wild(**settings: Any) -> ft.data.FederatedLoaders:
    own = torch.Generator()
    sampler = RandomSampler(Wild(), generator=own)
    return ft.data.from_loaders(
        {
            "shuffled": DataLoader(Wild(), batch_size=2, shuffle=True, **settings),
            "own": DataLoader(Wild(), batch_size=2, sampler=sampler, generator=own, **settings),
        }
    )


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_resumed_run_is_the_same_to_the_bit_and_leaves_generators_alone(solver: str, tmp_path: Path) -> None:
    local = SOLVERS[solver](seeded(Lit))
    make = lambda: ft.Run(ft.fedavg(local), ft.InProcess(wild(), chunk=2 if solver == "stacked" else None), seed=3)
    whole, first, second = make(), make(), make()
    before = torch.get_rng_state(), python_random.getstate(), numpy.random.get_state()[1].tolist()  # noqa: NPY002
    for _ in whole.rounds(3):
        pass
    after = torch.get_rng_state(), python_random.getstate(), numpy.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    first.step()
    first.save(tmp_path / "run")
    second.load(tmp_path / "run")
    for _ in second.rounds(3):
        pass
    for name, value in whole.server.items():
        assert torch.equal(value, second.server[name])
        assert not torch.equal(value, first.server[name])
