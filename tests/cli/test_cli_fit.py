"""A federation from a configuration file: the numbers of the same one in code, and what is said of a wrong file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch.loggers import CSVLogger
from support.oracles.closed_forms import same_bits
from torch import nn

import fedtorch as ft
from fedtorch.cli import _configuration as configuration, main

ROUNDS = 4


def call(path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


LOCAL = call("fedtorch.least_squares", module=call("torch.nn.Linear", in_features=64, out_features=1))


def given() -> dict[str, Any]:
    """A file's content: digits on ten clients, some of which are away."""
    rows = call("fedtorch.data.digits")
    network = call("torch.nn.Linear", in_features=64, out_features=10)
    descent = call("torch.optim.SGD", lr=0.1, momentum=0.5)
    loss = "torch.nn.functional.cross_entropy"
    local = call("fedtorch.gradient_descent", module=network, epochs=1, batch_size=32, loss=loss, optimizer=descent)
    partition = call("fedtorch.data.partition", rows=rows, partitioner=call("fedtorch.data.iid"), clients=10, seed=3)
    return {
        "seed_everything": 7,
        "algorithm": call("fedtorch.fedavg", local=local, mu=0.1),
        "data": partition,
        "holdout": 0.25,
        "metrics": {"accuracy": "fedtorch.metrics.accuracy", "error": loss},
        "cohort": call("fedtorch.poisson_cohort", rate=0.6, clients=10),
        "faults": [call("fedtorch.dropouts", probability=0.2), call("fedtorch.lost_messages", after=0.1)],
        "trainer": {
            "max_epochs": ROUNDS,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
        },
    }


