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
from lightning.pytorch.utilities import CombinedLoader
from support.forked import over_ranks
from support.oracles.plain_training import seeded
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import fedtorch as ft
from fedtorch import random
from fedtorch.data.items import seeded as draws
from fedtorch.federation.solvers.batches import MODULE
from fedtorch.federation.turn import Turn
from fedtorch.models.gibbs import sparse

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


class Padded(Lit):
    """Takes sentences as a matrix with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.words = nn.Linear(3, 2), nn.Embedding(10, 3)

    def training_step(self, batch: Any, index: int) -> Tensor:
        words, labels, mask = batch["words"], batch["label"], batch["mask"].double()
        means = (self.words(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.cross_entropy(self.net(means), labels, ignore_index=-1)


def padded(words: list[Tensor], labels: Tensor) -> dict[str, Tensor]:
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(each, dtype=torch.bool) for each in words], batch_first=True)
    return {"words": nn.utils.rnn.pad_sequence(words, batch_first=True), "label": labels, "mask": mask}


def ragged(items: list[Any]) -> dict[str, Any]:
    words, labels = zip(*items)
    return {"words": list(words), "label": torch.tensor([-1 if label is None else label for label in labels])}


@pytest.mark.parametrize("solver", ["stacked", "one by one"])
def test_ragged_rows_are_filled_up_and_trained_together(solver: str) -> None:
    settings = {"batch_size": 3, "shuffle": True}
    items = {f"c{place}": sentences(place, count) for place, count in enumerate((4, 7, 6))}
    given = {name: DataLoader(each, collate_fn=ragged, **settings) for name, each in items.items()}
    dense = {
        name: DataLoader(each, collate_fn=lambda items: padded(*ragged(items).values()), **settings)
        for name, each in items.items()
    }
    module, count = seeded(Padded), len(items)
    local = SOLVERS[solver](module)
    data = ft.data.from_loaders(given, pad={"words": 0, "label": -1}, mask={"mask": "words"})
    keys = random.fold_in(random.key(3), torch.arange(count))
    state = ft.tree.map(lambda leaf: leaf.expand(count, *leaf.shape).clone(), local.init(local.parameters))
    solved = local.solve(ft.tree.expand(local.parameters, count), state, data.stack(range(count)), None, Turn(keys, 0))
    for k, loader in enumerate(dense.values()):
        for name, value in plain(module, loader, keys[k], 2)[0].items():
            torch.testing.assert_close(solved.parameters[name][k], value.detach(), **CLOSE)


class Positions(Padded):
    """Counts what is filled up, and draws for every row and position."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.noise = nn.Dropout(0.4), 0.1

    def training_step(self, batch: Any, index: int) -> Tensor:
        words = self.words(batch["words"])
        words = self.dropout(words) + self.noise * torch.randn_like(words)
        return F.cross_entropy(self.net(words.mean(1)), batch["label"], ignore_index=-1)


def ragged_clients() -> ft.data.FederatedLoaders:
    items = {f"c{place}": sentences(place, count) for place, count in enumerate((4, 7, 6, 5))}
    given = {name: DataLoader(each, collate_fn=ragged, batch_size=3) for name, each in items.items()}
    return ft.data.from_loaders(given, pad={"words": 0, "label": -1})


def test_ragged_batches_are_those_of_a_collate_fn_also_where_filling_counts() -> None:
    """Each batch is filled up to its own longest row, whoever else trains in this step."""
    module = seeded(Positions)
    module.dropout, module.noise = nn.Dropout(0.0), 0.0
    data, local = ragged_clients(), SOLVERS["stacked"](module)
    run = ft.run(ft.separate(local), ft.InProcess(data), rounds=1, progress=False)
    for k, loader in enumerate(data.loaders):
        dense = [padded(*batch.values()) for batch in loader]
        for name, value in plain(module, dense, torch.tensor(0), 2)[0].items():
            torch.testing.assert_close(dict(run.client_module(k).named_parameters())[name].detach(), value, **CLOSE)


