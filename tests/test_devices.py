"""Everything on a pretended device: the CPU's numbers, no place where tensors of two devices meet, few waits.

`docs/explanation/devices.md` has what is counted here: `PYTHONPATH=.:tests python -m support.device_page` writes it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import device_page, pretended_device, pretended_programs
from support.algorithm_cases import USUAL
from support.device_cases import CASES, ROUNDS, SLOW
from support.device_worker import Worker
from support.oracles.closed_forms import distance
from support.pretended_accelerator import FarAccelerator
from support.programs import launched
from test_conformance import ALGORITHMS, CASES as EVERY, REORDERED, population, start

import fedtorch as ft
from experiments import common
from experiments.trainers import training
from fedtorch import tree
from fedtorch.federation.algorithms.ep import corrected
from fedtorch.programs import choice
from fedtorch.tree import Tree

FAR = pretended_device.NAME
PAGE = device_page.Page()
slow_or_not = lambda names: [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def look(worker: Worker) -> Callable[[str], Any]:
    return functools.cache(lambda name: worker(device_page.looked_at, name))


every_rounds = pytest.mark.parametrize("name", slow_or_not(ROUNDS))


@every_rounds
def test_rounds_give_the_numbers_of_the_cpu(name: str, look: Callable[[str], Any]) -> None:
    assert look(name)["apart"] < REORDERED


@pytest.mark.parametrize("name", slow_or_not(PAGE.waits))
def test_a_round_waits_as_seldom_as_the_page_says(name: str, look: Callable[[str], Any]) -> None:
    assert PAGE.waits[name] == device_page.row(name, look(name)["waits"])


@pytest.mark.parametrize("name", slow_or_not(ALGORITHMS))
def test_a_round_seldom_waits_for_a_device(name: str, look: Callable[[str], Any]) -> None:
    waits, most = sum(look(name)["waits"].values()), EVERY[name].waits
    assert waits == most or waits < most == USUAL, look(name)["waits"]


def test_the_page_has_no_other_rounds() -> None:
    assert list(PAGE.waits) == [name for name in ROUNDS if name in PAGE.waits]


@pytest.mark.slow
def test_the_page_has_all_rounds() -> None:
    missing = [name for name in ROUNDS if name not in PAGE.waits]
    command = "PYTHONPATH=.:tests python -m support.device_page"
    assert not missing, f"write them by: {command} {' '.join(map(repr, missing))}"


@every_rounds
def test_float64_is_where_the_page_says(name: str, look: Callable[[str], Any]) -> None:
    """In rounds of numbers in float32."""
    assert [line for line in look(name)["doubles"] if not line.startswith(tuple(PAGE.doubles))] == []


@pytest.mark.slow
def test_the_page_says_of_no_more_float64_than_there_is(look: Callable[[str], Any]) -> None:
    lines = {line for name in ROUNDS for line in look(name)["doubles"]}
    assert [place for place in PAGE.doubles if not any(line.startswith(place) for line in lines)] == []


def test_the_page_has_all_that_asks_for_cuda() -> None:
    """No other code names CUDA, but for the names of Lightning's accelerators."""
    root, found = Path(ft.__file__).parent, set()
    for path in root.rglob("*.py"):
        text = path.read_text()
        named = "cuda" in text and any(map(device_page.names_cuda, ast.walk(ast.parse(text))))
        if named and path.name != "_devices.py":
            found.add(path.relative_to(root).as_posix())
    assert found == set(PAGE.cuda)


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


@pytest.mark.parametrize("name", slow_or_not(ALGORITHMS))
@pytest.mark.parametrize("loads", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_answers_on_a_device_as_on_the_cpu(name: str, loads: bool, worker: Worker) -> None:
    assert worker(differing, name, loads) == {}


def case_apart(name: str) -> float:
    """How far a part is on the device from what it is on the CPU."""
    warnings.simplefilter("ignore")
    with pretended_device.pretended():
        found = CASES[name](FAR)
    return distance(found, CASES[name]("cpu"))


@pytest.mark.parametrize("name", slow_or_not(CASES))
def test_a_part_gives_the_numbers_of_the_cpu(name: str, worker: Worker) -> None:
    assert worker(case_apart, name) < REORDERED


needs_triton = pytest.mark.skipif(not choice.installed(), reason="needs Triton; install fedtorch[triton]")


@needs_triton
@pytest.mark.parametrize("name", pretended_programs.CASES)
def test_programs_give_the_numbers_of_the_cpu(name: str, worker: Worker) -> None:
    found, wanted = worker(pretended_programs.looked_at, name), pretended_programs.CASES[name]
    assert found["kernels"] == sorted(wanted.kernels)
    assert found["apart"] < wanted.apart
    assert found["waits"] == []


def test_all_programs_run_on_the_device() -> None:
    assert set().union(*(case.kernels for case in pretended_programs.CASES.values())) == launched()


@needs_triton
def test_programs_start_on_one_place(worker: Worker) -> None:
    with pytest.raises(AssertionError, match=r"cannot be accessed from Triton \(cpu tensor\?\): \['data'\]"):
        worker(pretended_programs.started_on_two_places)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("tensors", "MixedDevices: Expected all tensors to be on the same device"),
        ("generator", "Expected a generator of the place of the tensors in aten::"),
    ],
)
def test_two_places_do_not_meet(fails: str, message: str, worker: Worker) -> None:
    with pytest.raises(AssertionError, match=message):
        worker(mixing, fails)


def mixing(what: str) -> None:
    """Add tensors of two devices, or draw there from the CPU's generator."""
    with pretended_device.pretended():
        if what == "tensors":
            torch.ones(2, device=FAR) + torch.ones(2)
        torch.rand(2, device=FAR, generator=torch.Generator())


