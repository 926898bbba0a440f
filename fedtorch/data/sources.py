"""`FederatedData` from lists of tensors, torch data sets and loaders; `frames` has data frames.

>>> import torch
>>> from fedtorch.data import from_tensors
>>> from_tensors([(torch.zeros(2, 3), torch.zeros(2)), (torch.ones(1, 3), torch.ones(1))], names=["a", "b"])
FederatedData(2 clients, 3 rows, 1–2 per client, fields 0: float32 (3,), 1: float32 ())
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from fedtorch import expected, tree
from fedtorch.data.federated import FederatedData, field_name
from fedtorch.tree import Tree


def from_tensors(
    clients: Sequence[Tree], names: Sequence[str] | None = None, *, allow_empty: bool = False
) -> FederatedData:
    """Make a client of each tree of tensors or NumPy arrays, whose leading dimension is the client's rows.

    Every field keeps its dtype: a NumPy array of float64 stays float64.

    Args:
        clients: trees (tuples, dicts, `NamedTuple`s) of one structure, such as `(x (n_k, d), y (n_k,))`.
        names: one per client.
        allow_empty: whether a client may have no rows, such as an unlabelled node of a network: `(0, d)` and `(0,)`.

    Raises:
        TypeError: a leaf is neither a tensor nor a numeric array.
        ValueError: no clients, an empty client, fields with different numbers of rows, or clients that
            disagree in fields, shapes, dtypes or devices. Messages name the client.
    """
    labels = tuple(names) if names is not None else tuple(str(k) for k in range(len(clients)))
    if len(clients) == 0:
        raise ValueError("Expected at least one client, but got none; pass a list with one tree per client")
    if len(labels) != len(clients):
        raise ValueError(f"Expected {len(clients)} client names, but got {len(labels)}; pass one per client")
    trees = [as_tensors(client, f" of client {label!r}") for client, label in zip(clients, labels)]
    flat = [tree.flatten(client) for client in trees]
    counts = [_count_rows(fields, label) for fields, label in zip(flat, labels)]
    expected = _signature(flat[0])
    for fields, label in zip(flat, labels):
        if (got := _signature(fields)) != expected:
            _refuse_signature(got, expected, label, labels[0])
    joined = {path: torch.cat([fields[path] for fields in flat]) for path in flat[0]}
    return FederatedData(tree.unflatten(joined, like=trees[0]), torch.tensor(counts), labels, allow_empty=allow_empty)


def from_datasets(datasets: Sequence[Any], names: Sequence[str] | None = None) -> FederatedData:
    """Make a client of each torch `Dataset` (map-style or iterable) or `DataLoader`, read in full and in order.

    Items are those of `torch.utils.data.default_collate`: tuples such as (x, y), or dicts, of tensors, arrays and
    numbers. Only the `.dataset` of a `DataLoader` is used: batch size, shuffling, `drop_last` and workers are ignored,
    because a local solver makes its own minibatches; a loader with a subset or its own collation is refused. A random
    transform is applied once, here.

    Args:
        datasets: one per client.
        names: one per client.

    Raises:
        TypeError: a data set has no length and is not iterable, or a loader with its own sampler or
            `collate_fn`.
        ValueError: an empty data set, or items that cannot be stacked; and the errors of `from_tensors`.

    >>> north = TensorDataset(torch.zeros(3, 2), torch.zeros(3))
    >>> south = DataLoader(TensorDataset(torch.ones(5, 2), torch.ones(5)), batch_size=2)
    >>> from_datasets([north, south], names=["north", "south"])
    FederatedData(2 clients, 8 rows, 3–5 per client, fields 0: float32 (2,), 1: float32 ())
    """
    labels = [str(name) for name in (range(len(datasets)) if names is None else names)]
    if len(labels) != len(datasets):
        raise ValueError(f"Expected {len(datasets)} client names, but got {len(labels)}; pass one per client")
    return from_tensors([_read(dataset, label) for dataset, label in zip(datasets, labels)], names)


def as_tensors(value: Any, where: str = "", path: str = "") -> Tree:
    """Return a tree in which NumPy arrays have become tensors of the same dtype.

    Args:
        value: a tree of tensors and arrays.
        where: suffix of the field in messages, such as `" of client 'a'"`.
        path: the name of this leaf so far.

    >>> as_tensors({"x": numpy.ones((2, 1)), "y": torch.tensor([3, 4])})
    {'x': tensor([[1.],
            [1.]], dtype=torch.float64), 'y': tensor([3, 4])}
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        expected.dense(value, f"{field_name(path)}{where}")
        return value.detach()
    if isinstance(value, numpy.ndarray):
        try:
            return torch.from_numpy(numpy.require(value, requirements=["C", "W"]))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Expected numbers in {field_name(path)}{where}, but got an array of {value.dtype}; encode it first"
            ) from error
    step = f"{path}." if path else ""
    if isinstance(value, dict):
        return {name: as_tensors(child, where, f"{step}{name}") for name, child in value.items()}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        children = [as_tensors(child, where, f"{step}{name}") for name, child in zip(names, value)]
        return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
    raise TypeError(
        f"Expected tensors or NumPy arrays, in tuples or dicts, but got a {type(value).__name__} in "
        f"{field_name(path)}{where}; convert it with torch.tensor or numpy.array, and a list of fields with "
        "tuple"
    )


