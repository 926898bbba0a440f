"""Trial of a module on a few rows of a block before the first round, to refuse or advise early."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedtorch import functional, random, tree
from fedtorch._devices import generators, restored
from fedtorch._untrained import Remembered, refuse_untrained
from fedtorch.data import BadClients
from fedtorch.data.federated import described_rows
from fedtorch.data.padding import is_dense
from fedtorch.federation.solvers._state import perturbed
from fedtorch.federation.solvers.batches import Batch
from fedtorch.federation.solvers.host_state import HostGenerators
from fedtorch.federation.solvers.python_state import PythonState, refuse_kept
from fedtorch.federation.solvers.stacked_loss import NotCaptured, StackedLoss, backward_hooks
from fedtorch.module_randomness.interception import KeyedRandomness
from fedtorch.module_randomness.step_draws import StepKeys
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
_CHECKPOINTED = (
    "Expected a module without activation checkpointing or other hooks on saved tensors, whose backward pass would run "
    "on another client's tensors, but got one; switch checkpointing off, or use ft.lightning_fit"
)
SIZES = (5, 7)  # batch sizes that confirm a broadcast: a dimension that has one of them by chance has not the other
_SAME = 1e-4  # relative: losses that differ by less are the same
_LOOKED_AT = 16  # rows of a block that are tried


def check_rows(
    stacked: StackedLoss,
    data: Any,
    values: Mapping[str, Tensor],
    original: Remembered | None = None,
) -> None:
    """Try whether the module can train on the rows of a block: on a few, with the extreme labels among them.

    Args:
        stacked: the loss.
        data: a block `ClientData`, which has clients.
        values: one client's tensors and stacked buffers by name.
        original: parameters of the user's module, to refuse a loss which reads them; None skips this check.

    Raises:
        BadClients: the module cannot train on the rows of some.
        ValueError: the rows are not (input, target), and there is no `training_step` to read others; or the loss
            compares every output with every target, or reads parameters that are not trained.
        RuntimeError: the module checkpoints activations.
    """
    if stacked.objective.supervised and not (isinstance(data.batch, tuple) and len(data.batch) == 2):
        raise ValueError(
            f"Expected rows (input, target) for loss=, but got {described_rows(data.batch)}; take a LightningModule, "
            "whose training_step reads any rows"
        )
    # Labels out of range end the process on an accelerator, so they are checked on the CPU first.
    for device in dict.fromkeys((torch.device("cpu"), data.count.device)):
        stacked.objective.to(device)
        tensors, (client, row) = _own(stacked, values, device), spread_rows(data)
        rows = _rows_at(data, client, row, device)
        with Broadcasts(len(row)) as broadcasts:
            error = _failure(stacked, tensors, rows, original)
        if error is None and broadcasts.met is not None:
            name = type(stacked.objective.module).__name__
            refuse_broadcast(partial(_loss_of, stacked, tensors, rows), name, broadcasts.met)
        if error is None or (device != data.count.device and not isinstance(error, IndexError)):
            continue
        from fedtorch.federation.solvers.advice import explained

        if "checkpoint" in str(error) or (isinstance(error, Warning) and "requires_grad" in str(error)):
            raise RuntimeError(_CHECKPOINTED) from error
        alone = ((int(k), _rows_at(data, k.expand(2), r.expand(2), device)) for k, r in zip(client, row))
        bad = next((k for k, rows in alone if _failure(stacked, tensors, rows) is not None), int(client[0]))
        raise BadClients(
            torch.tensor([bad]),
            f"Expected rows that {type(stacked.objective.module).__name__} can train on, but got "
            f"{described_rows(data.batch)}: {explained(error, stacked.objective.module, data.batch, tensors[0].dtype)}",
        ) from error


def check_batch(
    stacked: StackedLoss,
    batch: Any,
    values: Mapping[str, Tensor],
    device: torch.device,
    original: Remembered | None = None,
) -> None:
    """Check that the module can train on the first batch of a client's loader; see `check_rows`.

    Raises:
        BadClients: it cannot.
        ValueError: the loss reads parameters that are not trained, or compares every output with every target.
        RuntimeError: the module checkpoints activations.
    """
    from fedtorch.federation.solvers.advice import explained
    from fedtorch.federation.solvers.loaded_batches import rows_in

    objective = stacked.objective.to(device)
    tensors, rows = _own(stacked, values, device), tuple(batch) if isinstance(batch, list) else batch
    if objective.supervised and not (isinstance(rows, tuple) and len(rows) == 2):
        raise ValueError(
            f"Expected batches (input, target) for loss=, but got {type(batch).__name__}; take a LightningModule, "
            "whose training_step reads any"
        )
    with Broadcasts(rows_in(batch)) as broadcasts:
        error = _failure(stacked, tensors, batch, original)
    if error is not None and ("checkpoint" in str(error) or isinstance(error, Warning)):
        raise RuntimeError(_CHECKPOINTED) from error
    name = type(objective.module).__name__
    if error is not None:
        raise BadClients(
            torch.tensor([0]),
            f"{name} cannot train on its first batch: {explained(error, objective.module, rows, tensors[0].dtype)}",
        ) from error
    if broadcasts.met is not None and all(isinstance(leaf, Tensor) for leaf in rows):
        refuse_broadcast(partial(_loss_of, stacked, tensors, rows), name, broadcasts.met)


def failure_on_one_row(loss: StackedLoss, data: Any, values: Mapping[str, Tensor], client: Tensor) -> Any:
    """Return the error of one row of a client `(1,)`, None if the module can train on it."""
    return _failure(loss, _own(loss, values, data.count.device), _rows_at(data, client, 0 * client, data.count.device))


def _failure(
    stacked: StackedLoss,
    values: list[Tensor],
    rows: Tree,
    original: Remembered | None = None,
) -> Exception | None:
    """Return the error of one client's loss and gradient, if its rows may be the cause."""
    leaves = [v.clone().requires_grad_(i < len(stacked.tensors)) for i, v in enumerate(values)]
    stacked.objective.trainer.answers.update(global_step=0, current_epoch=0)
    # Buffers are restored here: `probe` reports whether a pass changes them.
    buffers = functional.buffers(stacked.objective.module)
    swapped = functional.Swap(stacked.objective.module, list(buffers))(list(buffers.values()))
    seeded = HostGenerators.seeded(0)
    # The generators are put back: to intercept all operations takes longer than they do.
    drawing = restored(generators(values[0].device), seed=0)
    untouched = PythonState(stacked.objective.module, vars(stacked.objective)["loss"]).left_alone()
    with untouched, swapped, seeded, drawing, warnings.catch_warnings(), torch.enable_grad():
        warnings.filterwarnings("error", message="None of the inputs have requires_grad")  # a checkpoint's
        try:
            with torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTED):
                loss = stacked.single(leaves, rows, None, 0)[0]
                if loss.requires_grad:
                    trained = [leaf for leaf in leaves[: len(stacked.tensors)] if leaf.requires_grad]
                    torch.autograd.grad(loss, trained, allow_unused=True)
        except (IndexError, KeyError, RuntimeError, UserWarning, ValueError) as error:
            return None if isinstance(error, NotImplementedError) else error
        except Exception:  # the probe reports other errors of a module
            return None
    if original is not None:
        refuse_untrained(loss, leaves[: len(stacked.tensors)], stacked.objective.module, original)
    return None