def in_code() -> ft.Federation:
    """The same by hand."""
    L.seed_everything(7)
    local = ft.gradient_descent(
        nn.Linear(64, 10),
        epochs=1,
        batch_size=32,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5),
    )
    data = ft.data.partition(ft.data.digits(), ft.data.iid(), clients=10, seed=3)
    training, validation = data.split(0.75, 7)
    return ft.Federation(
        ft.fedavg(local, mu=0.1),
        ft.InProcess(training),
        cohort=ft.poisson_cohort(0.6, 10),
        faults=ft.dropouts(0.2) | ft.lost_messages(after=0.1),
        validation=validation,
        metrics={"accuracy": ft.metrics.accuracy(), "error": nn.functional.cross_entropy},
        seed=7,
    )


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes content into a file of an empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def written(content: Any, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return name

    return written


def run(command: str, *arguments: str) -> ft.Federation:
    """The federation that a command has trained."""
    return configuration.FederationCLI(command, arguments).model


def same_history(one: ft.Federation, other: ft.Federation) -> bool:
    first, second = (each.history.drop(columns="seconds") for each in (one, other))
    return first.equals(second)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> ft.Federation:
    """The federation of the file as it is, trained to the end."""
    file = tmp_path_factory.mktemp("given") / "run.yaml"
    file.write_text(yaml.safe_dump(given()))
    return run("fit", "--config", str(file))


def test_a_file_gives_the_bits_of_the_same_in_code(straight: ft.Federation) -> None:
    by_hand = in_code()
    L.Trainer(**{"enable_model_summary": False, **given()["trainer"]}).fit(by_hand)
    assert straight.round == ROUNDS
    assert same_bits(straight.server, by_hand.server)
    assert same_bits(straight.run.tensors(), by_hand.run.tensors())
    assert same_history(straight, by_hand)
    assert {"val_accuracy", "val_error_max"} <= set(straight.history)


def test_what_is_printed_is_the_same_run_again(write, straight, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", write(changed("cohort", 5)), "--algorithm.local.epochs", "2", "--print_config"])
    assert caught.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["cohort"] == 5
    assert printed["algorithm"]["init_args"]["local"]["init_args"]["epochs"] == 2
    assert printed["population"]["class_path"] == "fedtorch.InProcess"
    printed["algorithm"]["init_args"]["local"]["init_args"]["epochs"] = 1
    again = run("fit", "-c", write({**printed, "cohort": given()["cohort"]}))
    assert same_bits(again.server, straight.server)
    assert same_history(again, straight)


def test_a_run_on_disk_goes_on_and_is_scored(write, straight, capsys: pytest.CaptureFixture[str]) -> None:
    content = given()
    logger = call("lightning.pytorch.loggers.CSVLogger", save_dir="logs")
    stopping = call("EarlyStopping", monitor="val_error", patience=9)
    content["trainer"] |= {"enable_checkpointing": True, "logger": logger, "callbacks": [stopping]}
    file = write(content)
    assert main(["fit", "--config", file, "--trainer.max_epochs", "2"]) == 0
    assert capsys.readouterr().out.startswith("2 rounds\n  val_accuracy")
    (logs,) = Path("logs").rglob("version_0")
    assert yaml.safe_load((logs / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
    told = yaml.safe_load((logs / "hparams.yaml").read_text())
    assert (told["algorithm"], told["mu"], told["seed"], told["clients"]) == ("fedavg", 0.1, 7, 10)
    assert (told["local/solver"], told["local/epochs"], told["local/module"]) == ("gradient_descent", 1, "Linear")
    assert "lr: 0.1" in told["local/optimizer"]
    assert told["local/loss"].startswith("torch.nn.functional.cross_entropy")
    assert all(isinstance(value, (bool, int, float, str, type(None))) for value in told.values())
    (checkpoint,) = logs.rglob("*.ckpt")
    capsys.readouterr()
    scoring = ["--config", file, "--ckpt_path", str(checkpoint)]
    with pytest.warns(UserWarning, match="The dirpath has changed"):
        main(["validate", *scoring])
    assert str(straight.history["val_accuracy"][1])[:8] in capsys.readouterr().out
    with pytest.warns(UserWarning, match="The dirpath has changed"):
        resumed = run("fit", *scoring)
    assert same_bits(resumed.server, straight.server)
    assert same_history(resumed, straight)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.slow
def test_another_learning_rate_goes_on_when_told_so(write, capsys: pytest.CaptureFixture[str]) -> None:
    content = changed("trainer.max_epochs", 1)
    content["trainer"]["enable_checkpointing"] = True
    main(["fit", "-c", write(content)])
    (checkpoint,) = Path().rglob("*.ckpt")
    other = changed("algorithm.init_args.local.init_args.optimizer.init_args.lr", 0.2)
    resuming = ["fit", "-c", write({**other, "trainer": {**other["trainer"], "max_epochs": 2}})]
    resuming += ["--ckpt_path", str(checkpoint)]
    assert main(resuming) == 1
    assert re.search(r"with local\.optimizer.*lr.*`fedtorch fit --anyway true`", capsys.readouterr().err)
    assert main([*resuming, "--anyway", "true"]) == 0
    assert capsys.readouterr().out.startswith("2 rounds")


def test_settings_reach_the_loggers_after_a_resume(tmp_path: Path) -> None:
    class Counting(CSVLogger):
        calls = 0

        def log_hyperparams(self, params: Any) -> None:
            self.calls += "algorithm" in (params or {})
            super().log_hyperparams(params)

    quiet = {"enable_model_summary": False, "accelerator": "cpu", "enable_progress_bar": False}
    for rounds, start in ((1, None), (2, tmp_path / "one.ckpt")):
        logger = Counting(tmp_path, version=rounds)
        trainer = L.Trainer(max_epochs=rounds, logger=logger, enable_checkpointing=False, **quiet)
        trainer.fit(in_code(), ckpt_path=start)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        assert logger.calls == 1
        assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())["mu"] == 0.1


def changed(path: str, value: Any) -> dict[str, Any]:
    """`given` with one of its values changed."""
    content = given()
    *way, last = path.split(".")
    node = content
    for step in way:
        node = node[step]
    node[last] = value
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- algorithm", "Unexpected config: - algorithm"),
        ("algorithm: {class_path: fedtorch.fedavg\n", "Problems parsing config"),
        (
            changed("algorithm.class_path", "fedtorch.fedavgg"),
            "'fedtorch' has no attribute 'fedavgg'; did you mean 'fedavg'?",
        ),
        (changed("algorithm.class_path", "fedtorhc.fedavg"), "No module named 'fedtorhc'"),
        (changed("algorithm.class_path", "fedtorch.random"), "does not correspond to a subclass of Algorithm"),
        (changed("algorithm.init_args.nu", 0.1), "got 'algorithm.nu'; there is local, mu"),
        (
            changed("algorithm.mu", 0.1),
            "in algorithm, but got more; the arguments of fedtorch.fedavg stand in init_args",
        ),
    ],
)
def test_wrong_files_are_refused_by_name(write, content: Any, message: str, capsys) -> None:
    assert main(["fit", "--config", write(content)]) == 2
    assert message in capsys.readouterr().err


def test_a_value_that_a_function_refuses_is_said_with_its_place(write, capsys) -> None:
    assert main(["fit", "--config", write(changed("algorithm.init_args.mu", -1.0))]) == 1
    assert "Expected mu of at least 0, but got -1.0 (in algorithm)" in capsys.readouterr().err


LOCAL_KEYS = "algorithm.init_args.local.init_args"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("cohorts", "cohort"),
        ("rounds", "trainer.max_epochs"),
        ("seed", "seed_everything"),
        ("trainr", "trainer"),
        ("max_epochs", "trainer.max_epochs"),
        ("trainer.max_epoch", "trainer.max_epochs"),
        ("algorithm.init_args.loca", "algorithm.local"),
        (f"{LOCAL_KEYS}.epoch", "algorithm.local.epochs"),
        (f"{LOCAL_KEYS}.optimizer.init_args.momentm", "algorithm.local.optimizer.momentum"),
        ("data.init_args.client", "data.clients"),
        ("faults.1.init_args.afterr", "faults.after"),
        ("population.chunks", "population.chunk"),
        ("population.init_args.chunks", "population.chunk"),
        ("trainer.callbacks.0.init_args.monitr", "trainer.callbacks.monitor"),
    ],
)
def test_a_misspelt_key_is_asked_about_at_its_full_path(write, path: str, meant: str, capsys) -> None:
    content = given()
    content["population"] = {"init_args": {"chunk": 2}} if "init_args" in path else {"chunk": 2}
    content["trainer"]["callbacks"] = [call("EarlyStopping", monitor="train_loss")]
    *way, last = path.split(".")
    node: Any = content
    for step in way:
        node = node[int(step)] if isinstance(node, list) else node[step]
    node[last] = 1
    is_asked_about(["fit", "--config", write(content)], meant, capsys)


