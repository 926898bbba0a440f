"""The plain loop of every client, in torch alone, and the average of what it trains."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from situations.case import Case

Tensors = dict[str, Tensor]


@contextmanager
def seeded(seed: int, dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Draw from torch's generator at `seed`, in `dtype` unless told, and put both back."""
    before, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_rng_state(state)


def made(case: Case) -> nn.Module:
    """Return the module at its start, the same in every call."""
    with seeded(3, case.dtype):
        return case.make()


def rows_of(case: Case, counts: tuple[int, ...]) -> list[Any]:
    """Return the rows of every client."""
    with seeded(11, case.dtype):
        return [case.rows(count) for count in counts]


def batches(rows: Any, size: int | None) -> list[Any]:
    """Return the minibatches of rows in order, or all rows as one batch."""
    count = _count(rows)
    starts = range(0, count, size or count)
    return [_take(rows, start, start + (size or count)) for start in starts]


def _count(rows: Any) -> int:
    while not isinstance(rows, Tensor):
        rows = next(iter(rows.values() if isinstance(rows, Mapping) else rows))
    return len(rows)


def _take(rows: Any, start: int, stop: int) -> Any:
    if isinstance(rows, Tensor):
        return rows[start:stop].clone()
    if isinstance(rows, Mapping):
        return {name: _take(each, start, stop) for name, each in rows.items()}
    taken = [_take(each, start, stop) for each in rows]
    return type(rows)(*taken) if hasattr(rows, "_fields") else tuple(taken)


def average(case: Case, clients: list[Any]) -> tuple[Tensors, list[nn.Module]]:
    """Return the tensors of the global module after the case's rounds of plain FedAvg, and each client's module then.

    Parameters are averaged by rows, and so are floating-point buffers; a flag is raised where a client has raised it;
    counts are the clients' own where these agree. With `buffers="local"` clients keep theirs, and none is global.
    """
    local = case.says.get("buffers") == "local"
    starts: list[Tensors] = [{} for _ in clients]
    for number in range(case.rounds):
        modules = [_trained(case, rows, start, number) for rows, start in zip(clients, starts)]
        mean = _mean([tensors(module) for module in modules], [_count(rows) for rows in clients])
        mean = {name: mean[name] for name in tensors(made(case)) if name in mean}  # none that a forward has registered
        if local:
            mean = {name: mean[name] for name, _ in modules[0].named_parameters()}
        starts = [tensors(module) | mean for module in modules]
    if local:
        return mean, [_with(case, start) for start in starts]
    return mean, [_with(case, starts[0])] * len(clients)


def _with(case: Case, start: Tensors) -> nn.Module:
    """Return a new module with these tensors."""
    module = made(case)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in start:
                tensor.copy_(start[name])
    return module


