"""The plain loop that all ways of training are held against, and how far they are from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from support.oracles.plain_training import keys, solve
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.data import FederatedData
from fedtorch.federation.solvers.batches import MODULE, PERMUTATIONS
from fedtorch.federation.solvers.lightning_fit import isolated
from fedtorch.module_randomness.interception import KeyedRandomness
from zoo.case import Case

EPOCHS = 2
ADVICE = r"batched=False|lightning_fit|one number or a torchmetrics metric"


def made(case: Case) -> tuple[Any, Any]:
    """Return the module and the clients' rows, in the case's precision; or their loaders, by name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = case.make()
        if case.dtype == torch.float64:
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = _precise(tensor.data)
        if case.loader:
            return module, {str(count): case.rows(count) for count in case.counts}
        rows = case.rows(sum(case.counts))
    precise = lambda leaf: leaf.to(case.dtype) if leaf.is_floating_point() else leaf
    return module, FederatedData(tree.map(precise, rows), torch.tensor(case.counts))


def trained(case: Case, way: str, module: Any, data: Any) -> list[dict[str, Tensor]]:
    """Return the tensors of each client after one round that begins with the module's."""
    local = solver(case, way, module)
    if case.loader:
        alone = [ft.data.from_loaders({name: loader}) for name, loader in data.items()]
        runs = [ft.run(ft.fedavg(local), ft.InProcess(client), rounds=1) for client in alone]
        return [dict(run.global_module().named_parameters()) for run in runs]
    local_result = solve(local, data.stack(range(len(data))), keys(len(data)))
    tensors = {**local_result.parameters, **local_result.state.buffers}
    return [{name: leaf[k] for name, leaf in tensors.items()} for k in range(len(data))]


def solver(case: Case, way: str, module: Any) -> Any:
    """Return the local solver of a way of training, with what the user says."""
    size = {} if case.loader else {"batch_size": case.size}
    if way == "lightning_fit":
        return ft.lightning_fit(module, max_epochs=EPOCHS, **size, **case.says)
    stacked = way == "stacked"
    return ft.gradient_descent(module, epochs=EPOCHS, batched=stacked, ignore_hooks=case.ignores, **size, **case.says)


def looped(case: Case, way: str, module: Any, data: Any) -> list[dict[str, Tensor]]:
    """Return the tensors of each client after a loop as anybody would write it, with the draws of that way."""
    clients = data.values() if case.loader else data
    return [_loop(case, way, copy.deepcopy(module), rows, key) for rows, key in zip(clients, keys(len(data)))]


def _loop(case: Case, way: str, module: Any, rows: Any, key: Tensor) -> dict[str, Tensor]:
    module.log = module.log_dict = lambda *args, **options: None
    state = SimpleNamespace(stage=RunningStage.TRAINING)
    trainer = SimpleNamespace(state=state, strategy=None, current_epoch=0, global_step=0, training=True)
    module.trainer = trainer
    own = random.fold_in(key, MODULE)
    with isolated(torch.device("cpu"), None, int(own)) if way == "lightning_fit" else nullcontext():
        configured = module.configure_optimizers()
        optimizers = configured if isinstance(configured, list) else [_optimizer(configured)]
        for index, batch in enumerate(_batches(case, rows, key, way)):
            with KeyedRandomness(random.fold_in(own, index)) if way != "lightning_fit" else nullcontext():
                (case.step or _step)(module, optimizers, batch)
    return {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}


def _optimizer(configured: Any) -> torch.optim.Optimizer:
    return configured["optimizer"] if isinstance(configured, dict) else configured


def _step(module: Any, optimizers: list[torch.optim.Optimizer], batch: Any) -> Tensor:
    (optimizer,) = optimizers
    optimizer.zero_grad()
    answer = module.training_step(batch) if _alone(module) else module.training_step(batch, 0)
    loss = answer["loss"] if isinstance(answer, dict) else answer
    loss.backward()
    optimizer.step()
    return loss


def _alone(module: Any) -> bool:
    return module.training_step.__func__.__code__.co_argcount == 2


def _batches(case: Case, rows: Any, key: Tensor, way: str) -> Iterator[Any]:
    for epoch in range(EPOCHS):
        if case.loader:
            yield from rows
            continue
        if way == "lightning_fit":  # the iterator of a DataLoader draws a seed for its workers
            torch.empty((), dtype=torch.int64).random_()
        order = random.permutation(random.fold_in(random.fold_in(key, PERMUTATIONS), epoch), len(tree.leaves(rows)[0]))
        for chosen in order.split(case.size):
            yield tree.take(rows, chosen)


def distance(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> float:
    """Return the largest difference of a number of the first's, relative to those above 1."""
    pairs = [(mine[name], other[name]) for mine, other in zip(first, second) for name in mine if mine[name].numel()]
    return max(float(_gap(*(each.detach().to(torch.complex128) for each in pair))) for pair in pairs)


def _gap(first: Tensor, second: Tensor) -> Tensor:
    gap = (first - second).abs() / second.abs().clamp(min=1)
    return torch.where(first == second, 0.0, gap).max()  # bounds may be infinite


def _precise(value: Tensor) -> Tensor:
    """Return numbers in double precision, counts and flags as they are."""
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def refusal(train: Callable[[], Any]) -> str:
    """Return the first line of an error that says what to do instead, which training has to raise."""
    with pytest.raises((RuntimeError, TypeError, ValueError), match=ADVICE) as error:
        train()
    return str(error.value).splitlines()[0]


def outcome(case: Case, way: str) -> float | str:
    """Return how far training is from the plain loop, or the refusal of a way that is not among the case's.

    Raises:
        AssertionError: nothing has trained, or a refusal does not say what to do instead.
    """
    module, data = made(case)
    if way not in case.ways:
        return refusal(lambda: trained(case, way, module, data))
    ours, loop = trained(case, way, module, data), looped(case, way, module, data)
    start = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert distance([{n: client[n] for n in start} for client in loop], [start] * len(data)) > 1e-3, "nothing moves"
    return distance(ours, loop)