def is_asked_about(arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(
        rf"fedtorch: Expected a key or an option, but got '\S+'; did you mean {re.escape(meant)}\?;.*\n", message
    ), message


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ("--rouns 3", "trainer.max_epochs"),
        ("--cohorts=3", "cohort"),
        ("--seed 3", "seed_everything"),
        ("--ckpt_pth last.ckpt", "ckpt_path"),
        ("--epochs 3", "algorithm.local.epochs"),
        ("--trainer.max_epoch 3", "trainer.max_epochs"),
        ("--trainr.max_epochs 3", "trainer.max_epochs"),
        ("--algoritm.local.epochs 3", "algorithm.local.epochs"),
        ("--algorithm.loca.epochs 3", "algorithm.local.epochs"),
        ("--algorithm.local.epoch 3", "algorithm.local.epochs"),
        ("--algorithm.init_args.local.init_args.epoch=3", "algorithm.local.epochs"),
        ("--algorithm.local.optimizer.lrr 3", "algorithm.local.optimizer.lr"),
        (
            "--algorithm.local.optimizer torch.optim.Adam --algorithm.local.optimizer.beta=3",
            "algorithm.local.optimizer.betas",
        ),
        ("--population.chunks 3", "population.chunk"),
        ("--data.client 3", "data.clients"),
        ("--faults.afterr 3", "faults.after"),
        ("--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitr=loss", "trainer.callbacks.monitor"),
    ],
)
def test_a_misspelt_option_is_asked_about_at_its_full_path(write, options: str, meant: str, capsys) -> None:
    is_asked_about(["fit", "--config", write(given()), *options.split()], meant, capsys)


def test_options_that_nobody_can_tell_before_parsing_are_left_to_the_parser(write, capsys) -> None:
    options = ["--metrics.more=fedtorch.metrics.accuracy", "--parameters", "{weight: 1}", "--print_config"]
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", write(given()), *options])
    assert caught.value.code == 0
    assert "more" in yaml.safe_load(capsys.readouterr().out)["metrics"]


def test_rows_for_validation_are_held_out_or_given() -> None:
    data = ft.data.from_tensors([(torch.ones(1, 2), torch.ones(1))])
    with pytest.raises(ValueError, match="Expected either holdout= or validation=, but got both"):
        configuration.federation(in_code().run.algorithm, data, holdout=0.5, validation=data, seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed("algorithm.init_args.mu", "much"), "mu"),
        (changed("algorithm.class_path", "fedavg"), "Expected a dot import path string: fedavg"),
        (changed("algorithm", call("fedtorch.data.digits")), "needs a return annotation"),
        (changed("parameters", call("os.system", command="exit")), "denied"),
        (
            changed("algorithm", call("fedtorch.matrix_normal", local=LOCAL, covariance=3)),
            "Expected class_path: and init_args: of a function, but got 3",
        ),
    ],
)
def test_values_of_other_kinds_are_refused_before_anything_runs(write, content, message: str, capsys) -> None:
    assert main(["fit", "--config", write(content)]) == 2
    assert message in capsys.readouterr().err


def test_files_of_other_machines_are_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "http://127.0.0.1:1/run.yaml"]) == 1
    assert "No such file" in capsys.readouterr().err


