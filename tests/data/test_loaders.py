"""Loaders of clients: who is asked for, what they draw, and what they leave as it was."""

from __future__ import annotations

import random as python_random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fedtorch.data import FederatedLoaders, from_datamodules, from_loaders


class Batches:
    """A batch sampler with a generator, of no class of torch's."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.generator.permutation(6).tolist()
        return iter([order[:4], order[4:]])

    def __len__(self) -> int:
        return 2


def some() -> FederatedLoaders:
    return from_loaders({"a": DataLoader(range(6), 2, shuffle=True), "b": DataLoader(range(3), 2)})  # type: ignore[arg-type]


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), python_random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]  # noqa: NPY002


def test_generators_of_the_process_are_not_held_between_batches() -> None:
    before, data = states(), some()
    half = data.batches("a", seed=3)  # which nobody closes, as after an error
    first = next(half)
    assert states() == before
    draws = torch.rand(2)  # of whoever goes through them changes nothing
    rest = list(half)
    torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
    assert torch.equal(draws, torch.rand(2))
    assert torch.equal(torch.cat([first, *rest]), torch.cat(list(data.batches(0, seed=3))))


def test_batch_samplers_of_any_class_begin_from_the_seed() -> None:
    sampler = Batches()
    data = from_loaders({"a": DataLoader(range(6), batch_sampler=sampler)})  # type: ignore[arg-type]
    order = lambda seed: torch.cat(list(data.batches("a", seed))).tolist()
    assert order(1) == order(1) != order(2)
    assert sampler.generator.random() == np.random.default_rng(5).random()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda data: data.loader("c"), "Expected the name of one of 2 clients, but got 'c'"),
        (lambda data: data.loader(2), "Expected a client between 0 and 1, but got 2"),
        (lambda data: next(data.batches(-1, seed=0)), "Expected a client between 0 and 1, but got -1"),
        (lambda data: data.loader("a", "validation"), "Expected a stage among .*'validate'.*, but got 'validation'"),
        (lambda data: data.for_stage("validate"), "Expected a data module for the loader of stage 'validate' of cl"),
    ],
)
def test_missing_clients_are_named(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong(some())


def test_masks_have_a_place_in_batches() -> None:
    loader = DataLoader([torch.ones(2), torch.ones(2)], batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected pad= as a dict or a tuple, as batches are that mask="):
        from_loaders({"a": loader}, pad=0, mask={1: 0})
    batch: Tensor = next(from_loaders({"a": loader}, pad=0).batches("a", seed=0))
    assert batch.shape == (2, 2)


@pytest.mark.parametrize("several", [lambda part: [part, part], lambda part: {"x": part, "y": part}])
def test_several_loaders_of_a_client_are_refused(several: Any) -> None:
    loader = DataLoader(range(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"one loader for client 'a', but got a (list|dict) of 2; join them by"):
        from_loaders({"a": several(loader)}, lengths={"a": 3})


def test_lengths_of_another_stage_are_stated() -> None:
    class Stream(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            return iter([1.0, 2.0, 3.0])

    class Clinic(LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(range(5), 2)  # type: ignore[arg-type]

        def val_dataloader(self) -> Any:
            return DataLoader(Stream(), 2)

    data = from_datamodules({"a": Clinic()})
    with pytest.raises(ValueError, match="Expected a known number of rows of client 'a'"):
        data.for_stage("validate")
    assert data.for_stage("validate", lengths={"a": 3}).counts.tolist() == [3]
