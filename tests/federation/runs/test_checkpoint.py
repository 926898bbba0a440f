"""Checkpoints hold everything: a resumed run gives the bits of the uninterrupted one, also after a SIGKILL."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.oracles.closed_forms import linear, linear_clients, mean_squared_error, same_bits, sgd
from support.scripts import killed_training
from support.small_federations import classes, everything, solver, trainer
from torch import Tensor

import fedtorch as ft
from fedtorch import checkpoint
from fedtorch.federation.runs.cohorts import fixed_cohort
from fedtorch.history import History
from fedtorch.models import hierarchical

# Lightning says so whenever a run goes on in its own folder.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

DATA = classes()
SGD, ADAM = solver(), solver("adam", reset="never")
ALGORITHMS: dict[str, Callable[[], ft.Algorithm]] = {
    "fedavg": lambda: ft.fedavg(SGD),
    "personal layers": lambda: ft.personal_layers(SGD, "head.*"),
    "kept Adam": lambda: ft.personal_layers(ADAM, "head.*", mu=0.1),
    "separate": lambda: ft.separate(ADAM),
}


def federation(name: str = "kept Adam", **arguments: Any) -> ft.Federation:
    return ft.Federation(ALGORITHMS[name](), ft.InProcess(DATA), **{"cohort": 3, "seed": 5, **arguments})


def saving(folder: Path, rounds: int, **arguments: Any) -> Any:
    """A Trainer that keeps the checkpoint of every round."""
    keep = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}", **arguments.pop("saving", {}))
    return trainer(max_epochs=rounds, callbacks=[keep], enable_checkpointing=True, **arguments)


def test_a_checkpoint_is_flat_and_loads_safely(tmp_path: Path) -> None:
    model = federation()
    saving(tmp_path, 2).fit(model)
    loaded = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    [(name, extra)] = loaded["state_dict"].items()
    assert name == "_extra_state"
    assert all(type(key) is str and type(value) is Tensor for key, value in extra.items())
    assert same_bits(extra, model.get_extra_state())
    again = federation()
    again.load_state_dict(loaded["state_dict"])
    assert again.round == 2
    assert same_bits(again.get_extra_state(), extra)
    assert same_bits(everything(again), everything(model))
    module, other = again.client_module("site 1"), model.client_module("site 1")
    assert same_bits(dict(module.state_dict()), dict(other.state_dict()))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = federation(name)
    saving(tmp_path, 4).fit(whole)
    resumed = federation(name)
    outer = saving(tmp_path, 4)
    outer.fit(resumed, ckpt_path=tmp_path / "epoch=2.ckpt")
    assert (resumed.round, outer.global_step, outer.current_epoch) == (4, 4, 4)
    assert same_bits(everything(resumed), everything(whole))


def test_resuming_in_a_federation_that_has_run_on(tmp_path: Path) -> None:
    model = federation()
    saving(tmp_path, 5).fit(model)
    expected = everything(model)
    saving(tmp_path, 5).fit(model, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert same_bits(everything(model), expected)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize("when", [{"every_n_train_steps": 1}, {"save_on_train_epoch_end": True}])
def test_whenever_lightning_saves_no_round_is_lost_or_repeated(when: dict[str, Any], tmp_path: Path) -> None:
    validation = {"validation": DATA, "metrics": {"accuracy": ft.metrics.accuracy()}}
    whole = federation(**validation)
    saving(tmp_path, 5, saving=when).fit(whole)
    resumed = federation(**validation)
    outer = saving(tmp_path, 5, saving=when)
    outer.fit(resumed, ckpt_path=tmp_path / "epoch=2.ckpt")
    assert (resumed.round, outer.global_step) == (5, 5)
    assert same_bits(everything(resumed), everything(whole))


def script(*arguments: Any) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    command = [sys.executable, str(tests / "support" / "scripts" / "killed_training.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def dies_and_resumes(folder: Path, fatal: int, where: str) -> dict[str, Tensor]:
    killed = script(folder, 6, fatal, where)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (folder / "final.pt").exists()
    killed_training.main(folder, 6, 0, "end")  # another process than the one that died
    return torch.load(folder / "final.pt", weights_only=True)


def uninterrupted() -> dict[str, Tensor]:
    algorithm = ft.personal_layers(solver("adam", reset="never"), "head.*")
    model = ft.Federation(algorithm, ft.InProcess(classes()), cohort=3, seed=7)
    trainer(max_epochs=6).fit(model)
    return everything(model)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    assert same_bits(dies_and_resumes(tmp_path, 3, "within"), uninterrupted())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["end", "within"])
@pytest.mark.parametrize("seed", range(3))
def test_runs_killed_anywhere_resume_to_the_same_bits(seed: int, where: str, tmp_path: Path) -> None:
    fatal = int(torch.randint(2, 6, (1,), generator=torch.Generator().manual_seed(seed)))
    assert same_bits(dies_and_resumes(tmp_path, fatal, where), uninterrupted())


def test_checkpoints_of_other_federations_are_refused() -> None:
    data = linear_clients([4, 5, 6])

    def quadratic(local: ft.LocalSolver | None = None, clients: Any = data, **arguments: Any) -> ft.Federation:
        return ft.Federation(ft.fedavg(local or sgd(0.05)), ft.InProcess(clients), **arguments)

    model = quadratic()
    trainer(max_epochs=2).fit(model)
    state, before = model.state_dict(), everything(model)
    adam = ft.gradient_descent(linear(), steps=1, reset="never", loss=mean_squared_error, optimizer=torch.optim.Adam)
    others = {
        "a run with seed 3, but got one with 0": quadratic(seed=3),
        "a run with clients 2 names of digest .*, but got one with 3 names": quadratic(clients=data.select([0, 1])),
        "server.weight in the checkpoint to be torch.float64 of shape \\(1, 2\\)": quadratic(
            sgd(0.05, linear(2)), linear_clients([4, 5, 6], features=2)
        ),
        "server.weight in the checkpoint to be torch.float32": quadratic(
            sgd(0.05, linear().float()), data.to(dtype=torch.float32)
        ),
        "clients.state.optimizer": quadratic(adam),
        "with \\[\\], but got one with \\['server.bias'\\]": quadratic(sgd(0.05, linear(bias=False))),
    }
    for message, other in others.items():
        untouched = everything(other)
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        assert same_bits(everything(other), untouched)
    with pytest.raises(ValueError, match="optimizer"):
        model.load_state_dict(quadratic(adam).state_dict())
    assert same_bits(everything(model), before)


def changed(**arguments: Any) -> ft.Run:
    """A run that differs in what is named."""
    data = linear_clients([4, 5, 6])
    local = ft.gradient_descent(
        linear(),
        steps=arguments.pop("steps", 2),
        loss=mean_squared_error,
        optimizer=functools.partial(torch.optim.SGD, lr=arguments.pop("rate", 0.05)),
    )
    algorithm = ft.fedavg(local, mu=arguments.pop("mu", 0.1))
    population = ft.InProcess(data.select(arguments.pop("order", [0, 1, 2])), arguments.pop("chunk", None))
    return ft.Run(algorithm, population, **{"cohort": 2, "faults": ft.dropouts(0.2), **arguments})


OTHERS: dict[str, dict[str, Any]] = {
    "mu": {"mu": 0.2},
    "local.steps": {"steps": 3},
    "local.optimizer": {"rate": 0.1},
    "seed": {"seed": 1},
    "clients": {"order": [0, 2, 1]},
    "cohort": {"cohort": ft.poisson_cohort(0.5, 3)},
    "faults": {"faults": ft.dropouts(0.3)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_run_is_refused(name: str, tmp_path: Path) -> None:
    run = changed()
    list(run.rounds(2))
    run.save(tmp_path / "run.safetensors")
    other = changed(**OTHERS[name])
    with pytest.raises(ValueError, match=f"Expected a checkpoint of a run with {name} .*; pass anyway=True"):
        other.load(tmp_path / "run.safetensors")
    assert other.number == 0
    assert other.load(tmp_path / "run.safetensors", anyway=True).number == 2
    same = changed(chunk=1).load(tmp_path / "run.safetensors")
    assert same_bits(same.server, run.server)


def test_fingerprint_of_cohorts_includes_closures() -> None:
    cohorts = [ft.poisson_cohort(0.5, 3), ft.poisson_cohort(0.4, 3), fixed_cohort([0, 1]), fixed_cohort([0, 2])]
    described = [checkpoint.describe(cohort) for cohort in cohorts]
    assert len(set(described)) == 4
    assert described[0] == checkpoint.describe(ft.poisson_cohort(0.5, 3))


def test_long_descriptions_are_digested() -> None:
    """Of a hierarchical model 17 000 characters, which differ where the model does."""
    first, second = (
        checkpoint.describe(ft.ep(hierarchical.linear(hierarchical.normal(1), noise=noise)).settings["model"])
        for noise in (0.1, 0.2)
    )
    assert re.fullmatch(r"Model\(\{.*… \(\d+ characters of digest [0-9a-f]{16}\)", first)
    assert len(first) < 200
    assert first != second
    with pytest.raises(ValueError, match=r"a run with model .* of digest .*, but got one with Model.* of digest"):
        checkpoint.check_fingerprint({"model": first}, {"model": second})


def documented() -> int:
    """A value."""
    return 1


def test_fingerprint_ignores_docstrings() -> None:
    assert checkpoint.describe(documented).endswith("documented((1), (), None)")


def test_small_whole_numbers_of_a_function_count() -> None:
    one, other = (lambda x: 500 * x + 1), (lambda x: 500 * x + 2)
    assert checkpoint.describe(one) != checkpoint.describe(other)


def test_files_appear_whole_and_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = tmp_path / "run.safetensors", changed()
    run.save(path)
    good = path.read_bytes()
    for damaged in (b"", good[:40], good[:-3], b"x" * 100):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"Expected a safetensors file in .*run\.safetensors"):
            changed().load(path)
    path.write_bytes(good)

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    run.step()
    with pytest.raises(KeyboardInterrupt):
        run.save(path)
    assert path.read_bytes() == good
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_stopping_resumes_too(tmp_path: Path) -> None:
    """A rule on the history stops a resumed run where it would have stopped the uninterrupted one."""

    def enough(history: History) -> bool:
        losses = history["train_loss"]
        return len(losses) > 3 and abs(losses[-1] - losses[-2]) < 0.02 * losses[-1]

    whole = changed(faults=None)
    list(whole.rounds(100, until=enough))
    half = changed(faults=None)
    list(half.rounds(whole.number // 2, until=enough))
    half.save(tmp_path / "half")
    resumed = changed(faults=None).load(tmp_path / "half")
    list(resumed.rounds(100, until=enough))
    assert 3 < whole.number == resumed.number < 100
    assert same_bits(resumed.server, whole.server)
    assert list(resumed.rounds(100, until=enough)) == []


def test_a_run_is_stepped_by_its_rounds() -> None:
    with pytest.raises(TypeError, match=r"use run\.rounds\(\)"):
        list(changed())
    with pytest.raises(ValueError, match="Expected rounds= or until=, but got neither"):
        changed().rounds()


def test_large_checkpoints_are_pointed_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtorch.federation.lightning.federation._LARGE", 100)
    model = federation()
    with pytest.warns(UserWarning, match="every_n_epochs") as caught:
        saving(tmp_path, 3).fit(model)
    assert len([w for w in caught if "every_n_epochs" in str(w.message)]) == 1


def test_a_file_is_read_by_the_library_of_its_format(tmp_path: Path) -> None:
    flat = {
        "rows": torch.arange(12.0).reshape(3, 4)[:, ::2],
        "number": torch.tensor(3),
        "nothing": torch.empty(0, 2),
        "flags": torch.tensor([True, False]),
        "half.of": torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
        "shared": torch.ones(1).expand(4),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "complex": torch.tensor([1 + 2j]).conj(),
    }
    for name, some in {"some": flat, "none": {}}.items():
        checkpoint.write(tmp_path / name, some)
        plain = {each: leaf.detach().resolve_conj().contiguous().clone() for each, leaf in some.items()}
        assert same_bits(safetensors.torch.load_file(tmp_path / name), plain)
        about = {"sha256": 64 * "0"}
        assert (tmp_path / name).stat().st_size == len(safetensors.torch.save(plain, about))