def _count_rows(fields: dict[str, Tensor], client: str) -> int:
    if not fields:
        raise ValueError(f"Expected at least one field, but got an empty tree for client {client!r}")
    sizes = {}
    for path, leaf in fields.items():
        if leaf.ndim == 0:
            raise ValueError(
                f"Expected rows (n, ...) in {field_name(path)} of client {client!r}, but got a single "
                "number; give it a leading dimension"
            )
        sizes[path] = len(leaf)
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"Expected one number of rows in all fields of client {client!r}, but got {sizes}; "
            "every field needs one row per example"
        )
    return next(iter(sizes.values()))


def _signature(fields: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {path: (tuple(leaf.shape[1:]), leaf.dtype, leaf.device) for path, leaf in fields.items()}


def _refuse_signature(got: dict[str, Any], expected: dict[str, Any], client: str, first: str) -> None:
    if got.keys() != expected.keys():
        raise ValueError(
            f"Expected fields {sorted(expected)} as in client {first!r}, but got {sorted(got)} in client "
            f"{client!r}; all clients need the same fields"
        )
    path = next(path for path in expected if got[path] != expected[path])
    what = ("row shape", "dtype", "device")
    kind = next(i for i in range(3) if got[path][i] != expected[path][i])
    raise ValueError(
        f"Expected {what[kind]} {expected[path][kind]} in {field_name(path)} as in client {first!r}, but got "
        f"{got[path][kind]} in client {client!r}; convert it, so that rows of all clients are alike"
    )


def _read(dataset: Any, client: str) -> Tree:
    if isinstance(dataset, DataLoader):
        _check_loader(dataset, client)
        dataset = dataset.dataset
    tensors = _tensors(dataset)
    if tensors is not None:
        return tensors
    if isinstance(dataset, IterableDataset):
        items = list(dataset)
    elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        items = [dataset[i] for i in range(len(dataset))]
    else:
        raise TypeError(
            "Expected a Dataset with a length, an IterableDataset or a DataLoader, but got "
            f"{type(dataset).__name__} for client {client!r}; for tensors use from_tensors"
        )
    if not items:
        raise ValueError(f"Expected at least one row per client, but got an empty data set for client {client!r}")
    return stack_items(items, f" for client {client!r}")


def stack_items(items: list[Any], where: str = "") -> Tree:
    """Return items of a data set as one tree `(n, ...)`.

    Raises:
        ValueError: they cannot be stacked.

    >>> stack_items([(torch.ones(2), 5), (torch.zeros(2), 7)])
    (tensor([[1., 1.],
            [0., 0.]]), tensor([5, 7]))
    """
    try:
        return _tuples(default_collate(items))
    except (TypeError, RuntimeError, KeyError) as error:
        raise ValueError(
            f"Expected items of one shape that can be stacked, but got {error}{where}; "
            "let the data set return tensors, arrays or numbers"
        ) from error


def as_rows(value: Any) -> Tree:
    """Return tensors and arrays as by `as_tensors`; a map-style data set of anything else as its item numbers.

    >>> tensors = TensorDataset(torch.zeros(4, 2), torch.zeros(4))
    >>> as_rows(torch.utils.data.ConcatDataset([tensors, tensors]))  # items are read later
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if isinstance(value, Dataset) or hasattr(value, "__getitems__"):
        if not hasattr(value, "__len__"):
            raise TypeError(f"Expected a data set with a length, but got {type(value).__name__}; see from_datasets")
        tensors = _tensors(value)
        return torch.arange(len(value)) if tensors is None else tensors
    return as_tensors(value)


def _tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """Return the tensors of a `TensorDataset`, or of subsets of one, without reading single items."""
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if type(dataset) is Subset and (tensors := _tensors(dataset.dataset)) is not None:
        return tuple(leaf[torch.as_tensor(dataset.indices, dtype=torch.int64)] for leaf in tensors)
    return None


def _tuples(node: Any) -> Any:
    """Turn the lists that `default_collate` makes of tuples back into tuples."""
    if isinstance(node, dict):
        return {name: _tuples(child) for name, child in node.items()}
    if isinstance(node, list):
        return tuple(_tuples(child) for child in node)
    return node


def _check_loader(loader: DataLoader[Any], client: str) -> None:
    if loader.collate_fn is not default_collate:
        raise TypeError(
            "Expected a DataLoader with batches and the default collate_fn, but got its own for client "
            f"{client!r}; let the data set return what the model needs, or use from_tensors"
        )
    if isinstance(loader.dataset, IterableDataset):
        return
    batches, sampler = loader.batch_sampler, loader.sampler
    once = isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)
    if type(batches) is not BatchSampler or not once or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        raise TypeError(
            f"Expected a DataLoader that reads each row once, but got one with {type(batches).__name__} over "
            f"{type(sampler).__name__} for client {client!r}; pass torch.utils.data.Subset(dataset, indices) "
            "instead"
        )
