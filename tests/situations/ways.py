"""The ways of training a case, and how far each is from the plain loop."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedtorch as ft
from fedtorch.federation.algorithm import LocalSolver
from fedtorch.federation.runs.run import Run
from situations import loop
from situations.case import Case, Step

FAST: dict[str, dict[str, Any]] = {"default": {}, "batched=False": {"batched": False}}
SLOW: dict[str, dict[str, Any]] = {
    "batched=True": {"batched": True},
    "chunk=1": {},
    "compile=True": {"compile": True},
    "rowwise=True": {"rowwise": True},
    "lightning_fit": {},
}
WAYS = FAST | SLOW
RANKS = "two ranks"  # in a process group
LIKE_DEFAULT = (RANKS, "chunk=1")
PROMISES = ("batched=True", "compile=True", "rowwise=True")
_ADVICE = re.compile(r"Expected .*but|batched=False|lightning_fit|rowwise|buffers=", re.DOTALL)


@dataclass(frozen=True)
class Outcome:
    """How far training and evaluation are from the plain loop's, relative to its movement; or the refusal."""

    training: float = 0.0
    evaluation: float = 0.0
    refusal: str = ""

    def equal(self, case: Case) -> bool:
        return not self.refusal and max(self.training, self.evaluation) <= case.tolerance


def outcome(case: Case, federation: str, way: str) -> Outcome:
    """Train and evaluate a case in one way, and return how far that is from the plain loop.

    Raises:
        AssertionError: the loop moves nothing, or an error is none of the package's refusals.
    """
    clients = loop.rows_of(case, case.counts(federation))
    expected, modules, movement = _looped(case, federation)
    run = _or_refusal(lambda: trained(case, clients, way))
    if isinstance(run, str):
        return Outcome(refusal=run)
    gap = _training_gap(case, run, expected, modules) / movement
    if way == RANKS:  # a rank has only its own clients' rows to evaluate on
        return Outcome(gap)
    found = _or_refusal(lambda: evaluated(case, run, clients))
    if isinstance(found, str):
        return Outcome(gap, refusal=f"evaluation: {found}")
    return Outcome(gap, _evaluation_gap(case, found, modules, clients))


@functools.lru_cache(maxsize=2)
def _looped(case: Case, federation: str) -> tuple[loop.Tensors, list[nn.Module], float]:
    """Return the loop's average, the clients' modules, and the largest movement of a parameter."""
    expected, modules = loop.average(case, loop.rows_of(case, case.counts(federation)))
    movement = max(_gap(each, expected[name]) for name, each in loop.made(case).named_parameters())
    assert movement > 1e-6, f"the loop of {case.name!r} moves nothing"
    return expected, modules, movement


def _or_refusal(function: Callable[[], Any]) -> Any:
    """Return the function's value, or the text of its refusal."""
    try:
        return function()
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        if not _ADVICE.search(str(error)):
            raise
        return f"{type(error).__name__}: {error}"


def trained(case: Case, clients: list[Any], way: str) -> Run:
    """Return the run of a case on clients' rows."""
    data = federated(case, clients)
    population = ft.Distributed(data) if way == RANKS else ft.InProcess(data, chunk=1 if way == "chunk=1" else None)
    return ft.run(ft.fedavg(solver(case, way)), population, rounds=case.rounds, progress=False)


def federated(case: Case, clients: list[Any]) -> Any:
    """Return the clients' rows, or their loaders, which go through them in order."""
    if case.size is None:
        return ft.data.from_tensors(clients)
    loader = lambda rows: DataLoader(TensorDataset(*rows), batch_size=case.size, shuffle=False)
    return ft.data.from_loaders({str(k): loader(rows) for k, rows in enumerate(clients)})


def solver(case: Case, way: str) -> LocalSolver:
    """Return the local solver of a way of training, with what the user says."""
    module = loop.made(case)
    if way == "lightning_fit":
        says = {name: value for name, value in case.says.items() if name in ("buffers", "ignore_hooks")}
        says |= {"gradient_clip_val": case.says["clip"]} if "clip" in case.says else {}
        says |= {"rounds": case.rounds} if "rounds" in case.says else {}
        says |= {"shuffle": False} if case.size is None else {}
        return ft.lightning_fit(_lightning(case, module), max_epochs=case.epochs, **says)
    own = {} if isinstance(module, L.LightningModule) else {"loss": case.loss, "optimizer": case.optimizer}
    return ft.gradient_descent(module, epochs=case.epochs, **own, **{**WAYS.get(way, {}), **case.says})


def _lightning(case: Case, module: nn.Module) -> L.LightningModule:
    if isinstance(module, L.LightningModule):
        return module
    assert case.loss is not None
    loss = case.loss
    return Step(module, lambda step, batch: loss(loop.outputs(step.net, batch[0]), batch[1]), case.optimizer)


def evaluated(case: Case, run: Run, clients: list[Any]) -> dict[str, Any]:
    """Return the run's scores on the clients' rows."""
    return run.evaluate(ft.data.from_tensors(clients), case.scores, split=case.split) if case.scores else {}


def _training_gap(case: Case, run: Run, expected: loop.Tensors, modules: list[nn.Module]) -> float:
    if case.says.get("buffers") == "local":
        every = [(run.client_module(k), loop.tensors(module)) for k, module in enumerate(modules)]
    else:
        every = [(run.global_module(), expected)]
    return max(_gap_of_module(case, *each) for each in every)


def _gap_of_module(case: Case, module: nn.Module, expected: loop.Tensors) -> float:
    if isinstance(module, Step) and case.loss is not None:  # `lightning_fit` of an `nn.Module`
        module = module.net
    got = loop.tensors(module)
    return max(_gap(got[name], each) for name, each in expected.items())


def _evaluation_gap(case: Case, found: dict[str, Any], modules: list[nn.Module], clients: list[Any]) -> float:
    every = [loop.scores(case, module, rows) for module, rows in zip(modules, clients)]
    gaps = [0.0]
    for name in case.scores:
        right = torch.tensor([each[name] for each in every], dtype=torch.float64)
        gaps.append(_gap(found[name].clients.double() / right.abs().clamp(min=1), right / right.abs().clamp(min=1)))
    return max(gaps)


def _gap(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two tensors' numbers; infinities of one sign and NaN are alike."""
    if first.numel() == 0:
        return 0.0
    first, second = (each.detach().to(torch.complex128) for each in (first, second))
    alike = (first == second) | (first.isnan() & second.isnan())
    gap = torch.where(alike, 0.0, (first - second).abs())
    return float(torch.where(gap.isnan(), torch.inf, gap).max())