def numbers(population: Any) -> list[float]:
    local = SOLVERS["stacked"](seeded(Positions))
    run = ft.run(ft.fedavg(local), population, rounds=2, progress=False)
    return torch.cat([leaf.flatten() for leaf in ft.tree.leaves(run.server)]).tolist()


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_draws_of_ragged_clients_do_not_depend_on_the_clients_beside_them(chunk: int) -> None:
    together = numbers(ft.InProcess(ragged_clients()))
    assert numbers(ft.InProcess(ragged_clients(), chunk=chunk)) == pytest.approx(together, rel=1e-10, abs=1e-12)


def test_draws_of_ragged_clients_are_the_same_over_two_ranks(tmp_path: Path) -> None:
    together = numbers(ft.InProcess(ragged_clients()))
    for found in over_ranks(tmp_path / "ranks", 2, lambda rank: numbers(ft.Distributed(ragged_clients()))):
        assert found == pytest.approx(together, rel=1e-10, abs=1e-12)


def test_batches_that_are_not_of_tensors_are_not_stacked() -> None:
    run = ft.Run(ft.fedavg(ft.gradient_descent(seeded(Words), epochs=1, batched=True)), ft.InProcess(from_words()))
    with pytest.raises(TypeError, match=r"Expected batches of tensors.* got int in '1\.\d'; give pad= .*batched=False"):
        run.step()


def from_words() -> ft.data.FederatedLoaders:
    return ft.data.from_loaders(word_loaders())


class Broken(TensorDataset):
    """Raises at its last row."""

    def __getitem__(self, row: int) -> Any:
        if row == len(self) - 1:
            raise OSError("no such image")
        return super().__getitem__(row)


class Nothing:
    """A stream that has run dry."""

    def __iter__(self) -> Any:
        return iter(())


def bad_clients() -> dict[str, Any]:
    """Return the loaders of a good client and of bad ones, by what is wrong with them."""
    wide = TensorDataset(torch.ones(4, 7, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    return {
        "raises": DataLoader(Broken(*rows(5).tensors), batch_size=2),
        "wide": DataLoader(wide, batch_size=2),
        "empty": Nothing(),
    }


@pytest.mark.parametrize(("bad", "chunk"), [("raises", 3), ("wide", 1), ("wide", 3), ("empty", 1)])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_bad_loader_is_named_and_the_round_is_not_lost(solver: str, chunk: int, bad: str, caplog: Any) -> None:
    good = loaders()
    given = {"c0": good["c0"], "bad": bad_clients()[bad], "c1": good["c1"]}
    module = seeded(Lit)
    begin = lambda clients, **settings: ft.Run(
        ft.fedavg(SOLVERS[solver](module)),
        ft.InProcess(ft.data.from_loaders(clients, lengths={"bad": 4} if "bad" in clients else {}), chunk=chunk),
        **settings,
    )
    run = begin(given)
    said = {"raises": "raised.* OSError: no such image", "wide": "(shape|size)", "empty": "gave none"}
    with pytest.raises(ValueError, match=f"in round 1 client 'bad' did not: .*{said[bad]}"):
        run.step()
    assert run.number == 0
    dropped = begin(given, on_bad_message="drop")
    round = dropped.step()
    assert (round.ids.tolist(), round.refused.tolist()) == ([0, 2], [1])
    assert "client 'bad' was left out of round 1" in caplog.text
    for name, value in dropped.server.items():
        assert torch.isfinite(value).all()
        assert not torch.equal(value, module.get_parameter(name))


def test_empty_loaders_are_refused_when_they_are_made() -> None:
    with pytest.raises(ValueError, match="at least one batch per client, but got none from the loader of client 'b'"):
        ft.data.from_loaders({"a": DataLoader(rows(3)), "b": DataLoader(rows(3), batch_size=4, drop_last=True)})


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (5, "Expected a DataLoader for client 'a', but got int"),
        ((row for row in rows(2)), "begins anew in every round for client 'a', but got generator"),
    ],
)
def test_what_is_no_loader_is_refused(loader: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        ft.data.from_loaders({"a": loader}, lengths={"a": 2})


NEEDS_ROWS = {
    "fedavg of least_squares": lambda: ft.fedavg(ft.least_squares(nn.Linear(3, 1))),
    "gtv of least_squares": lambda: ft.gtv(ft.least_squares(nn.Linear(3, 1)), ft.Network.ring(4), alpha=1.0),
    "gibbs": lambda: ft.gibbs(sparse.regression(), sparse.hierarchy()),
}


@pytest.mark.parametrize("name", NEEDS_ROWS)
def test_what_needs_all_rows_refuses_loaders_by_name(name: str) -> None:
    population, start = ft.InProcess(ft.data.from_loaders(loaders())), torch.zeros(3) if name == "gibbs" else None
    with pytest.raises(TypeError, match=rf"{name}: Expected rows as tensors, .*from_datasets\(\[loader.dataset"):
        ft.Run(NEEDS_ROWS[name](), population, start)


def test_rows_of_loaders_are_refused_wherever_they_are_asked_for() -> None:
    data = ft.data.from_loaders(loaders())
    run = ft.Run(ft.fedavg(ft.lightning_fit(Lit(), max_epochs=1)), ft.InProcess(data))
    for asked in (
        lambda: run.population.data[0],
        lambda: data.split(0.5, seed=0),
        lambda: ft.Run(run.algorithm, ft.Growing(data, lambda rounds: data.counts)),
    ):
        with pytest.raises(TypeError, match=r"Expected rows as tensors, .* but these clients have loaders"):
            asked()


def test_batches_are_moved_as_lightning_moves_them() -> None:
    data = ft.data.from_loaders(word_loaders()).to("meta")
    (sentences, labels, remark), *_ = data.batches("c0", seed=0)
    assert {words.device.type for words in sentences} == {"meta"}
    assert (len(labels), remark) == (3, None)


@pytest.mark.parametrize("make", [ft.gradient_descent, ft.lightning_fit])
def test_sizes_of_batches_are_the_loaders_own(make: Any) -> None:
    local = make(Lit(), **({"epochs": 1} if make is ft.gradient_descent else {"max_epochs": 1}), batch_size=5)
    with pytest.raises(ValueError, match=r"batches are taken as they are, but got batch_size=5; give them to the load"):
        ft.Run(ft.fedavg(local), ft.InProcess(ft.data.from_loaders(loaders())))


class Ward(L.LightningDataModule):
    """Doubles its batches on their way, and counts what it is asked."""

    def __init__(self, place: int, count: int) -> None:
        super().__init__()
        self.place, self.count, self.asked = place, count, []

    def prepare_data(self) -> None:
        self.asked.append("prepare")

    def setup(self, stage: str) -> None:
        self.asked.append(stage)
        self.rows = rows(self.count, self.place)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=7)

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        return 2 * batch[0], batch[1]