def _loss_of(stacked: StackedLoss, values: list[Tensor], rows: Tree, size: int) -> Tensor:
    """Return one client's loss on this many rows, with repetitions if needed."""
    leaves = [v.clone().requires_grad_(i < len(stacked.tensors)) for i, v in enumerate(values)]
    at = torch.arange(size, device=values[0].device)
    quiet, draws = warnings.catch_warnings(action="ignore"), KeyedRandomness(random.key(0).to(at.device))
    untouched = PythonState(stacked.objective.module, vars(stacked.objective)["loss"]).left_alone()
    with untouched, quiet, draws, HostGenerators.seeded(0), torch.enable_grad():
        return stacked.single(leaves, tree.map(lambda leaf: leaf[at % len(leaf)], rows), None, 0)[0].detach()


def observe(
    stacked: StackedLoss,
    make: Callable[[nn.Module], StackedLoss],
    module: nn.Module,
    rows: Any,
    values: Mapping[str, Tensor],
    device: torch.device,
) -> None:
    """Run a module on a few rows of one client, to see whether it can run stacked and what it stores between steps.

    It runs on copies; the findings decide whether clients are stacked, and change no computed number.

    Args:
        stacked: the loss, which records the findings.
        make: a copy of the module -> its `StackedLoss`.
        module: the user's.
        rows: a batch of one client.
        values: one client's tensors and stacked buffers by name.
        device: of the rows.

    Raises:
        TypeError: it returns no loss, stores Python values that a later step reads, or changes from step to step in a
            way that compiled steps would freeze.
        ValueError: it changes buffers that are not stacked.
        RuntimeError: `torch.vmap` cannot run it.
    """
    rows = tree.map(torch.clone, rows) if all_tensors(rows) else rows
    tensors, key = _own(stacked, values, device), random.key(0).to(device)
    different = fewer = rows
    if all_tensors(rows) and all(leaf.ndim and len(leaf) > 1 for leaf in tree.leaves(rows)):
        # the second row twice, in place of the first
        different = tree.map(lambda leaf: torch.cat([leaf[1:2], leaf[1:]]), rows)
        fewer = tree.map(lambda leaf: leaf[:-1], rows)
    others = [perturbed(value, 1) if i < len(stacked.tensors) else value for i, value in enumerate(tensors)]
    made: list[StackedLoss] = []

    def fresh() -> tuple[PythonState, Callable[[int], Any]]:
        twin = make(functional.copied(module))
        twin.objective.to(device)
        twin.objective.trainer.answers = {**stacked.objective.trainer.answers, "global_step": 0, "current_epoch": 0}
        made.append(twin)
        step = lambda client: _alone(twin, (tensors, others, others)[client], (rows, different, fewer)[client], key)
        return PythonState(twin.objective.module, twin.objective.loss), step

    stacked.kept, stacked.rewritten = refuse_kept(fresh, type(module).__name__)
    twin = made[0]
    twin.unchanged.check()
    stacked.objective.trainer.asked |= twin.objective.trainer.asked
    stacked.random, stacked.drawing.parts = twin.random, _same_parts(twin, stacked)
    if stacked.batched:
        _choose(stacked, make, module, tensors, rows, key)
    if stacked.eager is None:
        _check_captured(twin, tensors, rows, type(module).__name__)
    stacked.observed = True


