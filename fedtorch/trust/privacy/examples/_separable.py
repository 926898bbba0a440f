"""Checks that a batch's loss is the mean of its examples' losses, and that ghost gradients are those of the loss.

DP-SGD evaluates each example separately, so a loss that mixes examples leaks nothing; but the training would not
minimise the module's loss. Gradients are compared away from the initial values, where they may be zero, and in float64.
Gradients that are zero are computed as differences of larger numbers, so rounding is measured relative to the examples'
whole gradients: equal ones differ by less than √ε of that, with ε the rounding of the coarsest numbers used (1.5e-8 in
float64, 3e-4 in float32, 0.09 in bfloat16), and a mixing loss by more.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedtorch import functional, random, tree
from fedtorch.data.items import seeded
from fedtorch.federation.solvers.objective import Loss, Objective
from fedtorch.module_randomness.interception import KeyedRandomness
from fedtorch.tree import Tree
from fedtorch.trust.privacy.clipping import SLACK
from fedtorch.trust.privacy.examples._per_example import PrivateLoss
from fedtorch.trust.privacy.examples._refused import Faults, suspects

_LOG = logging.getLogger(__name__)
_SUM = "the loss of a batch is their sum: divide it by their number"
_AWAY = 0.1  # relative size of the random steps away from the initial values


def look_alone(loss: PrivateLoss, tensors: Mapping[str, Tensor], rows: Tree) -> None:
    """Detect from a client's rows `(B, ...)` whether the module draws random numbers, or changes its state.

    Args:
        loss: its `random` is set.
        tensors: initial values of one client.
        rows: of one client.

    Raises:
        ValueError: a buffer changes.
        TypeError: the same rows have another loss the second time.
    """
    module, name = loss.objective.module, type(loss.objective.module).__name__
    loss.objective.trainer.answers.update(global_step=0, current_epoch=0)
    values, before = [tensors[n].detach().clone() for n in loss.tensors], functional.buffers(module)
    evaluate = lambda: loss.single(values, rows, None, 0)[0].detach()
    with torch.no_grad(), seeded(0), loss.drawing.observed(random.key(0).to(values[0].device)) as drawn:
        first = evaluate()
    loss.random = drawn.calls > 0
    after = dict(module.named_buffers())
    same = lambda old, new: old.shape == new.shape and torch.allclose(old, new.to(old), 0, 0, equal_nan=True)
    changed = [name for name, old in before.items() if name not in after or not same(old, after[name])]
    if changed:
        raise ValueError(
            f"Expected buffers that training does not change, but it changes {', '.join(changed)} of {name}: what rows "
            "leave there would be published without noise; make the layer leave its buffers unchanged"
        )
    with torch.no_grad(), seeded(0):
        if not loss.random and not torch.allclose(second := evaluate(), first, 1e-5, 1e-5, equal_nan=True):
            raise TypeError(
                f"Expected the same loss on the same rows, but {name} gave {float(first):.6g} and then "
                f"{float(second):.6g}: it keeps something from one call to the next, which examples would share"
            )


def in_double(loss: PrivateLoss, module: nn.Module, criterion: Loss | None) -> PrivateLoss:
    """Return the same loss of a module that is converted to float64, on the device of the loss's own."""
    device = next(loss.objective.parameters()).device
    if isinstance(criterion, nn.Module):
        criterion = copy.deepcopy(criterion).to(device, torch.float64)
    objective = Objective(module.to(device, torch.float64), criterion)
    objective.trainer.answers = loss.objective.trainer.answers
    double = PrivateLoss(objective, loss.tensors, loss.clip, loss.sampling_rate, loss.spending, loss.layers is not None)
    double.random = loss.random
    return double


def check_separable(
    loss: PrivateLoss, double: PrivateLoss, tensors: Mapping[str, Tensor], rows: Sequence[Tree]
) -> None:
    """Check that clients' losses are the means of their examples', by gradients, and that steps run.

    Ghost norms are disabled if they do not clip like the examples' own gradients.

    Args:
        loss: its `checked` is set, unless no gradient is finite.
        double: the same in float64, which is compared if it runs.
        tensors: initial values of one client.
        rows: of some clients, `(B, ...)` each, preferably of different sizes.

    Raises:
        ValueError: a loss is not the mean, or a step does not run.
    """
    try:
        point = _some_point(double, tensors, rows)
    except Exception:  # a module that computes in one dtype only
        point = _some_point(loss, tensors, rows)
    if point is None:
        return
    size = point.bound * _norms(point.examples)[point.taken].mean()
    for k, whole in enumerate(point.whole):
        taken = point.taken[k]
        means = [leaf[k, taken].mean(0) for leaf in point.examples]
        if not all(_close(w, mean, size) for w, mean in zip(whole, means)):
            count = int(taken.sum())
            added = count > 1 and all(_close(w, count * mean, count * size) for w, mean in zip(whole, means))
            raise _mixing(point.loss, point.faults, _SUM) if added else _mixing(point.loss, point.faults)
    if loss.layers is not None and not _layers_agree(point, float(size)):
        loss.layers = None
    _run(loss, tensors, rows)
    loss.checked = True


