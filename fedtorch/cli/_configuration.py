"""A federation and its Trainer from a configuration file, by Lightning's command line."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
from fedtorch.cli._misspelt import did_you_mean
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
    """Return the federation of a configuration file, with these keys; `fedtorch fit --help` prints this docstring.

    Args:
        algorithm: what clients and server compute, with its local solver and its module.
        data: the clients' rows, or their loaders.
        holdout: fraction of every client's rows that is held out for validation, drawn by the seed.
        validation: rows of the same clients for validation, if none are held out, as with loaders.
        test: rows of the same clients for `test` and `predict`; default: the rows that are held out.
        metrics: metrics by name, for validation and test; default: those logged by `validation_step` or `test_step`.
        split: path of a function rows -> (inputs, targets), for metrics of rows that are not (x, y).
        evaluation_batch_size: rows of a client that are scored or predicted at once; default: all of them.
        population: where the clients run.
        parameters: initial parameters; default: the algorithm's own start.
        cohort: number of clients asked each round, or their ids, or a function such as `fedtorch.poisson_cohort`.
        faults: one or several simulated faults.
        wrap: wrappers of the algorithm, the innermost first, as `algorithm | wrapper | wrapper` in Python.
        record: recorders of the run, such as a `fedtorch.Sampler`.
        on_bad_message: treatment of a message with NaN or Inf.
        anyway: whether --ckpt_path may have other settings or rows.
        joined: "new" if --ckpt_path may have fewer clients, because others have joined since.
        seed: seed of all randomness.

    Raises:
        ValueError: both `holdout` and `validation`, or arguments that `Federation` refuses.
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


class FederationCLI(LightningCLI):
    """Lightning's command line for a `federation`, whose arguments are keys at the top of the file.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        arguments: the arguments after the command.
    """

    def __init__(self, command: str, arguments: Sequence[str]) -> None:
        _allow_functions()
        self.command = command
        strict = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            parser_kwargs={**strict, command: strict},
            save_config_callback=_Saved,
            seed_everything_default=0,
            trainer_defaults={"enable_model_summary": False},
            parser_class=_Parser,
            args=[command, *arguments],
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the given command, with the arguments of the Trainer's method that users cannot set."""
        of_fit = {"train_dataloaders", "val_dataloaders"}
        return {self.command: {"model", "dataloaders", "datamodule", "weights_only", "return_predictions", *of_fit}}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the federation's arguments at the top level, and the Trainer's below `trainer`."""
        parser.add_function_arguments(federation, skip={"seed"}, fail_untyped=False)
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        if self.command == "predict":
            parser.add_argument("--out", type=str, default="predictions.safetensors", help="the file to write")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments; an error is one line, without jsonargparse's list of all options."""
        try:
            self.config = parser.parse_args(args)
        except argparse.ArgumentError as error:
            of_method = inspect.signature(getattr(L.Trainer, self.command)).parameters
            keys = [*inspect.signature(federation).parameters, "seed_everything", "config", "out", *of_method]
            keys += [f"trainer.{name}" for name in inspect.signature(L.Trainer).parameters]
            keys += [name for file in _files(args) for name in names(_content(file))]
            message = _explained(str(error), keys)
            message = f"{message}; see `fedtorch {self.command} --help`"
            raise argparse.ArgumentError(None, message) from error
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
        """Write the predictions of a checkpoint's models."""
        predictions = self.trainer.predict(**options)
        names, out = self.model.run.population.names, Path(self.config[self.subcommand]["out"])
        assert predictions is not None
        if self.trainer.is_global_zero:
            write_predictions(out, dict(zip(names, predictions)))
            sys.stdout.write(f"predictions of {len(predictions)} clients in {out}\n")

    def after_fit(self) -> None:
        """Print the number of rounds, the last metrics, and the folder of the logs."""
        metrics = {name: float(value) for name, value in self.trainer.logged_metrics.items()}
        values = [f"  {name:24} {x:{'.0f' if x.is_integer() else 'g'}}\n" for name, x in metrics.items()]
        logs = [f"  logs {self.trainer.log_dir}\n"] if self.trainer.loggers else []
        if self.trainer.is_global_zero:
            sys.stdout.write("".join([f"{self.model.round} rounds\n", *values, *logs]))


class _Parser(LightningArgumentParser):
    """A parser that suggests names for a function's misspelt arguments."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an ArgumentError with a suggestion, for `FederationCLI`."""
        wrong, known = _UNKNOWN.search(message), [each.dest for each in self._actions if not each.dest.endswith("help")]
        if wrong and not wrong["hint"]:
            message += did_you_mean(wrong["name"], known) or f"; there is {', '.join(known)}"
        super().error(message, ex)


_UNKNOWN = re.compile(  # jsonargparse's error for an unknown name, followed by the hint of a `_Parser`
    r"(?:Option|Subcommand '\S+' does not accept option|Group '(?P<group>\S+)' does not accept option|"
    r"unrecognized arguments:) '?(?:--)?(?P<name>[^\s'=+]+)[^\s;]*"
    r"(?: is not accepted)?(?P<hint>; did you mean (?P<meant>\S+)\?|; there is [\w, ]+)?"
)
_BESIDE = re.compile(r"Not a valid subclass of \w+\. Got value: \{.*?'class_path': '([^']+)'")
_ELSEWHERE = {"rounds": "trainer.max_epochs", "seed": "seed_everything"}  # arguments of `ft.run`