class Doubling(Lit):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step((2 * batch[0], batch[1]), index)


class Validating(Lit):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("batch", float(len(batch[1])))


def test_data_modules_are_those_of_the_clients_trainers() -> None:
    wards = {f"c{place}": Ward(place, count) for place, count in enumerate((5, 9))}
    data, module = ft.data.from_datamodules(wards), seeded(Validating)
    local = ft.lightning_fit(module, max_epochs=1)
    keys = random.fold_in(random.key(3), torch.arange(2))
    state = ft.tree.map(lambda leaf: leaf.expand(2, *leaf.shape).clone(), local.init(local.parameters))
    solved = local.solve(ft.tree.expand(local.parameters, 2), state, data.stack([0, 1]), None, Turn(keys, 0))
    plain_module = seeded(Doubling)
    for k, ward in enumerate(wards.values()):
        assert ward.asked == ["prepare", "fit"]
        for name, value in plain(plain_module, ward.train_dataloader(), keys[k], 1)[0].items():
            torch.testing.assert_close(solved.parameters[name][k], value.detach(), **CLOSE)
    assert solved.info["batch"].tolist() == pytest.approx([5.0, (7 * 7 + 2 * 2) / 9])  # a mean over rows, in float32
    validation = data.for_stage("validate")
    assert (validation.loader("c1").batch_size, wards["c0"].asked[-1]) == (7, "validate")
    with pytest.raises(ValueError, match="Expected test_dataloader of Ward, the data module of client 'c0'"):
        data.for_stage("test")
    with pytest.raises(ValueError, match="Expected a data module for the loader of stage 'test' of client 'c2'"):
        ft.data.from_loaders(loaders()).loader("c2", "test")