def all_tensors(batch: Any) -> bool:
    """Return whether all leaves of a batch are tensors of rows, not sparse or nested ones."""
    try:
        leaves = tree.leaves(batch)
    except TypeError:
        return False
    return bool(leaves) and all(is_dense(leaf) for leaf in leaves)


def _alone(twin: StackedLoss, values: list[Tensor], rows: Any, key: Tensor) -> Any:
    """Return one client's step without `vmap`, with draws from a key; `twin` records the draws."""
    count = len(twin.tensors)
    trained = [twin.parameter(value.detach().clone()) for value in values[:count]]
    with HostGenerators.seeded(0), twin.drawing.observed(key) as drawn:
        result = twin.alone([*trained, *(value.clone() for value in values[count:])], rows, 0)
    twin.random = twin.random or drawn.calls > 0
    return result


def _same_parts(twin: StackedLoss, stacked: StackedLoss) -> list[nn.Module] | None:
    """Return the parts of the module that draw in its copy."""
    if twin.drawing.parts is None:
        return None
    places = {id(part): number for number, part in enumerate(twin.objective.module.modules())}
    modules = list(stacked.objective.module.modules())
    return [modules[places[id(part)]] for part in twin.drawing.parts]


def _choose(
    stacked: StackedLoss,
    make: Callable[[nn.Module], StackedLoss],
    module: nn.Module,
    tensors: list[Tensor],
    rows: Tree,
    key: Tensor,
) -> None:
    """Check that clients can be stacked; where they need not be and cannot, evaluate them one by one."""
    name, hooks = type(module).__name__, backward_hooks(module)
    try:
        if hooks:
            raise RuntimeError(f"hooks on the backward pass of {', '.join(hooks)} would see all clients at once")
        twin = make(functional.copied(module))
        twin.objective.to(key.device)
        twin.objective.trainer.answers = dict(stacked.objective.trainer.answers, global_step=0, current_epoch=0)
        twin.random = stacked.random
        values, some = tree.map(lambda leaf: torch.stack([leaf] * 2), (tuple(tensors), rows))
        size = torch.tensor([len(tree.leaves(rows)[0])] * 2)
        together = lambda: twin.together(values, Batch(some, size, full=True), 0, StepKeys(torch.stack([key, key])))
        twin.compile = stacked.compile
        try:
            together()
        except RuntimeError:
            if twin.eager is not None:
                raise
            twin.reads = stacked.reads = True
            together()
    except Exception as error:
        if not stacked.automatic:
            raise RuntimeError(
                f"{name} cannot run on stacked clients under torch.vmap: {error}\n"
                "Use batched='auto' or batched=False, which call the loss client by client, or ft.lightning_fit"
            ) from error
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
    else:
        return
    stacked.batched = False
    _LOG.info("batched='auto' evaluates the clients of %s one by one: %s", name, why)