def test_functions_without_a_signature_and_methods_of_classes() -> None:
    assert configuration.built([call("torch.zeros", size=[2])])[0].tolist() == [0.0, 0.0]
    assert configuration.built(call("fedtorch.networks.network.Network.ring", nodes=3)).nodes == 3


LOADERS = """
import torch
import fedtorch as ft
from torch.utils.data import DataLoader, TensorDataset

def loaders(shift: float = 0.0) -> ft.data.FederatedLoaders:
    x = torch.linspace(-1, 1, 12, dtype=torch.float32)[:, None] + shift
    return ft.data.from_loaders({name: DataLoader(TensorDataset(x, 2 * x), batch_size=5) for name in "ab"})
"""


def test_clients_may_have_loaders(write) -> None:
    local = call(
        "fedtorch.gradient_descent",
        module=call("torch.nn.Linear", in_features=1, out_features=1),
        epochs=1,
        loss="torch.nn.functional.mse_loss",
        optimizer=call("torch.optim.SGD", lr=0.1),
    )
    content = {
        "algorithm": call("fedtorch.fedavg", local=local),
        "data": call("given_loaders.loaders"),
        "validation": call("given_loaders.loaders", shift=0.5),
        "metrics": {"error": "torch.nn.functional.mse_loss"},
        "trainer": given()["trainer"],
    }
    file = write(content)
    write(LOADERS, "given_loaders.py")
    sys.path.insert(0, str(Path.cwd()))
    made = run("fit", "--config", file)
    L.seed_everything(0)
    by_hand = ft.gradient_descent(
        torch.nn.Linear(1, 1), epochs=1, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    data = sys.modules.pop("given_loaders").loaders
    alone = ft.run(ft.fedavg(by_hand), ft.InProcess(data()), rounds=ROUNDS, progress=False)
    assert same_bits(made.server, alone.server)
    score = alone.evaluate(data(0.5), {"error": F.mse_loss})["error"]
    assert made.history["val_error"].iloc[-1] == score.overall


def test_a_checkpoint_is_tested_and_predicts(write, straight, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = straight, write({**given(), "evaluation_batch_size": 16})
    model.trainer.save_checkpoint("last.ckpt")
    assert main(["test", "--config", file, "--ckpt_path", "last.ckpt"]) == 0
    _, held_out = ft.data.partition(ft.data.digits(), ft.data.iid(), clients=10, seed=3).split(0.75, 7)
    assert str(model.evaluate(held_out)["accuracy"].overall)[:8] in capsys.readouterr().out
    assert main(["predict", "--config", file, "--ckpt_path", "last.ckpt", "--out", "out.safetensors"]) == 0
    assert "predictions of 10 clients in out.safetensors" in capsys.readouterr().out
    predictions = safetensors.torch.load_file("out.safetensors")
    for k, (x, _) in enumerate(held_out):
        torch.testing.assert_close(predictions[str(k)], model.client_module(k)(x).detach())
    assert main(["predict", "--config", file]) == 1
    assert "Expected --ckpt_path FILE, which `fedtorch fit` has saved" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_give_the_numbers_of_one_process(write) -> None:
    content = given()
    content["population"] = call("fedtorch.Distributed")
    content["trainer"] |= {"strategy": call("fedtorch.ClientSharding"), "devices": 2}
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fedtorch.cli"]
    command = [sys.executable, *launch, "fit", "--config", write(content)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    sharded = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert sharded.returncode == 0, sharded.stderr
    values = dict(line.split() for line in sharded.stdout.splitlines()[1:])
    model = run("fit", "--config", write(given()))
    last = model.history.iloc[-1]
    for name in ("val_accuracy", "val_error", "train_loss"):  # six digits are printed, sums of float32 in another order
        assert float(values[name]) == pytest.approx(float(last[name]), rel=1e-5)
    assert float(values["bytes_up"]) == model.run.bytes_up


@pytest.mark.slow
def test_wrappers_are_a_list_the_innermost_first(write) -> None:
    faulty = call("fedtorch.trust.robust.trimmed_mean", fraction=0.2)
    content = given()
    content["wrap"] = [
        call("fedtorch.trust.attacks.sign_flip", clients=[0, 1], scale=3.0),
        call("fedtorch.trust.robust.rule", average=faulty),
    ]
    algorithm = run("fit", "--config", write(content)).run.algorithm
    assert algorithm.settings["wrap"] == {"attacks.sign_flip": 1, "robust.rule": 4}
    content["wrap"].reverse()
    with pytest.raises(ValueError, match=r"write algorithm \| attacks\.sign_flip\(…\) \| robust\.rule\(…\)"):
        run("fit", "--config", write(content))