def test_workers_that_persist_read_the_same_rows_and_end() -> None:
    given = {"num_workers": 1, "persistent_workers": True}
    local = ft.gradient_descent(seeded(Lit), epochs=2, batched=False)
    alike = [ft.run(ft.fedavg(local), ft.InProcess(wild(**given)), rounds=1, seed=5) for _ in range(2)]
    assert all(torch.equal(value, alike[1].server[name]) for name, value in alike[0].server.items())
    assert alike[0].population.data.loader("shuffled")._iterator is None


def test_ranks_go_through_loaders_of_their_own() -> None:
    local = ft.gradient_descent(seeded(Lit), epochs=1, batched=False)
    alone = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_loaders(loaders())), rounds=2)
    ranked = ft.run(ft.fedavg(local), ft.Distributed(ft.data.from_loaders(loaders())), rounds=2)
    assert all(torch.equal(value, ranked.server[name]) for name, value in alone.server.items())


class Central(Validating):
    """Has loaders of its own, as a module of one's own project may."""

    def train_dataloader(self) -> Any:
        return DataLoader(rows(5), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(rows(6), batch_size=6)


def test_a_modules_own_loaders_are_refused_or_used() -> None:
    for make in (
        lambda **more: ft.gradient_descent(seeded(Central), epochs=1, batched=False, **more),
        lambda **more: ft.lightning_fit(seeded(Central), max_epochs=1, **more),
    ):
        with pytest.raises(TypeError, match=r"Central has train_dataloader.*ignore_hooks=\['train_dataloader'"):
            make()
        local = make(ignore_hooks=["train_dataloader", "val_dataloader"])
        run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_loaders(loaders())), rounds=1)
        assert "lightning_fit" not in local.settings["solver"] or run.history["batch"].tolist() == [6.0]
    with pytest.raises(TypeError, match="Central has val_dataloader"):
        ft.gradient_descent(seeded(Central), epochs=1, ignore_hooks=["train_dataloader"])


@pytest.mark.parametrize("solver", ["lightning", "one by one"])
def test_a_missing_size_of_batches_says_what_it_means(solver: str, caplog: Any) -> None:
    data = ft.data.from_tensors([rows(3).tensors, rows(7).tensors])
    with caplog.at_level("INFO", logger="fedtorch"):
        ft.Run(ft.fedavg(SOLVERS[solver](seeded(Lit))), ft.InProcess(data))
    assert "batch_size= is not given: a step takes all of a client's rows, up to 7" in caplog.text


class Both(Lit):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch["a"], index) + super().training_step(batch["b"], index)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_loader_of_loaders_gives_batches_of_each(solver: str) -> None:
    each = lambda place: DataLoader(rows(6 + place, place), batch_size=3, shuffle=True)
    given = {name: CombinedLoader({"a": each(place), "b": each(place + 1)}) for place, name in enumerate("xy")}
    module = seeded(Both)
    data = ft.data.from_loaders(given, lengths={"x": 6, "y": 7})
    assert [data.steps(k) for k in range(2)] == [2, 3]
    keys = random.fold_in(random.key(3), torch.arange(2))
    local = SOLVERS[solver](module)
    start = ft.tree.expand(local.parameters, 2)
    state = ft.tree.map(lambda leaf: leaf.expand(2, *leaf.shape).clone(), local.init(local.parameters))
    solved = local.solve(start, state, data.stack([0, 1]), None, Turn(keys, 0))
    for k, loader in enumerate(given.values()):
        for name, value in plain(module, Unnumbered(loader), keys[k], 2)[0].items():
            torch.testing.assert_close(solved.parameters[name][k], value.detach(), **CLOSE)


def test_rows_of_a_pass_are_those_of_the_batches() -> None:
    listed = DataLoader(rows(10, 0), batch_sampler=[[0, 1, 2], [3, 4]])  # type: ignore[arg-type]
    assert ft.data.from_loaders({"a": listed}).counts.tolist() == [5]
    whole = DataLoader(rows(10, 0), batch_size=None, sampler=BatchSampler(range(10), 4, False))  # three batches
    with pytest.raises(ValueError, match=r"known number of rows of client 'a', .* lengths=\{'a': rows\}"):
        ft.data.from_loaders({"a": whole})
    data = ft.data.from_loaders({"a": whole}, lengths={"a": 10})
    assert (data.counts.tolist(), data.steps(0)) == ([10], 3)
    with pytest.raises(ValueError, match=r"Expected a stage among \['fit', 'validate', .*, but got 'validation'"):
        data.for_stage("validation")  # type: ignore[arg-type]


