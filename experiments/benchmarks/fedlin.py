"""FedLin's speed: HM1 against the paper's loop written plainly, a round of very many devices, HM2 against NUTS.

Ratios are medians over repetitions in which both sides run one after the other in the same process, so that they hold
when the machine's speed drifts.

HM1 has two loops beside it. *Module*: a module, a loss and an optimiser for each device, as one writes it in PyTorch.
*Formula*: the gradient's bare formula, which nobody would train with but which is the leanest loop.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import ep_programs, measure
from fedtorch.federation.algorithms.ep import corrected, settled
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.hierarchical import generalised
from fedtorch.models.linear import LinearHead
from fedtorch.programs import choice

STEPS, ROUNDS, RATE, ALPHA = 20, 30, 0.01, 0.1  # the paper's T, C, η₂, α
ROUNDS_OF_EP = 5


def devices(count: int, rows: int, features: int) -> tuple[Tensor, Tensor]:
    """Related linear devices: x `(K, N, d)`, y `(K, N)`."""
    key = ft.random.key(0)

    def draw(purpose: int, *shape: int) -> Tensor:
        return ft.random.normal(ft.random.fold_in(key, purpose), shape, torch.float64)

    x, theta = draw(0, count, rows, features), draw(1, count, 3) @ draw(2, 3, features)
    return x, (x @ theta[..., None])[..., 0] + 0.3 * draw(3, count, rows)


def shrink_and_average(theta: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """The server's part of Algorithm 1, as both loops below have it."""
    theta = theta - 2 * RATE * torch.linalg.solve(omega, theta)
    return theta, (1 - ALPHA) * omega + ALPHA / theta.shape[1] * theta @ theta.T


def formula_loop(x: Tensor, y: Tensor, rounds: int) -> Tensor:
    """Algorithm 1 with full batches and the gradient's formula, device by device and step by step."""
    theta, omega = torch.zeros(len(x), x.shape[2], dtype=x.dtype), torch.eye(len(x), dtype=x.dtype)
    for _ in range(rounds):
        for k in range(len(x)):
            own = theta[k].clone()
            for _ in range(STEPS):
                own = own + 2 * RATE / x.shape[1] * (x[k].T @ (y[k] - x[k] @ own))
            theta[k] = own
        theta, omega = shrink_and_average(theta, omega)
    return theta


def module_loop(x: Tensor, y: Tensor, rounds: int) -> Tensor:
    """The same as one writes it in PyTorch: a module, its loss and an optimiser for each device."""
    modules = [LinearHead(x.shape[2], intercept=False, dtype=x.dtype) for _ in x]
    omega = torch.eye(len(x), dtype=x.dtype)
    for _ in range(rounds):
        for k, module in enumerate(modules):
            optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
            for _ in range(STEPS):
                optimizer.zero_grad()
                nn.functional.mse_loss(module(x[k]), y[k]).backward()
                optimizer.step()
        with torch.no_grad():
            theta, omega = shrink_and_average(torch.stack([m.coefficients.detach() for m in modules]), omega)
            for module, own in zip(modules, theta):
                module.coefficients.copy_(own)
    return theta


def against_loops(count: int, rows: int, features: int, rounds: int, repeat: int) -> list[common.Row]:
    """A run of HM1, data preparation included, against both loops."""
    x, y = devices(count, rows, features)
    data = ft.data.from_tensors(list(zip(x, y)))
    local = ft.least_squares(LinearHead(features, intercept=False, dtype=x.dtype), steps=STEPS)

    def ours() -> ft.Run:
        return ft.run(ft.matrix_normal(local), ft.InProcess(data), rounds=rounds)

    title = f"HM1: K = {count}, N = {rows}, d = {features}, {rounds} rounds, T = {STEPS}, full batch"
    loops = {"loop, formula": lambda: formula_loop(x, y, rounds), "loop, module": lambda: module_loop(x, y, rounds)}
    times = measure.interleaved({"fedtorch": ours, **loops}, repeat)
    found = [common.Row(title, f"{name}, s", value) for name, value in measure.medians(times).items()]
    for name in loops:
        ratio = measure.ratio(times[name], times["fedtorch"])
        found.append(common.Row(title, f"times faster than the {name} (target 50)", ratio))
    return found


def many_devices(count: int, features: int, rank: int, rounds: int) -> list[common.Row]:
    """A round of very many devices, and the memory of the process."""
    x, y = devices(count, 12, features)
    data = ft.data.FederatedData((x.flatten(0, 1), y.flatten()), torch.full((count,), 12))
    local = ft.least_squares(LinearHead(features, intercept=False, dtype=x.dtype), steps=STEPS)
    began = time.perf_counter()
    run = ft.Run(ft.matrix_normal(local, rank=rank), ft.InProcess(data))
    preparation = time.perf_counter() - began
    times = measure.round_seconds(run, rounds + 1)
    title = f"HM1: K = {count}, d = {features}, Ω of rank {rank}"
    return [
        common.Row(title, "the first round, with preparation, s", preparation + times[0]),
        common.Row(title, "s a round (target < 2)", statistics.median(times[1:])),
        common.Row(title, "peak memory of the process, MB (target < 4000)", common.peak_megabytes()),
    ]