def test_draws_of_a_device_are_of_its_own_generators(worker: Worker) -> None:
    assert worker(drawing) == []


def drawing() -> list[str]:
    """What is wrong with draws on the device."""
    wrong, own = [], torch.far.default_generators[0]  # type: ignore[attr-defined]
    with pretended_device.pretended():
        torch.manual_seed(3)
        before = torch.get_rng_state()
        first = torch.rand(4, device=FAR)
        if not torch.equal(torch.get_rng_state(), before):
            wrong.append("the CPU's generator has moved")
        torch.manual_seed(3)
        if not torch.equal(first.cpu(), torch.rand(4, device=FAR).cpu()):
            wrong.append("torch.manual_seed does not seed the device")
        generator = torch.Generator(device=FAR).manual_seed(3)
        if generator.device != first.device or not isinstance(generator, torch.Generator):
            wrong.append(f"a generator of the device is {generator}")
        state = own.get_state()
        if not torch.equal(torch.rand(4, device=FAR, generator=generator).cpu(), first.cpu()):
            wrong.append("a generator with the same seed draws otherwise")
        if not torch.equal(own.get_state(), state):
            wrong.append("a draw from a generator has moved the device's own")
    return wrong


def trained_by(accelerator: str) -> dict[str, Any]:
    """What a client's Trainers with dropout see on an accelerator, and whether two runs are the same."""
    from support.small_federations import Classifier, classes

    places: set[str] = set()

    class Placed(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            places.update({str(batch[0].device), str(self.head.weight.device), str(self.device)})
            return super().training_step(batch, batch_idx)

    given = {"accelerator": FarAccelerator()} if accelerator == FAR else {}
    models = []
    with pretended_device.pretended():
        for _ in range(2):
            local = ft.lightning_fit(Placed(), max_epochs=1, batch_size=4, **given)
            population = ft.InProcess(classes(), device=accelerator)
            models.append(tree.to(ft.run(ft.fedavg(local), population, rounds=2, progress=False).tensors(), "cpu"))
    return {"places": sorted(places), "apart": distance(*models)}


@pytest.mark.parametrize("place", [pytest.param("cpu", marks=pytest.mark.slow), FAR])
def test_trainers_of_clients_train_on_their_accelerator(place: str, worker: Worker) -> None:
    found = worker(trained_by, place)
    assert found == {"places": [place if place == "cpu" else f"{FAR}:0"], "apart": 0}


def in_half_precision() -> dict[str, Any]:
    """Whether the device's autocast is on without and with half precision, and how far both models are apart."""
    from support.oracles.closed_forms import linear, linear_clients, sgd

    asked: set[bool] = set()

    class Looking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear().float()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.add(torch.is_autocast_enabled(FAR))
            return self.layer(x)

    models, on = [], []
    with pretended_device.pretended():
        for precision in ("32", "bf16"):
            asked.clear()
            data = linear_clients([5, 9, 4]).map(lambda rows: tree.to(rows, torch.float32))
            local = sgd(0.1, Looking(), steps=2, precision=precision)
            run = ft.run(ft.fedavg(local), ft.InProcess(data, device=FAR), rounds=2, progress=False)
            models.append(tree.to(run.tensors(), "cpu"))
            on.append(True in asked)
    return {"on": on, "apart": distance(*models)}


def test_half_precision_is_asked_for_and_changes_nothing(worker: Worker) -> None:
    assert worker(in_half_precision) == {"on": [False, True], "apart": 0}


def federated(accelerator: str) -> Tree:
    """A federation under a Trainer with an accelerator: its models and history."""
    from support.oracles.closed_forms import linear_clients, sgd
    from support.small_federations import trainer

    device = "cpu" if accelerator == "cpu" else FAR
    federation = ft.Federation(ft.fedavg(sgd(0.1)), ft.InProcess(linear_clients([5, 9, 4]), device=device))
    given = {"accelerator": FarAccelerator(), "devices": 1} if accelerator == FAR else {}
    trainer(max_epochs=2, **given).fit(federation)
    return tree.to(dict(federation.client_module(0).state_dict()), "cpu"), torch.tensor(
        federation.history["train_loss"]
    )


def federated_apart(accelerator: str) -> float:
    """How far a federation's models on the device are from those on the CPU, under a Trainer there or on the CPU."""
    with pretended_device.pretended():
        found = federated(accelerator)
    return distance(found, federated("cpu"))


def scripted(name: str) -> dict[str, dict[str, float]]:
    """What has come of a script for a device on either device, its Trainer on it."""
    module, found = importlib.import_module(f"experiments.trainers.{name}"), {}
    size = module.SIZES["smoke"]
    for device, accelerator in (("cpu", "cpu"), (FAR, FarAccelerator())):
        with pretended_device.pretended(), tempfile.TemporaryDirectory() as folder, common.quiet():
            made = training.made(module.SCRIPT, size, device)
            fit = training.trainer(Path(folder), size.rounds, made, accelerator).fit
            fit(made.module, made.train, made.validation)
            found[device] = dict(module.found(made.module))
    return found


@pytest.mark.parametrize("name", ["averaging", "networks", "processes", "vertical"])
def test_scripts_for_a_device_train_on_it(name: str, worker: Worker) -> None:
    found = worker(scripted, name)
    assert found[FAR] == pytest.approx(found["cpu"], rel=1e-4)  # of float32, whose sums may come in another order


@pytest.mark.parametrize("accelerator", ["host", FAR])
def test_a_federation_under_a_trainer(accelerator: str, worker: Worker) -> None:
    assert worker(federated_apart, accelerator) < REORDERED
