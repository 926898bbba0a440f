"""Every kernel beside `torch.compile` of its reference and beside the vendor's library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedtorch as ft
from experiments.benchmarks.parts.gpu_timing import Rates, Timed, kernels, timed
from experiments.common import Row
from fedtorch.models.gibbs import gibbs_sweeps
from fedtorch.programs import glm_steps, stacked_step
from fedtorch.programs.stacked_step import ClientValues


class Case(NamedTuple):
    """One operation at one size."""

    setting: str
    moved: float  # bytes that it must read and write
    operations: float  # floating-point operations that it must do
    double: bool  # in float64
    ours: Callable[[], object]
    vendor: dict[str, Callable[[], object]]  # by name


def normal(seed: int, *shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers to work on."""
    return ft.random.normal(ft.random.key(seed).to(device), shape, dtype)


def philox(sizes: Sequence[int], device: str) -> Case:
    """Normal numbers of many keys."""
    keys, count = sizes
    key = ft.random.fold_in(ft.random.key(0).to(device), torch.arange(keys, device=device))
    ours = partial(ft.random.normal, key, (count,))
    vendor: dict[str, Callable[[], object]] = {"torch.randn": lambda: torch.randn(keys, count, device=device)}
    return Case(f"philox: {keys} × {count} normal numbers", 4.0 * keys * count, 30.0 * keys * count, True, ours, vendor)


def adam(sizes: Sequence[int], device: str) -> Case:
    """A step of Adam on a stack."""
    clients, size = sizes
    x, g, first, second = (normal(i, clients, size, device=device) for i in range(4))
    second = second.square_()
    parameter = torch.nn.Parameter(x.clone())
    parameter.grad = g
    fused = torch.optim.Adam([parameter], lr=1e-3, fused=True)
    ours = partial(stacked_step.adam, x, g, first, second, ClientValues(3), lr=1e-3)
    setting = f"stacked_step: Adam, {clients} × {size}"
    return Case(setting, 28.0 * x.numel(), 12.0 * x.numel(), False, ours, {"torch.optim.Adam(fused)": fused.step})


def glm(sizes: Sequence[int], device: str) -> Case:
    """Twenty full-batch steps of linear clients."""
    clients, rows, features, steps = sizes
    x, y = normal(1, clients, rows, features, device=device), normal(2, clients, rows, device=device)
    count = torch.full((clients,), rows, device=device)
    start = torch.zeros(clients, features, device=device)
    ours = partial(glm_steps.glm_steps, glm_steps.GAUSSIAN, x, y, count, start, steps=steps, lr=0.01)

    def gram() -> Tensor:
        curvature, target, theta = x.mT @ x, x.mT @ y[..., None], start[..., None]
        for _ in range(steps):
            theta = theta - 0.02 / rows * (curvature @ theta - target)
        return theta

    setting = f"glm_steps: {clients} clients, {rows} × {features}, {steps} steps"
    return Case(setting, 4.0 * x.numel(), 4.0 * x.numel() * steps, False, ours, {"Gram matrices (cuBLAS)": gram})


def sweeps(sizes: Sequence[int], device: str) -> Case:
    """Gibbs sweeps of small regressions."""
    clients, size, count = sizes
    double = partial(normal, device=device, dtype=torch.float64)
    x = double(1, clients, size + 20, size)
    ones = torch.ones(clients, 1, size, device=device, dtype=torch.float64)
    rows = gibbs_sweeps.Rows(x.mT @ x, double(2, clients, size), double(3, clients).square() + 1, 2 + ones[:, 0, 0])
    heard = gibbs_sweeps.SweepPrior(double(4, clients, 1, size), ones, ones[..., 0])
    chains = gibbs_sweeps.Chains(0 * ones, ones, ones, ones[..., 0])
    keys = ft.random.fold_in(ft.random.key(5).to(device), torch.arange(clients, device=device))[:, None]
    ours = partial(gibbs_sweeps.gibbs_sweeps, rows, heard, chains, keys, count)
    work = clients * count * (size**3 / 3 + 4.0 * size**2 + 150.0 * size)
    moved = 8.0 * clients * (size**2 + 8 * size)
    setting = f"gibbs_sweeps: {clients} problems of {size}, {count} sweeps"
    return Case(setting, moved, work, True, ours, {"batched Cholesky": partial(off, ours)})


def off(work: Callable[[], object]) -> object:
    """The reference."""
    with kernels("off"):
        return work()


class Kind(NamedTuple):
    """An operation, and its sizes, to whose product the cost is in proportion."""

    case: Callable[[Sequence[int], str], Case]
    small: tuple[int, ...]
    counted: tuple[int, ...]  # for `kernel_bounds`
    full: tuple[int, ...]


CASES = {
    "philox": Kind(philox, (3, 8), (100, 10_000), (10_000, 10_000)),
    "stacked_step": Kind(adam, (3, 40), (50, 9_610), (10_000, 9_610)),
    "glm_steps": Kind(glm, (3, 8, 4, 2), (500, 64, 32, 20), (100_000, 64, 32, 20)),
    "gibbs_sweeps": Kind(sweeps, (2, 2, 2), (400, 10, 20), (4_000, 10, 20)),
}


def rows(name: str, small: bool, device: str, rates: Rates) -> list[Row]:
    """A kernel's figures."""
    kind = CASES[name]
    case = kind.case(kind.small if small else kind.full, device)
    compiled = torch.compile(case.ours, backend="eager" if device == "cpu" else "inductor", dynamic=False)
    ways: dict[str, tuple[str, Any]] = {
        "Triton": ("on" if device == "cuda" else "interpret", case.ours),
        "reference": ("off", case.ours),
        "torch.compile of the reference": ("off", compiled),
        **{other: ("off", work) for other, work in case.vendor.items()},
    }
    times: dict[str, Timed] = {}
    for way, (mode, work) in ways.items():
        try:
            with kernels(mode):
                times[way] = timed(work, device)
        except Exception as error:  # whatever a compiler or a library refuses; the others are still worth their time
            sys.stderr.write(f"{case.setting}: {way} refused: {type(error).__name__}: {str(error).splitlines()[0]}\n")
    found = [Row(case.setting, f"ms, {way}", 1e3 * time.median, 1e3 * time.spread) for way, time in times.items()]
    if "Triton" not in times:
        return found
    bound = max(case.moved / rates.copy, case.operations / (rates.double if case.double else rates.single))
    spent = times["Triton"].median
    return [
        *found,
        Row(case.setting, "GB/s", case.moved / spent / 1e9),
        Row(case.setting, "GFLOP/s", case.operations / spent / 1e9),
        Row(case.setting, "operations a byte", case.operations / case.moved),
        Row(case.setting, "share of the measured bound", bound / spent),
        *(
            Row(case.setting, f"times faster than {way}", t.median / spent)
            for way, t in times.items()
            if way != "Triton"
        ),
    ]