class Choosing(nn.Module):
    """Draws, and takes rows by a mask, which is not stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nn.Linear(3, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.drop(x)) + 0 * self.net(x[x[:, 0] > 0]).sum()


def test_clients_that_auto_takes_one_by_one_begin_so(tmp_path: Path) -> None:
    def begun(batched: bool | str) -> ft.Run:
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        local = ft.gradient_descent(
            seeded(Choosing),
            epochs=1,
            batched=batched,
            loss=F.cross_entropy,
            optimizer=sgd,  # type: ignore[arg-type]
        )
        return ft.Run(ft.fedavg(local), ft.InProcess(ft.data.from_loaders(loaders())))

    def go(run: ft.Run, rounds: int) -> ft.Run:
        list(run.rounds(rounds))
        return run

    go(begun("auto"), 1).save(tmp_path / "run.safetensors")
    resumed = go(begun("auto").load(tmp_path / "run.safetensors"), 2)
    for run in (resumed, go(begun(False), 2)):
        assert torch.equal(run.server["net.weight"], go(begun("auto"), 2).server["net.weight"])


def test_batches_of_objects_are_taken_one_by_one_by_auto() -> None:
    collate = lambda items: {"rows": [torch.stack(each) for each in zip(*items)], "name": ["a"] * len(items)}

    class Named(Lit):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return super().training_step(batch["rows"], index)

    runs = [
        ft.run(
            ft.fedavg(ft.gradient_descent(seeded(Named), epochs=1, batched=batched)),  # type: ignore[arg-type]
            ft.InProcess(ft.data.from_loaders(loaders(collate_fn=collate))),
            rounds=2,
            progress=False,
        )
        for batched in ("auto", False)
    ]
    for name, value in runs[0].server.items():
        assert torch.equal(value, runs[1].server[name])


class Unnumbered:
    """The batches of a loader of loaders without their numbers, as a Trainer hands them to a module."""

    def __init__(self, loader: CombinedLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return (batch for batch, *_ in self.loader)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 7, 4, 3)])
def test_draws_are_the_same_one_by_one_and_stacked(sizes: tuple[int, ...]) -> None:
    module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    rows = [random.normal(random.key(k), (n, 4), torch.float64) for k, n in enumerate(sizes)]
    loaders = {str(k): DataLoader(TensorDataset(each[:, :3], each[:, 3:]), batch_size=2) for k, each in enumerate(rows)}

    def trained(chunk: int | None = None, **says: Any) -> dict[str, Tensor]:
        local = ft.gradient_descent(module, epochs=1, loss=F.mse_loss, optimizer=torch.optim.SGD, **says)
        population = ft.InProcess(ft.data.from_loaders(loaders), chunk=chunk)
        return ft.run(ft.fedavg(local), population, rounds=2, progress=False).global_module().state_dict()

    stacked = trained()
    for other in (trained(batched=False), trained(chunk=1)):
        torch.testing.assert_close(other, stacked, **CLOSE)


@pytest.mark.parametrize("says", [{}, {"batched": False}])
def test_sparse_batches_go_one_by_one(says: dict[str, Any]) -> None:
    class Dense(Lit):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return super().training_step((batch[0].to_dense(), batch[1]), index)

    def sparse_first(items: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in items]).to_sparse(), torch.stack([y for _, y in items])

    rows = [(random.normal(random.key(k), (n, 3)), torch.arange(n) % 2) for k, n in enumerate((4, 5, 4))]

    def trained(kind: type[Lit], collate: Any, **says: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        loaders = {
            str(k): DataLoader(TensorDataset(*each), batch_size=2, collate_fn=collate) for k, each in enumerate(rows)
        }
        local = ft.gradient_descent(kind(), epochs=1, **says)
        population = ft.InProcess(ft.data.from_loaders(loaders))
        return ft.run(ft.fedavg(local), population, rounds=1, progress=False).global_module().state_dict()

    torch.testing.assert_close(trained(Dense, sparse_first, **says), trained(Lit, None))