class _Point(NamedTuple):
    """Gradients at some values of the parameters."""

    loss: PrivateLoss
    values: list[Tensor]  # (K, ...)
    rows: Sequence[Tree]  # (B, ...) of each client
    taken: Tensor  # (K, B) bool, which places have rows
    key: Tensor | None  # (K,)
    whole: list[list[Tensor]]  # (...) float64 by client, of the loss of the drawn rows
    examples: list[Tensor]  # (K, B, ...) float64, of the examples' own losses; 0 for rows that are not drawn
    bound: float  # on relative rounding
    faults: Faults  # of the called operations


def _some_point(loss: PrivateLoss, tensors: Mapping[str, Tensor], rows: Sequence[Tree]) -> _Point | None:
    """Return gradients away from the initial values, or at them; None where none is finite."""
    rows, values, key = _started(loss, tensors, rows)
    return _point(loss, [_perturbed(v, random.fold_in(random.key(0).to(v.device), n)) for n, v in enumerate(values)],
                  rows, key) or _point(loss, values, rows, key)  # fmt: skip


def _started(
    loss: PrivateLoss, tensors: Mapping[str, Tensor], rows: Sequence[Tree]
) -> tuple[Sequence[Tree], list[Tensor], Tensor | None]:
    """Return rows and initial values `(K, ...)` in the loss's dtype, and keys `(K,)` if it draws."""
    like = next(loss.objective.parameters())
    rows = [tree.map(lambda leaf: leaf.to(like.dtype) if leaf.is_floating_point() else leaf, each) for each in rows]
    values = [tensors[n].detach().to(like).expand(len(rows), *tensors[n].shape).clone() for n in loss.tensors]
    clients = torch.arange(len(rows), device=like.device)
    return rows, values, random.fold_in(random.key(0).to(like.device), clients) if loss.random else None


def _run(loss: PrivateLoss, tensors: Mapping[str, Tensor], rows: Sequence[Tree]) -> None:
    """Compute a step in the loss's own dtype."""
    rows, values, key = _started(loss, tensors, rows)
    padded, taken = _padded(rows)
    try:
        loss.clipped(values, padded, taken, 0, key)
    except Exception as error:
        raise _not_stacked(loss, Faults(), error) from error


def _point(loss: PrivateLoss, values: list[Tensor], rows: Sequence[Tree], key: Tensor | None) -> _Point | None:
    """Return the gradients at `values`, of the rows where they are finite.

    Raises:
        ValueError: gradients of a batch are finite, those of single examples never.
    """
    faults = Faults()
    with _Precision() as precision:
        _run_one(loss, values, rows, key, faults)
        examples, taken = _by_example(loss, values, rows, key, faults)
        finite = torch.stack([leaf.flatten(2).isfinite().all(2) for leaf in examples]).all(0) & taken
        some = finite.any(1).nonzero()[:, 0].tolist()
        if some and not torch.equal(finite, taken):
            rows = [tree.map(lambda leaf, k=k: leaf[finite[k, : len(leaf)]], rows[k]) for k in some]
            values, key = [value[some] for value in values], None if key is None else key[some]
            examples, taken = _by_example(loss, values, rows, key, faults)
        with faults:
            whole = [_batch_gradient(loss, [v[k] for v in values], each, _of(key, k)) for k, each in enumerate(rows)]
    if some:
        counted = [torch.where(tree.along(taken, leaf), leaf.to(torch.float64), 0.0) for leaf in examples]
        wholes = [[w.to(torch.float64) for w in each] for each in whole]
        return _Point(loss, values, rows, taken, key, wholes, counted, math.sqrt(precision.eps), faults)
    if all(bool(leaf.isfinite().all()) for each in whole for leaf in each):
        raise _mixing(loss, faults)
    return None


def _run_one(loss: PrivateLoss, values: list[Tensor], rows: Sequence[Tree], key: Tensor | None, faults: Faults) -> None:
    """Compute the gradient of one example, without `vmap`."""
    one = tree.map(lambda leaf: leaf[:1], rows[0])
    try:
        with faults:
            _batch_gradient(loss, [value[0] for value in values], one, _of(key, 0))
    except Exception as error:
        raise ValueError(
            "Expected a loss that is the mean of its examples' losses, but it fails on one alone: "
            f"{'; '.join([str(error), *faults.named()])}"
        ) from error


