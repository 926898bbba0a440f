"""The faithful loop: a real `lightning.Trainer.fit` per client, for any LightningModule.

Hooks, several optimisers, manual optimisation, ReduceLROnPlateau, gradient accumulation, torchmetrics, LSTMs and
callbacks work as outside a federation, at the price of a Trainer per client and round. `gradient_descent` is faster for
the modules that it supports, with the same numbers.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import random as python_random
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, default_convert

from fedtorch import functional, random, tree
from fedtorch._devices import every_generator, is_cuda, restored
from fedtorch._untrained import Remembered, refuse_untrained
from fedtorch.data import BadClients, ClientData
from fedtorch.data.client_loaders import ClientLoaders, failed
from fedtorch.data.seeded_loader import seeded_loader
from fedtorch.federation.algorithm import Local, LocalSolver, Quadratic
from fedtorch.federation.local_schedule import LocalOptimizer, LocalSchedule
from fedtorch.federation.solvers._configured import configured_settings
from fedtorch.federation.solvers._probe import check_rows, failure_on_one_row
from fedtorch.federation.solvers._state import LocalState, divided_buffers, refuse_changed_buffers
from fedtorch.federation.solvers._watch import Look, RoundTrainer, Watch, look
from fedtorch.federation.solvers.batches import (
    MODULE,
    PERMUTATIONS,
    batches_of,
    check_drop_last,
    check_last_batches,
    limited,
)
from fedtorch.federation.solvers.host_state import refuse_global_store, refuse_thawed
from fedtorch.federation.solvers.loaded_batches import check_settings
from fedtorch.federation.solvers.objective import Objective, refuse_own_loaders, training_copy
from fedtorch.federation.solvers.prediction import predictor
from fedtorch.federation.solvers.python_state import KeptSlots, PythonState, changed, refuse_shared
from fedtorch.federation.solvers.stacked_loss import StackedLoss
from fedtorch.federation.solvers.step_check import StateKept, relative_gap, tolerance
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree

_SILENT = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "num_sanity_val_steps": 0,
}
# arguments for a Trainer that only shows optimisers
_NOT_LOOKED_AT = ("callbacks", "plugins", "logger", "limit_train_batches")
_LOADERS = ("train_dataloader", "val_dataloader")
_ALONE = {"strategy": "auto", "num_nodes": 1, "sync_batchnorm": False, "use_distributed_sampler": False}
_SIGNALS = tuple(sorted(signal.valid_signals()))  # numbers and names; their query is slow


def lightning_fit(
    module: L.LightningModule,
    *,
    batch_size: int | None = None,
    drop_last: bool = False,
    rounds: int | Literal["each"] | None = None,
    reset: Literal["round", "never"] = "round",
    buffers: Literal["refuse", "local", "average"] = "refuse",
    shuffle: bool = True,
    ignore_hooks: Sequence[str] = (),
    **trainer_arguments: Any,
) -> LocalSolver:
    r"""Return a local solver that calls `lightning.Trainer(**trainer_arguments).fit` for each client.

    Every client gets a copy of the module with its own start, and a `DataLoader` over its rows with the minibatches of
    `gradient_descent`, so a module without randomness ends with the same numbers; or its own loader or data module,
    unchanged, see `ft.data.from_loaders` and `from_datamodules`. The added `Quadratic` enters as its gradient λx − h,
    once in each optimiser step, after accumulation and before clipping; the value of a closure does not contain it.
    Random draws come from torch's, numpy's and Python's generators, seeded from the client's key: reproducible, but not
    the draws of `gradient_descent`.

    Trainers are silent and write no files unless the arguments demand it, run in this process alone, and restore the
    environment (generators, torch's flags, signal handlers, variables): a fit may run in the step of another Trainer
    and under torchrun. The outer Trainer's precision does not apply; give `precision=` here.

    State that a fit leaves outside of its copy of the module (a global, a closure, a class) must not be read by another
    client's fit. The first fit of a run is done twice, without loggers and checkpoints, unless clients have loaders: an
    error is raised if the two differ.

    `Local.info` has `loss`, the mean training loss over the client's batches, and the module's logs by `self.log` at
    the end of the fit. `Local.lr_sum` adds up the learning rates of the first optimiser's first group.

    Args:
        module: an unmodified LightningModule. Parameters with `requires_grad=False` do not change and are never sent.
        batch_size: rows of a minibatch; None uses all of a client's rows in every step. Clients with loaders have
            batches and an order of their own.
        drop_last: whether a smaller last minibatch of an epoch is left out. Clients with fewer rows than `batch_size`
            are refused.
        rounds: number of rounds of the run, if `configure_optimizers` uses its trainer's length of training: for a
            schedule over the whole run. "each" makes a schedule over a round that restarts in each.
        reset: "round" resets optimisers and callbacks each round, the only choice here. Schedulers and `current_epoch`
            continue: in round r, the first being 0, a client starts at r times its own epochs and steps, even if it
            missed rounds; but `ReduceLROnPlateau` restarts in each.
        buffers: treatment of buffers that training changes, such as BatchNorm's statistics. "refuse" raises an error,
            "local" keeps each client's own, "average" averages their values, those of counts and flags too.
        shuffle: whether each epoch uses the rows in a new order.
        ignore_hooks: "train_dataloader" ignores the module's own, which is an error otherwise; the Trainers validate on
            its `val_dataloader`.
        trainer_arguments: of `lightning.Trainer`; `max_epochs` or `max_steps`, for each round, is required. Callbacks
            and plugins are copied for each client.

    Raises:
        TypeError, ValueError: at construction; when a population is bound, for rows that the `training_step` cannot use
            (not checked with hooks, callbacks, plugins and `precision`, which may change the rows); or in a fit that
            changes buffers, unfreezes parameters, uses a line search, reads state of another client's fit or has a loss
            of parameters that are not trained.

    Example:
        >>> import lightning, torch, fedtorch as ft
        >>> class Regression(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(3, 1)
        ...     def training_step(self, batch):
        ...         return torch.nn.functional.mse_loss(self.linear(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.LBFGS(self.parameters())
        >>> local = ft.lightning_fit(Regression(), max_epochs=1)
        >>> sorted(local.parameters)
        ['linear.bias', 'linear.weight']
    """
    _check(module, batch_size, reset, trainer_arguments)
    check_drop_last(drop_last, batch_size)
    if rounds not in (None, "each") and (not isinstance(rounds, int) or rounds < 1):
        raise ValueError(f"Expected rounds to be a whole number of at least 1, or 'each', but got {rounds!r}")
    refuse_own_loaders(module, ignore_hooks, ["train_dataloader"])
    fit = _Fit(module, batch_size, drop_last, rounds, buffers, shuffle, trainer_arguments)
    return LocalSolver(
        solve=fit.solve,
        parameters=fit.parameters,
        init=lambda parameters: LocalState({}, dict(fit.buffers), None),
        predict=predictor(fit.module, lambda: False),
        tensors=lambda parameters, state: {**fit.averaged.tensors(parameters), **state.buffers},
        prepare=fit.prepare,
        module=fit.module,
        schedule=LocalSchedule(
            None if rounds == "each" else rounds, fit.batches, fit.look, fit.limit is None, slow=True
        ),
        settings={
            "solver": "lightning_fit",
            "module": type(module),
            "batch_size": batch_size,
            "drop_last": drop_last,
            "rounds": rounds,
            "reset": reset,
            "buffers": buffers,
            "shuffle": shuffle,
            **configured_settings(fit.module),
            **trainer_arguments,
        },
    )


def _check(module: Any, batch_size: int | None, reset: str, arguments: dict[str, Any]) -> None:
    if not isinstance(module, L.LightningModule):
        raise TypeError(
            f"Expected a LightningModule, but got {type(module).__name__}; use ft.gradient_descent with "
            "loss= and optimizer= for a plain nn.Module"
        )
    if not functional.parameters(module):
        raise ValueError(f"Expected {type(module).__name__} to have trainable parameters, but it has none")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"Expected batch_size of at least 1, but got {batch_size}")
    if reset == "never":
        raise ValueError(
            "Expected reset='round', but got reset='never': what optimisers, schedulers and callbacks of any "
            "kind hold is not a tree of tensors; use ft.gradient_descent(..., reset='never')"
        )
    if reset != "round":
        raise ValueError(f"Expected reset='round', but got {reset!r}")
    unknown = sorted(set(arguments) - set(inspect.signature(L.Trainer).parameters))
    if unknown:
        raise TypeError(f"Expected arguments of lightning.Trainer, but got {', '.join(unknown)}")
    refused = [name for name in sorted(_ALONE) if name in arguments]
    devices = arguments.get("devices", 1)
    if devices not in (1, "1") and not (isinstance(devices, Sequence) and len(devices) == 1):
        refused.append(f"devices={devices!r}")
    if refused:
        raise ValueError(
            f"Expected arguments for one client on one device, but got {', '.join(refused)}; clients are "
            "spread over devices by the population, not by their own Trainers"
        )
    if arguments.get("max_epochs") is None and arguments.get("max_steps", -1) == -1:
        raise ValueError("Expected max_epochs= or max_steps= of each round, but got neither; try max_epochs=1")


class _Fit:
    """The solver's fixed parts."""

    def __init__(
        self, module: nn.Module, batch_size: int | None, drop_last: bool, rounds: int | Literal["each"] | None,
        buffers: str, shuffle: bool, arguments: dict[str, Any],
    ) -> None:  # fmt: skip
        refuse_global_store(module)
        functional.refuse_shared_memory(module)
        self.module = functional.copied(module)
        self._original, self._examined = Remembered(module), False
        self.batch_size, self.drop_last, self.rounds = batch_size, drop_last, rounds
        self.shuffle, self.arguments, self.policy = shuffle, arguments, buffers
        self.limit, self.length = arguments.get("limit_train_batches"), None if rounds == "each" else rounds
        most = arguments.get("max_steps", -1)
        self._steps = None if most == -1 else most * arguments.get("accumulate_grad_batches", 1)  # batches of a round
        self.averaged, self.buffers = divided_buffers(self.module, buffers)
        self.trained = list(functional.parameters(self.module))
        self.parameters = {**functional.parameters(self.module), **self.averaged.start}
        self._shared = KeptSlots(partial(refuse_shared, type(module).__name__))
        self._tried: StackedLoss | None = None
        if not {"callbacks", "plugins", "precision"} & arguments.keys():  # which may change the rows
            with suppress(TypeError):  # hooks and manual optimisation, which need a Trainer
                self._tried = StackedLoss(Objective(training_copy(module, _LOADERS)), self.trained, [], batched=False)

    def prepare(self, data: Any) -> Any:
        """Refuse rows that the module's `training_step` cannot take, where it can be called without a Trainer."""
        if isinstance(data, ClientLoaders):  # no batch is read before its time
            check_settings(self.batch_size, shuffle=None if self.shuffle else False, drop_last=self.drop_last or None)
            return data
        one_row = None
        if self._tried is not None and len(data.count) and bool((data.count > 0).all()):
            with suppress(RuntimeError):  # a checkpoint of activations, which a Trainer can do with
                check_rows(self._tried, data, self.parameters)
                one_row = None if self.limit else partial(failure_on_one_row, self._tried, data, self.parameters)
        check_last_batches(data.count, self.batch_size, self.drop_last, self._steps, one_row)
        return data

    def batches(self, count: Tensor) -> Tensor:
        """Return the minibatches of an epoch for clients with these numbers of rows."""
        return limited(batches_of(count, self.batch_size, self.drop_last), self.limit)

    def look(self, batches: Tensor, round: int) -> list[LocalOptimizer]:
        """Return the optimisers at the start of a round, see `LocalSchedule`, by starting Trainers."""
        plain = {n: v for n, v in self.arguments.items() if n not in _NOT_LOOKED_AT}

        def begin(looking: Look, size: int) -> None:
            with isolated(torch.device("cpu"), self.arguments.get("accelerator"), 0):
                trainer = RoundTrainer(**self._trainer_arguments(plain, looking, torch.device("cpu"), None))
                self._start(
                    trainer, functional.copied(self.module), {"train_dataloaders": DataLoader(cast(Any, range(size)))}
                )

        return look(begin, batches, round)

    def solve(self, start: Tree, state: LocalState, data: Any, quadratic: Quadratic | None, turn: Turn) -> Local:
        """Fit the clients of a block, one after the other."""
        device = data.count.device
        if len(data.count) == 0:
            nothing = torch.zeros(0, dtype=torch.float64, device=device)
            return Local(start, state, nothing, {"loss": nothing})
        fitted, loaded = list[_Fitted](), isinstance(data, ClientLoaders)
        for k in range(len(data.count)):
            alone = ({**self.averaged.tensors(start), **state.buffers}, quadratic)
            tensors, client_quadratic = tree.map(lambda leaf, k=k: leaf[k].detach().clone(), alone)
            fit = partial(self._fit_client, data, k, tensors, client_quadratic, turn)
            fitted.append(fit())
            if not self._examined and not loaded:  # a loader is not read twice
                self._refuse_kept(fitted[0], fit(again=True))
            self._examined = True
        tensors = tree.stack([each.tensors for each in fitted])
        names = dict.fromkeys(name for each in fitted for name in each.info)
        numbers = lambda values: torch.tensor(list(values), dtype=torch.float64, device=device)
        return Local(
            {**{name: tensors[name] for name in self.trained}, **self.averaged.sent(tensors)},
            LocalState(state.optimizer, {name: tensors[name] for name in self.buffers}, state.steps),
            numbers(each.steps for each in fitted),
            {name: numbers(each.info.get(name, float("nan")) for each in fitted) for name in names},
        )

    def _fit_client(
        self,
        data: Any,
        client: int,
        tensors: dict[str, Tensor],
        quadratic: Quadratic | None,
        turn: Turn,
        again: bool = False,
    ) -> _Fitted:
        """Fit one client of a block, for the first time or again."""
        device, loaded = data.count.device, isinstance(data, ClientLoaders)
        seed = int(random.fold_in(turn.key[client], MODULE))
        batches = (
            client_batches(data, client, seed) if loaded else nullcontext(self._batches(data, client, turn.key[client]))
        )
        arguments = {**self.arguments, **_unrecorded(self.arguments)} if again else self.arguments
        with isolated(device, self.arguments.get("accelerator"), seed), batches as given:
            examine = None if self._examined else self._examine
            watch = Watch(quadratic, turn.round, examine, data.steps(client) if loaded else None, turn.rates)
            with named(client, watch) if loaded else nullcontext():
                fitted = self._fit(tensors, watch, given, device, turn.limit, arguments)
        count = data.count[client : client + 1].cpu()
        turn.takes(torch.tensor([watch.rows]), count)
        of_all = {"loss"} if 0 < watch.batches == len(watch.losses) else set()
        for name in fitted.info.keys() - of_all:  # other values may be of any batch, unknown to the solver
            turn.takes(torch.tensor([watch.least]), count, name)
        return fitted

    def _refuse_kept(self, fitted: _Fitted, again: _Fitted) -> None:
        """Raise StateKept unless a repeated fit gives the same result."""
        names = [name for name, value in fitted.tensors.items() if value.is_floating_point() or value.is_complex()]
        gaps = {name: relative_gap(fitted.tensors[name], again.tensors[name]) for name in names}
        beyond = [gap for name, gap in gaps.items() if gap > tolerance(fitted.tensors[name].dtype)]
        if beyond:
            raise StateKept(self.module, max(beyond), "fit")

    def _examine(self, module: L.LightningModule, loss: Tensor) -> None:
        """Refuse a loss of parameters that no fit changes."""
        refuse_untrained(loss, module.parameters(), module, self._original)

    def _batches(self, data: ClientData, client: int, key: Tensor) -> dict[str, Any]:
        """Return a client's minibatches, those of `Batches`, for a Trainer's `fit`."""
        count = int(data.count[client])
        rows = tree.map(lambda leaf: leaf[client, :count], data.batch)
        order = OrderOfRows(random.fold_in(key, PERMUTATIONS), count, self.shuffle and bool(self.batch_size))
        size = self.batch_size or max(count, 1)
        made = RowsOfClient(rows, count)
        loader = DataLoader(made, size, sampler=order, collate_fn=default_convert, drop_last=self.drop_last)
        return {"train_dataloaders": loader}

    def _start(self, trainer: RoundTrainer, module: Any, given: dict[str, Any]) -> None:
        trainer.rounds = self.rounds
        module.configure_optimizers = partial(trainer.configure, module.configure_optimizers)
        try:
            trainer.fit(module, **given)
        finally:
            module.trainer = None
            del module.configure_optimizers

    def _fit(
        self,
        tensors: dict[str, Tensor],
        watch: Watch,
        given: dict[str, Any],
        device: torch.device,
        limit: float | None,
        arguments: dict[str, Any],
    ) -> _Fitted:
        module: Any = functional.load(self.module, tensors)
        before = {} if self.policy != "refuse" else functional.buffers(module)
        frozen = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
        outside = PythonState(module)
        fields_before = outside.snapshot()
        self._shared.hide()
        trainer = RoundTrainer(**self._trainer_arguments(arguments, watch, device, limit))
        try:
            self._start(trainer, module, given)
        except SystemExit:
            # Lightning turns an interrupt into an exit of the process, which would look like a finished run.
            if not isinstance(watch.exception, KeyboardInterrupt):
                raise
        finally:
            self._shared.show()
            self._shared.check()
        if isinstance(watch.exception, KeyboardInterrupt):
            raise KeyboardInterrupt
        refuse_changed_buffers(module, before)
        shared = PythonState(self.module).snapshot()
        now = {key: entry for key, entry in outside.snapshot().items() if key in shared}
        self._shared.add(changed(fields_before, now))
        thawed = [n for n, p in module.named_parameters() if p.requires_grad and n not in self.trained]
        refuse_thawed(module, thawed)
        moved = [name for name, p in module.named_parameters() if name in frozen and not torch.equal(p, frozen[name])]
        if moved:
            raise ValueError(
                f"Training changes {', '.join(moved)} of {type(module).__name__}, which are frozen and neither kept "
                "nor sent; make them buffers, with buffers='local' or 'average', or set requires_grad"
            )
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        done = {name: named[name].detach().to(old.device, old.dtype, copy=True) for name, old in tensors.items()}
        info = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        if watch.losses:
            info["loss"] = float(torch.stack(watch.losses).double().mean())
        return _Fitted(done, watch.rates, info)

    def _trainer_arguments(
        self, arguments: dict[str, Any], watch: L.Callback, device: torch.device, limit: float | None
    ) -> dict[str, Any]:
        given = dict(arguments) if limit is None else {**arguments, "limit_train_batches": limit}
        single: Any = 1
        if "accelerator" not in given and (device.type == "cpu" or is_cuda(device)):
            given["accelerator"] = device.type
            if is_cuda(device):
                single = [device.index or 0]
        callbacks = [watch, *as_list(copy.deepcopy(given.pop("callbacks", None)))]
        # Lightning must not find torchrun or SLURM, whose jobs it would requeue on signals.
        plugins = [*as_list(copy.deepcopy(given.pop("plugins", None))), LightningEnvironment()]
        return {**_SILENT, "devices": single, **given, **_ALONE, "callbacks": callbacks, "plugins": plugins}


def _unrecorded(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer that leave no record of its fit."""
    silent: dict[str, Any] = {"enable_checkpointing": False}
    if arguments.get("logger"):
        silent["logger"] = DummyLogger()
    callbacks = [each for each in as_list(arguments.get("callbacks")) if not isinstance(each, Checkpoint)]
    return {**silent, "callbacks": callbacks}


class _Fitted(NamedTuple):
    """Return the result of one client's fit."""

    tensors: dict[str, Tensor]
    steps: float
    info: dict[str, float]


@contextmanager
def client_batches(data: ClientLoaders, client: int, seed: int) -> Iterator[dict[str, Any]]:
    """Give the arguments of `Trainer.fit` for a client of a block, whose loader draws from `seed`.

    A data module has been prepared and set up when the clients were made, which a Trainer does not do again.
    """
    source, number = data.source, int(data.number[client])
    with seeded_loader(source.loader(number), seed) as loader:
        if not source.modules:
            yield {"train_dataloaders": loader}
            return
        module = copy.copy(source.modules[number])
        module.prepare_data = module.setup = module.teardown = _nothing
        module.train_dataloader = lambda: loader
        yield {"datamodule": module}


@contextmanager
def named(client: int, watch: Watch) -> Iterator[None]:
    """Attribute errors in a fit to this client, unless the module or the settings are at fault.

    Raises:
        BadClients: the client's fit failed, or its loader gave no batch.
    """
    try:
        yield
    except (BadClients, MisconfigurationException):
        raise
    except Exception as error:
        if watch.exception is not error or watch.refusal is error:
            raise
        raise failed(client, "its training raised", error) from error
    if not watch.batches:
        raise BadClients(torch.tensor([client]), "Expected at least one batch, but its loader gave none")


class RowsOfClient(Dataset):
    """One client's rows for a `DataLoader`, one batch at a time."""

    def __init__(self, rows: Tree, count: int) -> None:
        self.rows, self.count = rows, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Tree:
        return tree.map(lambda leaf: leaf[row], self.rows)

    def __getitems__(self, rows: list[int]) -> Tree:
        index = torch.tensor(rows, device=tree.leaves(self.rows)[0].device)
        return tree.take(self.rows, index)


class OrderOfRows(Sampler[int]):
    """The rows in the order of `Batches`: a permutation from (key, epoch)."""

    def __init__(self, key: Tensor, count: int, shuffle: bool) -> None:
        self.key, self.count, self.shuffle, self.epoch = key, count, shuffle, 0
        self.first: int | None = None  # epoch of the round, by the federation's clock

    def set_epoch(self, epoch: int) -> None:
        """Record the epoch; Lightning calls this at the start of each."""
        self.first = epoch if self.first is None else self.first
        self.epoch = epoch - self.first

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.count))
        return iter(random.permutation(random.fold_in(self.key, self.epoch), self.count).tolist())


def _nothing(stage: str = "") -> None:
    """Do nothing."""


@contextmanager
def isolated(device: torch.device, accelerator: Any, seed: int) -> Iterator[None]:
    """Seed generators from `seed`, enable gradients and silence Lightning; restore all afterwards.

    Args:
        device: of the data.
        accelerator: the Trainer's argument; None chooses by the device.
        seed: for torch's, numpy's and Python's generators.
    """
    if accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available():
        torch.cuda.init()  # creates CUDA's generators; skipped if CUDA is not used
    with (
        _restored(),
        warnings.catch_warnings(),
        # torch.manual_seed would also seed GPUs that are not initialised yet, for good.
        restored(every_generator(), seed),
        torch.inference_mode(False),
        torch.enable_grad(),
        _without_autocast({"cpu", device.type}),
    ):
        warnings.filterwarnings("ignore", module=r"lightning(_utilities)?\.")
        python_random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        yield


@contextmanager
def _without_autocast(devices: set[str]) -> Iterator[None]:
    """Disable autocast without its context, whose cache of weights would live for all steps."""
    before = {device: torch.is_autocast_enabled(device) for device in devices}
    try:
        for device in devices:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, enabled in before.items():
            torch.set_autocast_enabled(device, enabled)


@contextmanager
def _restored() -> Iterator[None]:
    """Restore generators, torch's flags, the environment, signal handlers and Lightning's loggers at the end."""
    cudnn, warn_only = torch.backends.cudnn, torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as after:
        after.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
        for name in ("benchmark", "deterministic"):
            after.callback(setattr, cudnn, name, getattr(cudnn, name))
        after.callback(torch.set_default_dtype, torch.get_default_dtype())
        after.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        after.callback(python_random.setstate, python_random.getstate())
        after.callback(_restore_environment, dict(os.environ))
        after.callback(setattr, rank_zero_only, "rank", vars(rank_zero_only)["rank"])
        if torch.cuda.is_initialized():
            after.callback(torch.cuda.set_device, torch.cuda.current_device())
        if threading.current_thread() is threading.main_thread():  # only there they can be set
            for number in _SIGNALS:
                after.callback(_restore_handler, number, signal.getsignal(number))
        for name in ("lightning.pytorch", "lightning.fabric"):
            logger = logging.getLogger(name)
            after.callback(logger.setLevel, logger.level)
            logger.setLevel(max(logger.level, logging.WARNING))
        yield


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _restore_handler(number: int, handler: Any) -> None:
    if handler is not None and signal.getsignal(number) != handler:
        signal.signal(number, handler)


def as_list(value: Any) -> list[Any]:
    """Return a value, or several, as a list; none of None."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