def _check_captured(twin: StackedLoss, values: list[Tensor], rows: Tree, name: str) -> None:
    from fedtorch.captured import IndexUsed, capture

    asked = twin.objective.trainer.asked - {"max_epochs", "training"}
    changing = [f"trainer.{question}" for question in sorted(asked)]
    try:
        capture(
            lambda index, *flat: tuple(twin.stacked(flat, rows, index, "error")),
            *[leaf[None] for leaf in (*values, *tree.leaves(rows))],
        )
    except IndexUsed:
        changing.append("batch_idx")
    except Exception as error:
        raise NotCaptured.because(twin.objective.module, error) from error
    if changing:
        raise TypeError(
            f"The training_step of {name} depends on {', '.join(changing)}, which "
            "a compiled step would freeze; use compile=False"
        )


def _own(stacked: StackedLoss, values: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
    """Return one client's tensors, a little away from the start, and its stacked buffers."""
    start = [perturbed(values[n].to(device, copy=True)) for n in stacked.tensors]
    return start + [values[n].to(device, copy=True) for n in stacked.buffers]


def _rows_at(data: Any, client: Tensor, row: Tensor, device: torch.device) -> Tree:
    return tree.map(lambda leaf: leaf[client, row].to(device), data.batch)


class Broadcasts(TorchFunctionMode):
    """Context that records operations on `(n, 1, ...)` and `(n, ...)`, which torch broadcasts to `(n, n, ...)`.

    The mean of such a result is a loss of every output and every target. It is detected where it happens, in a loss
    function as well as inside a `training_step`: an operation on floating-point numbers of these two shapes, of which
    one depends on the parameters and the other does not. `refuse_broadcast` tests whether it matters.

    Args:
        rows: n.
        mends: whether the operations receive `(n, ...)` twice instead.

    Attributes:
        met: (shape of the operand that depends on the parameters, shape of the other) of the first one; None for none.
    """

    def __init__(self, rows: int, mends: bool = False) -> None:
        super().__init__()
        self._rows, self._mends = rows, mends
        self.met: tuple[list[int], list[int]] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given: tuple[Any, ...] = (*args, *kwargs.values(), None, None)
        first, second = given[:2]
        if not self._crosses(first, second):
            return func(*args, **kwargs)
        output, target = (first, second) if first.requires_grad else (second, first)
        self.met = self.met or (list(output.shape), list(target.shape))
        if self._mends:
            shape = max(first.shape, second.shape, key=len)
            narrow = lambda value: value[:, 0] if isinstance(value, Tensor) and value.shape == shape else value
            args, kwargs = tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _crosses(self, first: Any, second: Any) -> bool:
        if not (isinstance(first, Tensor) and isinstance(second, Tensor)) or self._rows < 2:
            return False
        less, more = sorted((first, second), key=Tensor.dim)
        return (
            more.shape == (self._rows, 1, *less.shape[1:])
            and less.shape[:1] == (self._rows,)
            and first.requires_grad != second.requires_grad
            and first.is_floating_point()
            and second.is_floating_point()
        )


def refuse_broadcast(loss: Callable[[int], Tensor], name: str, met: tuple[list[int], list[int]]) -> None:
    """Raise ValueError if the loss of batches of some rows is another one when no such operation broadcasts.

    The broadcast is harmless if the loss is the same with the spare dimension dropped, or cannot be computed without
    it.

    Args:
        loss: number of rows -> their loss.
        name: name of the module.
        met: see `Broadcasts`.
    """
    for size in SIZES:
        try:
            given, mends = loss(size), Broadcasts(size, mends=True)
            with mends:
                mended = loss(size)
        except Exception:  # the loss needs the shapes as they are
            return
        if mends.met is None or torch.allclose(given, mended, rtol=_SAME, atol=0.0, equal_nan=True):
            return
    output, target = met
    same = "output[:, 0] with target, or output with target[:, None]"
    other = "output with target[:, 0], or output[:, None] with target"
    raise ValueError(
        f"Expected a loss of outputs and targets of one shape, but {name} has outputs {tuple(output)} and targets "
        f"{tuple(target)}, which torch broadcasts: every output would be compared with every target; compare "
        f"{same if len(output) > len(target) else other}"
    )


def spread_rows(data: Any) -> tuple[Tensor, Tensor]:
    """Return (client, row) of rows spread over a block, and of those with the smallest and largest whole numbers."""
    ends = data.count.cumsum(0)
    at = _evenly(int(ends[-1]), _LOOKED_AT).to(ends.device)
    client = torch.searchsorted(ends, at, right=True)
    choice, mask = [(client, at - ends[client] + data.count[client])], data.mask
    for leaf in tree.leaves(data.batch):
        if leaf.ndim in (2, 3) and not (leaf.is_floating_point() or leaf.is_complex()):
            low, high = leaf.flatten(2).long().aminmax(dim=2) if leaf.ndim == 3 else (leaf.long(), leaf.long())
            first = low[client[0], 0]
            extremes = torch.where(mask, low, first).argmin(), torch.where(mask, high, first).argmax()
            both = torch.stack(extremes)
            choice.append((both // mask.shape[1], both % mask.shape[1]))
    return torch.cat([k for k, _ in choice]), torch.cat([r for _, r in choice])


def first_rows(data: Any) -> Tree:
    """Return the first rows of the client that has most."""
    client = int(data.count.argmax())
    count = min(_LOOKED_AT, int(data.count[client]))
    return tree.map(lambda leaf: leaf[client, :count], data.batch)


def _evenly(count: int, most: int) -> Tensor:
    """Return at most this many of `count` positions, evenly spread; single precision would fail for large counts."""
    return torch.linspace(0, count - 1, min(most, count), dtype=torch.float64).long()