def _by_example(
    loss: PrivateLoss, values: list[Tensor], rows: Sequence[Tree], key: Tensor | None, faults: Faults
) -> tuple[Sequence[Tensor], Tensor]:
    """Return the gradients of clients' examples, `(K, B, ...)`, and the mask of their rows, `(K, B)`."""
    padded, taken = _padded(rows)
    try:
        return loss.by_example(values, padded, 0, key)[0], taken
    except Exception as error:
        raise _not_stacked(loss, faults, error) from error


def _of(key: Tensor | None, client: int) -> Tensor | None:
    return None if key is None else key[client]


def _padded(rows: Sequence[Tree]) -> tuple[Tree, Tensor]:
    """Pad clients' rows by repetitions, `(K, B, ...)`, with their mask `(K, B)`."""
    sizes = torch.tensor([len(tree.leaves(each)[0]) for each in rows])
    width = int(sizes.max())
    at = [torch.where(torch.arange(width) < size, torch.arange(width), 0) for size in sizes]
    device = tree.leaves(rows[0])[0].device
    whole = [tree.map(lambda leaf, k=k: leaf[at[k].to(device)], each) for k, each in enumerate(rows)]
    return tree.stack(whole), (torch.arange(width) < sizes[:, None]).to(device)


def _layers_agree(point: _Point, rounding: float) -> bool:
    """Return whether ghost norms clip like the examples' own gradients, tensor by tensor; if not, log a warning."""
    loss, examples, taken = point.loss, point.examples, point.taken
    sizes = _norms(examples)
    for clip in (1e300, float(sizes[taken].median())):
        loss.clip = clip
        sums, _ = loss.clipped(point.values, _padded(point.rows)[0], taken, 0, point.key)
        if loss.layers is None:
            return False
        share = torch.where(taken, clip * SLACK / sizes, 0.0).clamp(max=1)
        for name, total, leaf in zip(loss.tensors, sums, examples):
            weighted = leaf * tree.along(share, leaf)
            scale = point.bound * float(weighted.flatten(2).norm(dim=2).sum()) + rounding
            if not _close(total.to(torch.float64), weighted.sum(1), 2 * scale):
                _LOG.warning("training continues with ghost=False: ghost norms give another gradient of %s", name)
                return False
    return True


def _mixing(loss: PrivateLoss, faults: Faults, otherwise: str = "the loss of a batch mixes them") -> ValueError:
    """Return the error for a loss that mixes examples, with the operations at fault; `otherwise` if none is known."""
    known = suspects(loss.objective.module)
    guess = f"{otherwise}, perhaps by {', or by '.join(known)}" if known else otherwise
    return ValueError(
        f"Expected a loss that is the mean of its examples' losses, but {'; '.join(faults.named()) or guess} "
        "(DP-SGD clips the gradient of each example's own loss, and trains with their mean)"
    )


def _not_stacked(loss: PrivateLoss, faults: Faults, error: Exception) -> ValueError:
    name = type(loss.objective.module).__name__
    return ValueError(
        "Expected a module whose gradients torch.vmap can compute example by example, but it cannot run "
        f"{name}: {'; '.join([*faults.named(), str(error)])}"
    )


def _batch_gradient(loss: PrivateLoss, values: list[Tensor], rows: Tree, key: Tensor | None) -> Sequence[Tensor]:
    """Return the gradient `(...)` of one client's loss, without `vmap`."""
    tracked = [value.clone().requires_grad_() for value in values]
    with torch.enable_grad(), nullcontext() if key is None else KeyedRandomness(key):
        total = loss.single(tracked, rows, None, 0)[0]
        gradients = torch.autograd.grad(total, tracked, allow_unused=True)
    return [torch.zeros_like(value) if gradient is None else gradient for gradient, value in zip(gradients, tracked)]


def _norms(examples: list[Tensor]) -> Tensor:
    """Return the norm of each example's whole gradient, `(K, B)`."""
    return torch.stack([leaf.flatten(2).square().sum(2) for leaf in examples]).sum(0).sqrt()


def _perturbed(value: Tensor, key: Tensor) -> Tensor:
    """Return a randomly perturbed tensor with the same signs."""
    step = _AWAY * random.normal(key, value.shape, torch.float64).to(value).clamp(-3, 3)
    return torch.where(value == 0, step, value * (1 + step))


def _close(first: Tensor, second: Tensor, bound: float | Tensor) -> bool:
    return bool(((first - second).abs() <= bound).all())


class _Precision(TorchDispatchMode):
    """Records the coarsest real dtype used in computations.

    Attributes:
        eps: their rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eps = torch.finfo(torch.float64).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in output if isinstance(output, tuple | list) else (output,):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return output
