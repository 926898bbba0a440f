"""Triton programs on the pretended device: taken as on CUDA, started on its numbers, and run by Triton's interpreter.

A process that has the interpreter has to say so before it imports Triton, by `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from test_conformance import STARTS
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils._python_dispatch import _disable_current_modes

import fedtorch as ft
from fedtorch import tree
from fedtorch.models.gibbs import sparse
from fedtorch.programs import choice, launch
from support.device_cases import Rounds
from support.device_page import REFERENCES
from support.oracles.closed_forms import distance, linear_clients
from support.oracles.plain_training import seeded
from support.pretended_device import NAME, Far, by_text, pretended

ROUNDS = 2


class Programs(NamedTuple):
    """Rounds that programs compute."""

    rounds: Rounds
    kernels: set[str]  # module.function, of those that run
    apart: float = 1e-8  # how far numbers may be from those of the CPU; relative


def rows(classes: int = 0, dtype: torch.dtype = torch.float64) -> ft.data.FederatedData:
    """Three columns with a real number, or with a class."""
    data = linear_clients([5, 9, 4]).map(lambda rows: tree.to(rows, dtype))
    if not classes:
        return data.map(lambda rows: (rows[0], rows[1][:, None]))
    return data.map(lambda rows: (rows[0], (3 * rows[0].abs().sum(1)).long() % classes))


def descent(module: Callable[[], nn.Module], loss: Any, dtype: torch.dtype = torch.float64, **work: Any) -> Any:
    """Gradient descent of a module that is the same at every call."""
    work.setdefault("optimizer", partial(SGD, lr=0.1))
    return ft.gradient_descent(seeded(module).to(dtype), loss=loss, **work)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def clipped(optimizer: Callable[..., Any]) -> ft.Algorithm:
    """Minibatches of a network, gradients clipped and drawn to the server's model."""
    work = {"optimizer": optimizer, "epochs": 1, "batch_size": 4, "clip": 0.2}
    return ft.fedprox(descent(network, F.cross_entropy, **work), 0.3)


DRAWS = {"philox.draw", "philox.fold"}
CASES: dict[str, Programs] = {
    "a linear model in minibatches": Programs(
        Rounds(
            lambda: ft.gtv(
                descent(lambda: nn.Linear(3, 1), F.mse_loss, epochs=1, batch_size=4), ft.Network.ring(3), 0.5
            ),
            rows,
        ),
        {"glm_steps.linear", *DRAWS},
    ),
    "a linear model with classes": Programs(
        Rounds(
            lambda: ft.fedavg(descent(lambda: nn.Linear(3, 4), F.cross_entropy, torch.float32, steps=3)),
            lambda: rows(4, torch.float32),
        ),
        {"glm_steps.categorical"},
        apart=1e-5,  # of single precision
    ),
    "momentum": Programs(
        Rounds(lambda: clipped(partial(SGD, lr=0.1, momentum=0.9, nesterov=True)), lambda: rows(2)),
        {"stacked_step.squares", "stacked_step.sgd", *DRAWS},
    ),
    "Adam": Programs(
        Rounds(lambda: clipped(partial(Adam, lr=0.05)), lambda: rows(2)),
        {"stacked_step.squares", "stacked_step.adam", *DRAWS},
    ),
    "a Gibbs sampler": Programs(
        Rounds(
            lambda: ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=2),
            lambda: linear_clients([12, 20, 15]),
            lambda algorithm: STARTS["gibbs"],
        ),
        {"gibbs_sweeps.horseshoe", "philox.gamma", *DRAWS},
    ),
}


@contextlib.contextmanager
def interpreted() -> Iterator[set[str]]:
    """Run programs on the pretended device inside; yields those that have run, by module and name.

    Tensors are unwrapped where a program starts. One that is in the CPU's memory is refused there, as Triton does.
    """
    before, seen = (choice.is_cuda, choice.traced, launch._start), set[str]()

    def start(kernel: Any, programs: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        near = [name for name, given in zip(kernel.arg_names, arguments) if type(given) is Tensor]
        if near:
            raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?): {near}")
        own = tuple(given.elem if isinstance(given, Far) else given for given in arguments)
        with _disable_current_modes():
            before[2](kernel, programs, own, options)
        seen.add(f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}")

    def traced(tensors: Any) -> bool:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        return torch._C._len_torch_dispatch_stack() > 1 or any(map(wrapped, tensors))  # one is the device's own

    choice.is_cuda, choice.traced, launch._start = (lambda device: device.type == NAME), traced, start
    try:
        yield seen
    finally:
        choice.is_cuda, choice.traced, launch._start = before


def looked_at(name: str) -> dict[str, Any]:
    """How far rounds by programs are from those on the CPU, which programs have run, and waits where they start."""
    warnings.simplefilter("ignore")
    case = CASES[name]
    with pretended() as counted, interpreted() as seen:
        run = case.rounds.run(NAME)
        for _ in range(ROUNDS):
            counted.clear()
            run.step()
        waits = [line for line in by_text(counted.waits) if line.startswith(REFERENCES)]
        found = tree.to(run.tensors(), "cpu")
    near = case.rounds.run("cpu")
    for _ in range(ROUNDS):
        near.step()
    return {"apart": distance(found, near.tensors()), "kernels": sorted(seen), "waits": waits}


def started_on_two_places() -> None:
    """Start a program of tensors of two places."""
    from fedtorch.programs.triton import philox

    keys = torch.zeros(3, dtype=torch.int64)
    with pretended(), interpreted():
        launch.launch(philox.fold, 1, keys.to(NAME), keys.to(NAME), keys, 3, 1, BLOCK=4)
