"""Gradient descent of any module on stacked clients.

All clients of a block take their steps together: `vmap(loss)(stacked, batches).sum().backward(); optimizer.step()`.
Each gets the result of a loop for it alone: its own minibatches, its own number of steps, its own draws. In a step,
clients with batches of the same shapes share an evaluation, which is exact for every loss; groups of fewer than three
are evaluated one by one. Clients of unequal size share padded, weighted steps only if the types of layers and loss
prove that a batch's loss is the mean of its rows', or with `rowwise=True`. Clients are grouped by steps per epoch if
the schedule or the module counts epochs, and by position if the optimiser's state is kept between rounds. Every kind of
step is compared with the user's own module on real rows, once (`step_check`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedtorch import expected
from fedtorch.expected import loaded
from fedtorch.federation.algorithm import LocalSolver
from fedtorch.federation.local_schedule import local_schedule
from fedtorch.federation.solvers.batches import batches_of, check_drop_last
from fedtorch.federation.solvers.descent import Descent
from fedtorch.federation.solvers.objective import Loss
from fedtorch.federation.solvers.plain_layers import predicts_by_rows
from fedtorch.federation.solvers.prediction import predictor
from fedtorch.optimisers import MakeOptimizer
from fedtorch.tree import Tree

_MINIBATCHES = (
    "Expected all of a client's rows in every step, for the loss of {kind} is one of all of them, but got {got}; leave "
    "batch_size away and give the rows themselves"
)


def gradient_descent(
    module: nn.Module,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    rounds: int | None = None,
    batch_size: int | None = None,
    drop_last: bool = False,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    reset: Literal["round", "never"] = "round",
    buffers: Literal["refuse", "local", "average"] = "refuse",
    batched: bool | Literal["auto"] = "auto",
    rowwise: bool = False,
    compile: bool = False,
    clip: float | None = None,
    precision: Literal["32", "bf16", "tf32"] = "32",
    project: Callable[[Tree], Tree] | None = None,
    ignore_hooks: Sequence[str] = (),
) -> LocalSolver:
    """Return a local solver that trains `module` by its own optimiser, on stacked clients.

    The added `Quadratic` enters as its gradient λx − h, before the optimiser's step. `Local.info` has `loss`, the mean
    training loss over the client's steps, and the module's logs by `self.log`: numbers by their mean over the steps
    (over rows with `on_epoch=True`), or by `reduce_fx`; a torchmetrics metric by its value over all of the client's
    batches in the round, and the return value of a metric's call as a number.

    Args:
        module: an unmodified LightningModule, or an `nn.Module` together with `loss` and `optimizer`. Parameters with
            `requires_grad=False` do not change and are never sent.
        epochs: passes over a client's rows in each round; exactly one of `epochs` and `steps` is given.
        steps: minibatches in each round, going through as many epochs as that takes.
        rounds: number of rounds of the run, for modules that use their trainer's `max_epochs` or
            `estimated_stepping_batches`, such as those with a `OneCycleLR` over the whole training. `ft.run` and the
            Trainer of a `Federation` compare it with their own.
        batch_size: rows of a minibatch; None uses all of a client's rows in every step. Clients with loaders, see
            `ft.data.from_loaders`, have batches of their own, used in their order: equal or padded ones of several
            clients together, and with `batched=False` batches of any kind.
        drop_last: whether a smaller last minibatch of an epoch is left out, as by `DataLoader`, for example because
            BatchNorm would see one row. Clients with fewer rows than `batch_size` are refused.
        loss: `(output, target) -> mean loss` of a batch `(input, target)`, for a plain `nn.Module`. An input that is a
            dict reaches its `forward` by name.
        optimizer: `parameters -> torch.optim.Optimizer`; default: the module's `configure_optimizers`. Torch's
            elementwise classes without hooks (SGD, Adam, AdamW, Adagrad, Adadelta, RMSprop, Rprop, NAdam, RAdam, Adamax
            and ASGD) step all clients at once. Of any other each client has its own, as in its own loop, at the cost of
            K steps in Python.
        reset: "round" resets the optimiser's moments each round; "never" keeps them in the client's state, which needs
            an optimiser whose state has only numbers and tensors of each parameter. Schedules, `current_epoch` and
            `global_step` continue either way, on the federation's clock: in round r, the first being 0, a client starts
            at r times its own epochs and steps, even if it missed rounds.
        buffers: treatment of buffers that training changes, such as BatchNorm's statistics. "refuse" raises an error,
            "local" keeps each client's own, "average" averages their values. Counts and flags travel too: a flag raised
            at one client is raised everywhere (GPyTorch's `variational_params_initialized`).
        batched: "auto" evaluates clients together if their batches have the same shapes and `torch.vmap` can run the
            module, and one by one otherwise (`.item()` of floats, `x[mask]`, packed sequences); it logs the reason
            once. True raises an error instead, False goes one by one. All give the result of a loop, up to rounding, or
            an error. Once a run and shape of a batch, stacked steps are compared with the module alone on real rows.
        rowwise: a promise that a batch's training loss is the mean of its rows' losses, so that clients of unequal size
            share padded steps, whose rows are weighted. It is tested on real rows, in all steps of the first round and
            in one of every later round; a round in which it fails ends the run and is not committed. For chains of
            `torch.nn` layers with a loss of torch it is known. Without it, unequal clients share the steps in which
            their batches have the same shapes. Evaluation does not use it.
        compile: True captures a step's tensor operations once per shape and replays them, about twice as fast for small
            modules. The module's Python code then runs twice only, so it must not depend on the batch index, the
            trainer's counters or anything else that changes from step to step. Modules that draw random numbers, branch
            on values or have stacked buffers are not captured.
        clip: the largest norm of a client's gradient, the quadratic's included, before its optimiser's step, as
            `gradient_clip_val` of a Trainer.
        precision: "bf16" computes the losses' products under `torch.autocast` in bfloat16 while parameters, gradients
            and optimisers keep their dtype, like a Trainer's `precision="bf16-mixed"`; "tf32" computes float32 products
            on a CUDA device with factors of 10 bits, and has no effect elsewhere; "32" leaves all to torch's settings.
        project: applied to the stacked parameters after every step, for constraints.
        ignore_hooks: names of overridden Lightning hooks that training does not depend on.

    Raises:
        TypeError, ValueError, RuntimeError: at construction or when a population is bound: a module with
            `all_rows = True`, whose loss needs all rows of a client, is given minibatches; the module cannot run
            stacked, checkpoints activations, or cannot use the rows of some client (their number of features, their
            dtype, labels out of range); or the loss depends on parameters that are not trained (a closure over
            `module`, a plain list of parameters). The message has the remedy.

    Example:
        >>> import torch, fedtorch as ft
        >>> local = ft.gradient_descent(
        ...     torch.nn.Linear(3, 1), epochs=1, batch_size=8, loss=torch.nn.functional.mse_loss,
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        >>> sorted(local.parameters)
        ['bias', 'weight']
    """
    if (epochs is None) == (steps is None):
        raise ValueError(f"Expected either epochs= or steps=, but got epochs={epochs} and steps={steps}")
    for name, value in (("epochs", epochs), ("steps", steps), ("rounds", rounds), ("batch_size", batch_size)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"Expected {name} to be a whole number of at least 1, but got {value}")
    check_drop_last(drop_last, batch_size)
    if clip is not None:
        expected.positive(clip=clip)
    all_rows = getattr(module, "all_rows", False)
    if all_rows and batch_size is not None:
        raise ValueError(_MINIBATCHES.format(kind=type(module).__name__, got=f"batch_size={batch_size}"))
    if precision not in ("32", "bf16", "tf32"):
        raise ValueError(
            f"Expected precision='32', 'bf16' or 'tf32', but got {precision!r}; other dtypes are the module's own"
        )
    if batched not in (True, False, "auto"):
        raise ValueError(f"Expected batched=True, False or 'auto', but got {batched!r}")
    if not isinstance(compile, bool):
        raise ValueError(
            f"Expected compile=True or False, but got {compile!r}; steps run the module's code unless compile=True "
            "promises that they all do the same operations"
        )
    if not isinstance(rowwise, bool):
        raise ValueError(f"Expected rowwise=True or False, but got {rowwise!r}")
    if rowwise:
        _check_rowwise(module, batched)
    if reset not in ("round", "never"):
        raise ValueError(f"Expected reset='round' or reset='never', but got {reset!r}")
    descent = Descent(
        module, epochs, steps, rounds, batch_size, loss, optimizer, reset, buffers, batched, compile, clip, precision,
        project, ignore_hooks, drop_last, rowwise,
    )  # fmt: skip
    descent.find_linear_steps(loss)
    return LocalSolver(
        solve=descent.solve,
        parameters=descent.parameters,
        init=descent.init,
        predict=predictor(descent.module, lambda: descent.loss.batched, predicts_by_rows(descent.module)),
        tensors=descent.tensors,
        prepare=partial(_without_loaders, descent) if all_rows else descent.prepare,
        module=descent.module,
        schedule=local_schedule(
            descent.configured, partial(batches_of, batch_size=batch_size, drop_last=drop_last), epochs, steps, rounds
        ),
        settings={
            "solver": "gradient_descent",
            "module": type(module),
            "epochs": epochs,
            "steps": steps,
            "rounds": rounds,
            "loss": loss,
            "batch_size": batch_size,
            "drop_last": drop_last,
            **descent.optimizer_settings,
            "reset": reset,
            "buffers": buffers,
            "clip": clip,
            "precision": precision,
            "project": project,
        },
    )


def _check_rowwise(module: nn.Module, batched: bool | str) -> None:
    """Raise ValueError if the settings, or a layer of the module, contradict the promise."""
    if batched is False:
        raise ValueError(
            "Expected batched='auto' or True with rowwise=True, which is about shared steps, but got False"
        )
    mixing = [name or "itself" for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    if mixing:
        raise ValueError(
            f"Expected a module that treats every row by itself for rowwise=True, but {', '.join(mixing)} of "
            f"{type(module).__name__} normalises over the rows of a batch; leave rowwise=True away"
        )


def _without_loaders(descent: Descent, data: Any) -> Any:
    """Try a module that uses all of a client's rows at once on a block.

    Raises:
        ValueError: the clients have loaders, and so minibatches.
    """
    if isinstance(data, loaded("fedtorch.data.client_loaders", "ClientLoaders")):
        raise ValueError(_MINIBATCHES.format(kind=type(descent.module).__name__, got="loaders"))
    return descent.prepare(data)
