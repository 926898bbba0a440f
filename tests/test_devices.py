"""Everything on a pretended device: the CPU's numbers, and no place where tensors of two devices meet."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import pretended_device
from support.device_cases import CASES
from support.device_worker import Worker
from support.oracles.closed_forms import distance
from test_conformance import ALGORITHMS, REORDERED, every_algorithm, models_of, population, start

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.algorithms.ep import corrected

FAR = pretended_device.NAME


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def apart(name: str) -> float:
    """How far models of an algorithm on the device are from those on the CPU."""
    with pretended_device.pretended():
        found = models_of(name, FAR)
    return distance(found, models_of(name, "cpu"))


@every_algorithm
def test_an_algorithm_gives_the_numbers_of_the_cpu(name: str, worker: Worker) -> None:
    assert worker(apart, name) < REORDERED


def numbers(found: Any) -> Any:
    """The numbers of a result, as a tree."""
    if hasattr(found, "select_dtypes"):
        return torch.tensor(found.select_dtypes("number").to_numpy(dtype=float))
    if isinstance(found, (tuple, list)):
        return tuple(map(numbers, found))
    if isinstance(found, dict):
        return {name: numbers(value) for name, value in found.items() if not isinstance(value, str)}
    if hasattr(found, "covariance_matrix"):
        return found.mean, found.covariance_matrix
    return None if isinstance(found, str) or found is None else torch.as_tensor(found)


RECORDS: dict[str, Callable[[], Any]] = {"gibbs": lambda: ft.Sampler(sites=True)}
QUESTIONS: dict[str, Callable[[ft.Run], Any]] = {
    "client_module": lambda run: dict(run.client_module(0).state_dict()),
    "global_module": lambda run: dict(run.global_module().state_dict()),
    "client_losses": lambda run: run.client_losses,
    "predict": lambda run: run.predict(run.population.data),
    "evaluate": lambda run: run.evaluate(run.population.data, {"mse": torch.nn.functional.mse_loss}),
    "summary": lambda run: run.summary(),
    "ranef": lambda run: ft.inference.ranef(run),
    "contrasts": lambda run: ft.inference.contrasts(run, {"1": 1.0, "0": -1.0}),
    "predicted rows": lambda run: ft.inference.predict(run, torch.ones(2, 3).double()),
    "loo": lambda run: ft.inference.loo(run, draws=100),
    "loo of sites": lambda run: ft.inference.loo(run, out="site", draws=100),
    "waic": lambda run: ft.inference.waic(run, draws=100),
    "adapted": lambda run: ft.inference.ranef(ft.inference.adapted(run, next(iter(run.population.data))), total=True),
    "corrected ranef": lambda run: ft.inference.ranef(run, given=corrected(run, points=256)),
    "marginal effects": lambda run: ft.inference.marginal_effects(run),
    "corrected": lambda run: corrected(run, points=256),
}


def answers(name: str, device: str, path: Path, other: Path | None) -> dict[str, Any]:
    """What a run on a device says, or another that goes on there from a file; an error as its class's name."""
    algorithm = ALGORITHMS[name]()
    clients, record = ft.InProcess(population(name).data, device=device), RECORDS.get(name, tuple)()
    run = ft.Run(algorithm, clients, start(name, algorithm), seed=2, record=record)
    if other is None:
        run.step(), run.step()
        run.save(path)
    else:
        run.load(other)
        run.step()
    found: dict[str, Any] = {}
    for question, ask in QUESTIONS.items():
        try:
            found[question] = tree.to(numbers(ask(run)), "cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            found[question] = f"{type(error).__name__}: {error}".replace("Far", "Tensor")
    return found


def differing(name: str, loads: bool) -> dict[str, str]:
    """Questions that are answered otherwise on the device; if `loads`, of runs that have come from the other device."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        near, far = (Path(folder) / f"{device}.ckpt" for device in ("cpu", FAR))
        one = answers(name, "cpu", near, None)
        with pretended_device.pretended():
            two = answers(name, FAR, far, None)
            if loads:
                two = answers(name, FAR, far, near)
        if loads:
            one = answers(name, "cpu", near, far)
    return {
        question: f"{one[question]} on the CPU, {two[question]}"[:2000]
        for question in QUESTIONS
        if not alike(one[question], two[question])
    }


def alike(one: Any, two: Any) -> bool:
    """Whether two answers are the same error, or the same numbers."""
    return one == two if isinstance(one, str) or isinstance(two, str) else distance(one, two) < REORDERED


@every_algorithm
@pytest.mark.parametrize("loads", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_answers_on_a_device_as_on_the_cpu(name: str, loads: bool, worker: Worker) -> None:
    assert worker(differing, name, loads) == {}


def case_apart(name: str) -> float:
    """How far a part is on the device from what it is on the CPU."""
    warnings.simplefilter("ignore")
    with pretended_device.pretended():
        found = CASES[name](FAR)
    return distance(found, CASES[name]("cpu"))


@pytest.mark.parametrize("name", CASES)
def test_a_part_gives_the_numbers_of_the_cpu(name: str, worker: Worker) -> None:
    assert worker(case_apart, name) < REORDERED


def test_tensors_of_two_places_do_not_meet(worker: Worker) -> None:
    with pytest.raises(AssertionError, match="MixedDevices: Expected all tensors to be on the same device"):
        worker(mixing)


def mixing() -> None:
    """Add tensors of two devices."""
    with pretended_device.pretended():
        torch.ones(2, device=FAR) + torch.ones(2)
