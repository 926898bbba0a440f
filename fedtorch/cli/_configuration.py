"""A federation and its Trainer from a configuration file, by Lightning's command line."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import jsonargparse
import jsonargparse.typing
import lightning as L
import torchmetrics
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from torch import Tensor

from fedtorch import _files as files
from fedtorch.cli._building import built
from fedtorch.cli._names import check, check_keys, check_options
from fedtorch.cli._predictions import write_predictions
from fedtorch.data import FederatedData, FederatedLoaders
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.algorithms.ep.algorithm import Factors
from fedtorch.federation.algorithms.matrix_normal.algorithm import Shrinkage
from fedtorch.federation.exchanges.exchange import Exchange
from fedtorch.federation.exchanges.robust import Rule
from fedtorch.federation.lightning.federation import Federation
from fedtorch.federation.populations.distributed import Distributed
from fedtorch.federation.populations.in_process import InProcess
from fedtorch.federation.runs.cohorts import Asked
from fedtorch.federation.runs.evaluation import Split, inputs_and_targets
from fedtorch.federation.runs.faults import Faults
from fedtorch.federation.wrapper import Wrapper
from fedtorch.history import Recorder
from fedtorch.metrics.stacked import StackedMetric
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.penalties import ShrinkagePrior
from fedtorch.models.matrix_normal import CovarianceUpdate


def federation(
    algorithm: Algorithm,
    data: FederatedData | FederatedLoaders,
    holdout: float = 0.0,
    validation: FederatedData | FederatedLoaders | None = None,
    test: FederatedData | FederatedLoaders | None = None,
    metrics: dict[str, StackedMetric | torchmetrics.Metric | Callable[[Tensor, Tensor], Tensor]] | None = None,
    split: Split = inputs_and_targets,
    evaluation_batch_size: int | None = None,
    population: Callable[[FederatedData | FederatedLoaders], InProcess | Distributed] = InProcess,
    parameters: Any = None,
    cohort: Asked = None,
    faults: Faults | list[Faults] | None = None,
    wrap: list[Wrapper] | None = None,
    record: list[Recorder] | None = None,
    on_bad_message: Literal["raise", "drop"] = "raise",
    anyway: bool = False,
    joined: Literal["new"] | None = None,
    *,
    seed: int,
) -> Federation:
    """Return the federation of a configuration file, whose keys these are; `fedtorch fit --help` shows them from here.

    Args:
        algorithm: what clients and server compute, with its local solver and its module.
        data: the clients' rows, or their loaders.
        holdout: the part of every client's rows that is kept aside for validation; drawn by the seed.
        validation: rows of the same clients for validation, where they are not held out, as none are of loaders.
        test: rows of the same clients for `test` and `predict`; default: those that are held out.
        metrics: by name, for validation and test; default: what the module's `validation_step` or `test_step` logs.
        split: the path of a function rows -> (inputs, targets), for metrics of rows that are not (x, y).
        evaluation_batch_size: rows of a client that are scored or predicted at once; default: all of them.
        population: where the clients run.
        parameters: where training starts; default: the algorithm's own start.
        cohort: how many clients are asked each round, which, by ids, or a function such as `fedtorch.poisson_cohort`.
        faults: what goes wrong, one or several.
        wrap: wrappers of the algorithm, the innermost first, as `algorithm | wrapper | wrapper` in Python.
        record: who follows the run, such as a `fedtorch.Sampler`.
        on_bad_message: what a message with NaN or Inf does.
        anyway: whether --ckpt_path may be of other settings or rows.
        joined: "new" where --ckpt_path may be of fewer clients, whom others have joined.
        seed: of all randomness.

    Raises:
        ValueError: both `holdout` and `validation`, or what a `Federation` refuses.
    """
    if holdout and validation is not None:
        raise ValueError("Expected either holdout= or validation=, but got both")
    if holdout:
        data, validation = data.split(1 - holdout, seed)
        test = test or validation
    every_fault = functools.reduce(operator.or_, faults) if isinstance(faults, list) else faults
    return Federation(
        functools.reduce(operator.or_, wrap or (), algorithm),
        population(data),
        parameters,
        cohort=cohort,
        validation=validation,
        test=test,
        metrics=metrics,
        split=split,
        evaluation_batch_size=evaluation_batch_size,
        seed=seed,
        faults=every_fault,
        record=record or (),
        on_bad_message=on_bad_message,
        anyway=anyway,
        joined=joined,
    )


KEYS = [name for name in inspect.signature(federation).parameters if name != "seed"] + ["trainer", "seed_everything"]


def check_file(file: Path) -> dict[str, Any]:
    """Refuse keys that are none, and what the names in a configuration file do not stand for; return its content.

    Raises:
        ValueError: the message says what there is.
    """
    content = yaml.safe_load(file.read_text())
    check_keys(content, [*KEYS, "ckpt_path", "verbose", "out"], file)
    given = content.get("population")
    if isinstance(given, dict) and "class_path" not in given:  # the arguments of the default
        content["population"] = {"class_path": "fedtorch.InProcess", "init_args": given.get("init_args", given)}
    check(content)
    return content


def merged(one: Any, other: Any) -> Any:
    """Return a content with that of a later file over it.

    >>> merged({"cohort": 3, "trainer": {"max_epochs": 1}}, {"trainer": {"logger": False}})
    {'cohort': 3, 'trainer': {'max_epochs': 1, 'logger': False}}
    """
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return {**one, **{key: merged(one.get(key), value) for key, value in other.items()}}


class FederationCLI(LightningCLI):
    """Lightning's command line for a `federation`, whose arguments are keys at the top of the file.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        arguments: what follows it.
    """

    def __init__(self, command: str, arguments: Sequence[str]) -> None:
        _allow_functions()
        self.command = command
        super().__init__(
            save_config_callback=_Saved,
            seed_everything_default=0,
            trainer_defaults={"enable_model_summary": False},
            parser_class=_Parser,
            args=[command, *arguments],
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the command that was given, and the arguments of the Trainer's method that are not the user's."""
        of_fit = {"train_dataloaders", "val_dataloaders"}
        return {self.command: {"model", "dataloaders", "datamodule", "weights_only", "return_predictions", *of_fit}}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Return the federation's arguments at the top, and the Trainer's below `trainer`."""
        parser.add_function_arguments(federation, skip={"seed"}, fail_untyped=False)
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        if self.command == "predict":
            parser.add_argument("--out", type=str, default="predictions.safetensors", help="the file to write")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, after a look at the names in the files and those of the options."""
        content = {**dict.fromkeys(KEYS), "population": {"class_path": "fedtorch.InProcess"}}
        for file in _files(args):
            content = merged(content, check_file(file))
        extra = ["out"] if self.command == "predict" else []
        hidden = self.subcommands()[self.command]
        of_method = inspect.signature(getattr(L.Trainer, self.command)).parameters.keys() - hidden - {"self"}
        try:
            check_options(args[1:], content, ["config", "print_config", *extra, *of_method])
        except ValueError as error:
            parser.error(str(error))
        self.config = parser.parse_args(args)
        if self.command in ("test", "predict") and not self.config[self.command].get("ckpt_path"):
            raise ValueError(f"Expected --ckpt_path FILE, which `fedtorch fit` has saved, but {self.command} got none")

    def instantiate_classes(self) -> None:
        """Build everything, the federation and the Trainer last."""
        given = built(self.config[self.subcommand].as_dict())
        self.config_init = jsonargparse.Namespace({self.subcommand: jsonargparse.Namespace(given)})
        of_federation = {name: given[name] for name in inspect.signature(federation).parameters if name in given}
        self.datamodule, self.model = None, federation(**of_federation, seed=int(given["seed_everything"]))
        self.trainer = self.instantiate_trainer()

    def predict(self, **options: Any) -> None:
        """Write what the models of a checkpoint predict."""
        predictions = self.trainer.predict(**options)
        names, out = self.model.run.population.names, Path(self.config[self.subcommand]["out"])
        assert predictions is not None
        if self.trainer.is_global_zero:
            write_predictions(out, dict(zip(names, predictions)))
            sys.stdout.write(f"predictions of {len(predictions)} clients in {out}\n")

    def after_fit(self) -> None:
        """Say how it ended, and where the logs are."""
        metrics = {name: float(value) for name, value in self.trainer.logged_metrics.items()}
        values = [f"  {name:24} {x:{'.0f' if x.is_integer() else 'g'}}\n" for name, x in metrics.items()]
        logs = [f"  logs {self.trainer.log_dir}\n"] if self.trainer.loggers else []
        if self.trainer.is_global_zero:
            sys.stdout.write("".join([f"{self.model.round} rounds\n", *values, *logs]))


