"""Argument checks, whose errors name the expectation, the value and the remedy.

>>> from fedtorch import expected
>>> expected.positive(lr=float("inf"))
Traceback (most recent call last):
ValueError: Expected a finite lr, but got inf
>>> expected.kind(3, str, "a name", "use str()")
Traceback (most recent call last):
TypeError: Expected a name, but got int; use str()
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.tree import Tree


def kind(value: Any, types: type | tuple[type, ...], what: str, advice: str) -> None:
    """Raise TypeError unless `value` is an instance of `types`."""
    if not isinstance(value, types):
        raise TypeError(f"Expected {what}, but got {_described(value)}; {advice}")


def function(value: Any, what: str, advice: str) -> None:
    """Raise TypeError unless `value` can be called.

    Example:
        >>> function(3, "loss= as a function of (output, target)", "such as torch.nn.functional.mse_loss")
        Traceback (most recent call last):
        TypeError: Expected loss= as a function of (output, target), but got int; such as torch.nn.functional.mse_loss
    """
    if not callable(value):
        raise TypeError(f"Expected {what}, but got {_described(value)}; {advice}")


def dense(leaf: Tensor, where: str) -> None:
    """Raise TypeError for sparse and quantised tensors, which cannot be stacked.

    Example:
        >>> dense(torch.eye(2).to_sparse(), "x")
        Traceback (most recent call last):
        TypeError: Expected dense numbers in x, but got torch.sparse_coo of torch.float32; use to_dense or dequantize
    """
    if leaf.layout != torch.strided or leaf.is_quantized:
        raise TypeError(
            f"Expected dense numbers in {where}, but got {leaf.layout} of {leaf.dtype}; use to_dense or dequantize"
        )


def positive(**numbers: Any) -> None:
    """Raise ValueError unless all are above 0 and finite."""
    for name, value in numbers.items():
        if not _finite(name, value) or value <= 0:
            raise ValueError(f"Expected a positive {name}, but got {value}")


def not_negative(**numbers: Any) -> None:
    """Raise ValueError unless all are at least 0 and finite.

    Example:
        >>> not_negative(momentum=0.0, weight_decay=-0.1)
        Traceback (most recent call last):
        ValueError: Expected weight_decay of at least 0, but got -0.1
    """
    for name, value in numbers.items():
        if not _finite(name, value) or value < 0:
            raise ValueError(f"Expected {name} of at least 0, but got {value}")


def like(values: Tree, example: Tree, what: str, advice: str) -> None:
    """Raise ValueError unless `values` have the names and shapes of `example`.

    Example:
        >>> like({"w": torch.zeros(3)}, {"w": torch.zeros(2)}, "parameter", "take those of the module")
        Traceback (most recent call last):
        ValueError: Expected parameter 'w' to be of shape (2,), but got it of shape (3,); take those of the module
    """
    got, wanted = ({name: tuple(leaf.shape) for name, leaf in tree.items(each)} for each in (values, example))
    for name in {**wanted, **got}:
        if wanted.get(name) != got.get(name):
            of = lambda shapes, name=name: f"of shape {shapes[name]}" if name in shapes else "absent"
            raise ValueError(f"Expected {what} {name!r} to be {of(wanted)}, but got it {of(got)}; {advice}")


def client_number(client: int | str, names: Sequence[str]) -> int:
    """Return the index of a client that is given by index or name.

    Raises:
        ValueError: there is no such client.

    Example:
        >>> client_number("b", names=["a", "b"])
        1
    """
    if isinstance(client, str):
        if client not in names:
            raise ValueError(f"Expected the name of one of {len(names)} clients, but got {client!r}")
        return names.index(client)
    if not 0 <= operator.index(client) < len(names):
        raise ValueError(f"Expected a client between 0 and {len(names) - 1}, but got {client}")
    return operator.index(client)


def loaded(module: str, name: str) -> Any:
    """Return a module's class `name` for `isinstance`, or () if the module has not been imported.

    Example:
        >>> isinstance(3, loaded("a_module_that_is_not_imported", "Number"))
        False
    """
    return getattr(sys.modules.get(module), name, ())


def _finite(name: str, value: Any) -> bool:
    """Return whether a number is not NaN."""
    try:
        infinite = math.isinf(value)
    except TypeError as error:
        raise TypeError(f"Expected {name} as a number, but got {value!r}") from error
    if infinite and value > 0:
        raise ValueError(f"Expected a finite {name}, but got {value}")
    return not math.isnan(value)


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return str(value) if isinstance(value, float) else type(value).__name__