def expectation_propagation(counts: Sequence[int], features: int, draws: int) -> list[common.Row]:
    """HM2, processor seconds a round against K with σ² learnt; a run to convergence against NUTS on the same posterior.

    NUTS gets the log posterior of (μ, log τ, log σ²) with all θ_k integrated, by a function of d × d matrices, so that
    it draws as few dimensions as EP has.
    """
    return [row for count in counts for row in _propagation(count, features, draws if count == counts[0] else 0)]


def _propagation(count: int, features: int, draws: int) -> list[common.Row]:
    """One K; NUTS where there are draws. The program and operations of torch alone take rounds in turns."""
    data = ft.data.from_tensors(list(zip(*devices(count, 40, features))))
    model = hierarchical.linear(hierarchical.normal(features))
    runs = {mode: ft.Run(ft.ep(model), ft.InProcess(data)) for mode in ("on", "off")}
    step = lambda mode: lambda: _with_kernels(mode, runs[mode].step)
    times = measure.interleaved({mode: step(mode) for mode in runs}, ROUNDS_OF_EP, clock=time.process_time)
    title = f"HM2: K = {count}, d = {features}, σ² learnt"
    ended: list[ft.Run] = []

    def whole() -> None:
        ended.append(ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled()))

    ours = common.seconds(whole, time.process_time)
    found = [
        common.Row(title, "processor s a round", statistics.median(times["on"])),
        common.Row(title, "the same by operations of torch alone", statistics.median(times["off"])),
        common.Row(title, "times faster (median of pairs)", measure.ratio(times["off"], times["on"])),
        common.Row(title, "rounds to convergence", ended[0].number),
        common.Row(title, "a whole run, processor s", ours),
        common.Row(
            title, "its correction, processor s", common.seconds(lambda: corrected(ended[0]), time.process_time)
        ),
    ]
    if draws:
        theirs = common.seconds(lambda: nuts(model, data, draws), time.process_time)
        found.append(common.Row(title, f"NUTS, {draws} draws after as many, processor s", theirs))
        found.append(common.Row(title, "times faster than NUTS", theirs / ours))
    return found


def _with_kernels(mode: str, work: Callable[[], object]) -> None:
    before = os.environ.get(choice.VARIABLE)
    os.environ[choice.VARIABLE] = mode
    work()
    if before is None:
        del os.environ[choice.VARIABLE]
    else:
        os.environ[choice.VARIABLE] = before


def nuts(model: hierarchical.Model, data: ft.data.FederatedData, draws: int) -> Tensor:
    """Draws of φ by NUTS from all devices' factors in one place, `(draws, p)`."""
    from pyro.infer import MCMC, NUTS

    block = model.prepare(data.stack(range(len(data))))
    precision = gaussian.unpack(model.prior.normal.precision)

    def potential(at: dict[str, Tensor]) -> Tensor:
        phi = at["phi"]
        log = model.log_factor(phi.expand(len(data), 1, -1), block).sum()
        return 0.5 * phi @ precision @ phi - phi @ model.prior.normal.shift - log

    start = {"phi": torch.zeros(len(precision), dtype=torch.float64)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        chain = MCMC(NUTS(potential_fn=potential), num_samples=draws, warmup_steps=draws, initial_params=start,
                     disable_progbar=True)  # fmt: skip
        chain.run()
    return chain.get_samples()["phi"]


def logistic(count: int, rows: int, features: int, rounds: int, points: int) -> list[common.Row]:
    """A logistic hierarchy with correlated coefficients, as of hospitals: processor time of rounds and a correction."""
    x, eta = devices(count, rows, features)
    y = (ft.random.uniform(ft.random.key(1), (count, rows), torch.float64) < torch.sigmoid(eta)).to(torch.float64)
    model = generalised.logistic(hierarchical.normal(features, correlated=True))
    run = ft.Run(ft.ep(model), ft.InProcess(ft.data.from_tensors(list(zip(x, y)))))
    spent = [common.seconds(run.step, time.process_time) for _ in range(rounds)]
    more = common.seconds(partial(corrected, run, points=points, tolerance=math.inf), time.process_time)
    title = f"HM2, logistic: K = {count}, N = {rows}, d = {features}, correlated"
    return [
        common.Row(title, "processor s a round", statistics.median(spent[1:])),
        common.Row(title, f"processor s, correction by {points} nodes", more),
    ]


def parts(smoke: bool) -> measure.Parts:
    """The benchmarks by name."""
    return {
        "HM1": lambda: against_loops(*((10, 20, 8, 2, 1) if smoke else (100, 200, 8, ROUNDS, 5))),
        "HM1, many devices": lambda: many_devices(1000 if smoke else 100_000, 8, 8, 2 if smoke else 5),
        "HM2": lambda: expectation_propagation(*(([6], 2, 10) if smoke else ([20, 200, 2000], 4, 500))),
        "HM2, logistic": lambda: logistic(*((3, 10, 1, 2, 1024) if smoke else (20, 200, 5, 5, 4096))),
        "HM2, Pyro programs": lambda: ep_programs.measured(*((3, 3) if smoke else (60, 6))),
        "HM2, ten features": lambda: expectation_propagation(*(([6], 5, 2) if smoke else ([20, 200, 2000], 10, 200))),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all parts, or one."""
    measure.run("fedlin", __doc__, parts, argv)


if __name__ == "__main__":
    main()