class _Parser(LightningArgumentParser):
    """Says what is wrong in a line or two, where its own answer to a wrong call begins with all options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if "does not correspond to a subclass" in message:
            message += "; a function of your own has to say what it returns, such as -> FederatedData or -> Tensor"
        sys.stderr.write(f"fedtorch: {message}; `fedtorch fit --help` says what there is\n")
        raise SystemExit(2) from ex


class _Saved(SaveConfigCallback):
    """Keeps the configuration beside the logs, unless these are in the current folder, where the user's own may be."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = Path(trainer.log_dir or "") if trainer.loggers else Path()
        if trainer.is_global_zero and folder.resolve() != Path.cwd():
            folder.mkdir(parents=True, exist_ok=True)
            files.replace(folder / self.config_filename, self.parser.dump(self.config).encode())


@functools.cache
def _allow_functions() -> None:
    """Let a path name a function that makes a dataclass or a tuple of functions, and reads files of this machine only.

    A named tuple would otherwise be read field by field.
    """
    jsonargparse.set_parsing_settings(
        subclasses_enabled=["is_pure_dataclass"],
        validate_subclass_spec_in_any=True,
        config_read_mode_fsspec_enabled=False,
        import_path_denylist=["shutil"],  # besides those of jsonargparse itself, such as os and subprocess
    )
    for kind in (CovarianceUpdate, Exchange, Factors, Model, Rule, Shrinkage, ShrinkagePrior, Wrapper):
        jsonargparse.typing.register_type(kind, dict, _refused, type_check=_is_call)


def _is_call(value: Any, _: type) -> bool:
    return isinstance(value, (dict, jsonargparse.Namespace)) and "class_path" in value


def _refused(value: Any) -> NoReturn:
    raise ValueError(f"Expected class_path: and init_args: of a function, but got {value!r}")


def _files(arguments: Sequence[str]) -> list[Path]:
    """Return the configuration files that arguments name."""
    files = []
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        option, equals, value = argument.partition("=")
        if option in ("-c", "--config"):
            files.append(Path(value if equals else following))
    return files