def tensors(module: nn.Module) -> Tensors:
    """Return copies of a module's parameters and buffers by name."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: each.detach().clone() for name, each in named}


def _mean(clients: list[Tensors], counts: list[int]) -> Tensors:
    mean = {}
    for name, first in clients[0].items():
        each = [client[name] for client in clients]
        if first.is_floating_point() or first.is_complex():
            wide = torch.complex128 if first.is_complex() else torch.float64
            mean[name] = (sum(n * t.to(wide) for n, t in zip(counts, each)) / sum(counts)).to(first.dtype)
        elif first.dtype == torch.bool:
            mean[name] = torch.stack(each).any(0)
        elif all(torch.equal(first, other) for other in each):
            mean[name] = first
    return mean


def _trained(case: Case, rows: Any, start: Tensors, number: int) -> nn.Module:
    module = _with(case, start)
    every = batches(rows, case.size)
    session = _Session(module, case, len(every), number)
    for epoch in range(case.epochs):
        session.epoch(number * case.epochs + epoch, every)
    return module


def gradients(case: Case, batch: Any) -> Tensors:
    """Return the gradients of a batch's loss at the module's start; those that are None are zero."""
    module = made(case)
    loss = _Session(module, case, 1, 0).loss(batch, 0)
    assert loss is not None
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for name, p in module.named_parameters()}


@dataclass
class _Schedule:
    scheduler: Any
    interval: str
    frequency: int


class _Session:
    """One client's training in one round."""

    def __init__(self, module: nn.Module, case: Case, steps: int, number: int) -> None:
        self.module, self.case, self.steps = module.train(), case, number * case.epochs * steps
        if isinstance(module, L.LightningModule):
            total = case.rounds * case.epochs
            self.trainer = SimpleNamespace(
                current_epoch=0, global_step=0, training=True, max_epochs=total, strategy=None, lightning_module=module,
                estimated_stepping_batches=total * steps, state=SimpleNamespace(stage=None), optimizers=[],
            )  # fmt: skip
            module.trainer = self.trainer
            module.log = module.log_dict = lambda *args, **options: None
            self.hooked = True
            configured = module.configure_optimizers()
        else:
            self.hooked = False
            assert case.optimizer is not None
            configured = case.optimizer([p for p in module.parameters() if p.requires_grad])
        self.optimizer, self.schedules = _configured(configured)
        self.positional = self.hooked and len(inspect.signature(module.training_step).parameters) > 1

    def epoch(self, epoch: int, every: list[Any]) -> None:
        for index, batch in enumerate(every):
            if self.hooked:
                self.trainer.current_epoch, self.trainer.global_step = epoch, self.steps
            if not self.hooked:
                self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(batch, index)
            if self.hooked:  # a Trainer empties gradients after the training step
                self.optimizer.zero_grad(set_to_none=True)
            if loss is not None:
                loss.backward()
                if (norm := self.case.says.get("clip")) is not None:
                    nn.utils.clip_grad_norm_(self.module.parameters(), norm)
                self.optimizer.step()
            self.steps += 1
            self._schedule("step", index + 1)  # Lightning counts minibatches anew in every epoch
        self._schedule("epoch", epoch + 1)

    def loss(self, batch: Any, index: int) -> Tensor | None:
        """Return the training loss of a batch."""
        if self.hooked:
            answer = self.module.training_step(batch, index) if self.positional else self.module.training_step(batch)
            return answer["loss"] if isinstance(answer, Mapping) else answer
        inputs, target = batch
        assert self.case.loss is not None
        return self.case.loss(outputs(self.module, inputs), target)

    def _schedule(self, interval: str, count: int) -> None:
        for each in self.schedules:
            if each.interval == interval and count % each.frequency == 0:
                each.scheduler.step()


def outputs(module: nn.Module, inputs: Any) -> Any:
    """Return the module's output; inputs that are a dict reach `forward` by name."""
    return module(**inputs) if isinstance(inputs, Mapping) else module(inputs)


def _configured(configured: Any) -> tuple[torch.optim.Optimizer, list[_Schedule]]:
    schedules: Any = []
    if isinstance(configured, Mapping):
        configured, schedules = configured["optimizer"], configured.get("lr_scheduler", [])
    elif isinstance(configured, tuple):
        configured, schedules = configured
    (optimizer,) = configured if isinstance(configured, list) else [configured]
    listed = schedules if isinstance(schedules, list) else [schedules]
    return optimizer, [_schedule(each) for each in listed]


def _schedule(each: Any) -> _Schedule:
    if not isinstance(each, Mapping):
        return _Schedule(each, "epoch", 1)
    return _Schedule(each["scheduler"], each.get("interval", "epoch"), each.get("frequency", 1))


def scores(case: Case, module: nn.Module, rows: Any) -> dict[str, float]:
    """Return the metrics of a module on a client's rows, by name."""
    if not case.scores:
        return {}
    inputs, target = case.split(rows)
    with torch.no_grad():
        prediction = outputs(module.eval(), inputs)
        return {name: float(each(prediction, target).double().mean()) for name, each in case.scores.items()}