def _explained(message: str, known: Sequence[str]) -> str:
    r"""Return an error of jsonargparse with the full path of a misspelt name and a suggestion.

    >>> _explained("Parser key \"algorithm\":\n  Option 'muu' is not accepted; did you mean mu?", [])
    "Expected a key or an option, but got 'algorithm.muu'; did you mean algorithm.mu?"
    >>> _explained("unrecognized arguments: --cohorts=3", ["cohort", "data"])
    "Expected a key or an option, but got 'cohorts'; did you mean cohort?"
    """
    path = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    if wrong := _UNKNOWN.search(message):
        name = ".".join(filter(None, [path, wrong["group"], wrong["name"]]))
        if path and wrong["meant"]:
            hint = f"; did you mean {path}.{wrong['meant']}?"
        elif path:
            hint = wrong["hint"] or ""
        else:
            like = difflib.get_close_matches(name, _ELSEWHERE, n=1, cutoff=0.8)
            hint = f"; did you mean {_ELSEWHERE[like[0]]}?" if like else did_you_mean(name, known)
        return f"Expected a key or an option, but got {name!r}{hint}"
    if wrong := _BESIDE.search(message):
        return (
            f"Expected class_path and init_args in {path}, but got more; the arguments of {wrong[1]} stand in init_args"
        )
    if wrong := re.search(r"module '(\S+)' has no attribute '(\w+)'", message):
        asked = "did you mean" in message  # as in errors of fedtorch's packages
        return message if asked else message + did_you_mean(wrong[2], dir(sys.modules[wrong[1]]))
    if "does not correspond to a subclass" in message:
        message += "; your own function needs a return annotation, such as -> FederatedData or -> Tensor"
    return message


def names(content: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of the arguments of all classes and functions in a configuration, as in options.

    >>> list(names({"module": {"class_path": "torch.nn.ReLU"}}))
    ['module.inplace']
    """
    if isinstance(content, list) and content:
        content = content[-1]
    if not isinstance(content, dict):
        return
    if "class_path" in content:
        with suppress(ImportError, AttributeError, TypeError, ValueError):
            yield from (f"{path}{name}" for name in inspect.signature(named(content["class_path"])).parameters)
        content = content.get("init_args") or {}
    for name, part in content.items():
        yield from names(part, f"{path}{name}.")


class _Saved(SaveConfigCallback):
    """Saves the configuration beside the logs, unless that is the current folder, to spare the user's own file."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = Path(trainer.log_dir or "") if trainer.loggers else Path()
        if trainer.is_global_zero and folder.resolve() != Path.cwd():
            folder.mkdir(parents=True, exist_ok=True)
            files.replace(folder / self.config_filename, self.parser.dump(self.config).encode())


def built(value: Any, where: str = "") -> Any:
    """Return a value with every `class_path` in it called; a call that lacks arguments becomes a `functools.partial`.

    jsonargparse builds classes, but not the functions that return a `NamedTuple`, such as an exchange or a wrapper.

    Raises:
        ValueError: a class or function refuses its arguments; the message gives the place in the configuration.

    Example:
        >>> built({"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 1}})
        Linear(in_features=2, out_features=1, bias=True)
        >>> built({"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}).keywords  # the rest comes later
        {'lr': 0.1}
    """
    if isinstance(value, list):
        return [built(part, f"{where}.{i}") for i, part in enumerate(value)]
    if not isinstance(value, dict):
        return value
    made = {key: built(part, f"{where}.{key}" if where else str(key)) for key, part in value.items()}
    if "class_path" not in value:
        return made
    function, arguments = named(value["class_path"]), made.get("init_args") or {}
    arguments = {**arguments, **(made.get("dict_kwargs") or {})}
    try:
        with suppress(ValueError):  # functions in C have no signature
            inspect.signature(function).bind(**arguments)
    except TypeError:
        return functools.partial(function, **arguments)
    try:
        return function(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} (in {where})") from error


def named(path: str) -> Callable[..., Any]:
    """Return the function or class of a dotted path, which may contain classes.

    >>> named("fedtorch.data.partition").__name__  # the function, whose module has the same name
    'partition'
    """
    above, _, name = path.rpartition(".")
    try:
        owner: Any = importlib.import_module(above)
    except ModuleNotFoundError:
        owner = named(above)
    return getattr(owner, name)


@functools.cache
def _allow_functions() -> None:
    """Allow paths of functions that return a dataclass or a named tuple, and files of this machine only.

    jsonargparse would otherwise read a named tuple field by field.
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


def _content(file: Path) -> Any:
    with suppress(yaml.YAMLError):  # jsonargparse raises its own error for it
        return yaml.safe_load(file.read_text())


def _files(arguments: Sequence[str]) -> list[Path]:
    """Return the configuration files in arguments."""
    files = []
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        option, equals, value = argument.partition("=")
        if option in ("-c", "--config"):
            files.append(Path(value if equals else following))
    return files
