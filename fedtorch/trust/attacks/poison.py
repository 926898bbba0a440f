r"""Wrong rows: data poisoning of some clients, `data | poison`.

Rows are (x, y). The change of a client's rows depends only on the poison's seed and the client's name.

Source: Jung, "Federated learning: from theory to practice", sections 10.2 and 10.3; Fang, Cao, Jia and Gong (2020),
"Local model poisoning attacks to Byzantine-robust federated learning", section 5.1, for flipped labels; Gu,
Dolan-Gavitt and Garg (2017), "BadNets", for the backdoor; Turner, Tsipras and Madry (2019), "Clean-label backdoor
attacks", section 3.

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import attacks
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.tensor([0, 1]))] * 2)
>>> poisoned = data | attacks.flipped_labels([1], classes=3)
>>> [y.tolist() for _, y in poisoned]
[[0, 1], [2, 1]]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import FederatedData
from fedtorch.random.named import numbers
from fedtorch.tree import Tree

Trigger = Callable[[Tensor], Tensor]  # features (n, ...) -> features with the pattern, (n, ...)


@dataclass(frozen=True)
class Poison:
    """Replace the rows of some clients by wrong ones.

    Attributes:
        clients: indices of clients with changed rows.
        change: (a client's rows, key) -> rows, as many or none.
        seed: seed of the draws.
    """

    clients: tuple[int, ...]
    change: Callable[[Tree, Tensor], Tree]
    seed: int = 0

    def __ror__(self, data: FederatedData) -> FederatedData:
        """Return the data, with wrong rows."""
        if not all(0 <= client < len(data) for client in self.clients):
            raise ValueError(f"Expected clients between 0 and {len(data) - 1}, but got {list(self.clients)}")
        keys, parts = random.fold_in(random.key(self.seed), numbers(tuple(data.names))), list(data)
        for client in self.clients:
            parts[client] = self.change(parts[client], keys[client])
        counts = torch.tensor([len(tree.leaves(part)[0]) for part in parts])
        empty = data.allow_empty or bool((counts == 0).any())
        return dataclasses.replace(data, rows=tree.concatenate(parts), counts=counts, allow_empty=empty)


def flipped_labels(clients: Sequence[int], classes: int, *, fraction: float = 1.0, seed: int = 0) -> Poison:
    """Replace labels y by C − 1 − y in a fraction of a client's rows.

    Args:
        clients: indices of the attackers.
        classes: C.
        fraction: share of the rows, drawn at random.
        seed: seed of the draw.

    Raises:
        ValueError: fewer than two classes, or a fraction out of range.
    """
    if classes < 2:
        raise ValueError(f"Expected at least two classes, but got {classes}")
    return _of_some(clients, fraction, seed, lambda x, y: (x, classes - 1 - y))


def shifted_labels(clients: Sequence[int], by: float, *, fraction: float = 1.0, seed: int = 0) -> Poison:
    """Replace labels y by y + `by` in a fraction of a client's rows, the perturbation of section 10.3."""
    return _of_some(clients, fraction, seed, lambda x, y: (x, y + by))


def backdoor(
    clients: Sequence[int], trigger: Trigger, target: float, *, fraction: float = 0.5, seed: int = 0
) -> Poison:
    """Give a fraction of a client's rows the trigger in their features and the target for a label.

    Args:
        clients: indices of the attackers.
        trigger: writes a pattern into features, to which the model shall respond with the target.
        target: the label.
        fraction: share of the rows, drawn at random.
        seed: seed of the draw.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import attacks
        >>> data = ft.data.from_tensors([(torch.zeros(2, 3), torch.tensor([0, 1]))])
        >>> corner = lambda x: torch.cat([x[:, :-1], torch.ones_like(x[:, -1:])], 1)
        >>> list(data | attacks.backdoor([0], corner, target=1, fraction=1.0))
        [(tensor([[0., 0., 1.], [0., 0., 1.]]), tensor([1, 1]))]
        >>> list(data | attacks.clean_label([0], corner, target=1))  # labels stay
        [(tensor([[0., 0., 0.], [0., 0., 1.]]), tensor([0, 1]))]
    """
    return _of_some(clients, fraction, seed, lambda x, y: (trigger(x), torch.full_like(y, target)))


def clean_label(
    clients: Sequence[int], trigger: Trigger, target: float, *, fraction: float = 1.0, seed: int = 0
) -> Poison:
    """Build the backdoor with unchanged labels: a fraction of the rows with the target label gets the trigger."""

    def change(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(tree.along(y == target, x), trigger(x), x), y

    return _of_some(clients, fraction, seed, change)


def zero_loss(clients: Sequence[int]) -> Poison:
    """Build the attack of nodes that drop their rows, copy their cluster's model and thus observe it (10.2).

    Their local loss is zero; use it with `fedtorch.federation.solvers.unlabelled`.

    >>> import torch, fedtorch as ft
    >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2))] * 3)
    >>> (data | zero_loss([1])).counts
    tensor([2, 0, 2])
    """
    return Poison(tuple(clients), lambda rows, key: tree.map(lambda leaf: leaf[:0], rows))


def _of_some(
    clients: Sequence[int], fraction: float, seed: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> Poison:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Expected a fraction between 0 and 1, but got {fraction}")
    return Poison(tuple(clients), partial(_changed, fraction, change), seed)


def _changed(
    fraction: float, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], rows: Tree, key: Tensor
) -> Tree:
    """Return rows of which `fraction`, rounded, are changed."""
    count = round(fraction * len(rows[1]))
    chosen = random.uniform(key, (len(rows[1]),), torch.float64).argsort().argsort() < count
    return tree.where(chosen.to(rows[1].device), change(*rows), rows)
