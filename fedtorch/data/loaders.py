"""Clients whose rows stay in their own loaders: a round reads the loaders' batches.

>>> import torch
>>> from torch.utils.data import DataLoader, TensorDataset
>>> rows = lambda n: TensorDataset(torch.zeros(n, 2), torch.zeros(n))
>>> from_loaders({"north": DataLoader(rows(5), batch_size=2), "south": DataLoader(rows(3), batch_size=3, shuffle=True)})
FederatedLoaders(2 clients, 8 rows, 3–5 per client, from loaders)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from fedtorch import expected
from fedtorch.data.client_loaders import ClientLoaders, NoRows
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule


Stage = Literal["fit", "validate", "test", "predict"]
_LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False, repr=False)
class FederatedLoaders:
    """The loaders of `K` clients, as `from_loaders` and `from_datamodules` make them; a population takes them as data.

    A round reads the batches of its clients, one at a time, and stores none. Local solvers with minibatches train on
    them: `ft.lightning_fit` and `ft.gradient_descent`. Solvers that need all rows of a client at once, such as a closed
    form or a Gibbs sampler, refuse them.

    Args:
        loaders: one for each client, to train on.
        counts: `(K,)` int64, the rows of one pass over each.
        names: of the clients.
        pad, mask: conversion of ragged batches to tensors; see `from_loaders`.
        modules: the loaders' data modules, if there are any.
        device: device of the batches.

    Attributes:
        on_disk: rows are read when a round needs them.

    Example:
        >>> import torch, fedtorch as ft
        >>> from torch.utils.data import DataLoader
        >>> data: ft.data.FederatedLoaders = ft.data.from_loaders({"a": DataLoader([5, 6, 7], batch_size=2)})
        >>> data.names, data.counts, data.loader("a").batch_size
        (('a',), tensor([3]), 2)
        >>> list(data.batches("a", seed=0))
        [tensor([5, 6]), tensor([7])]
    """

    loaders: tuple[Any, ...]
    counts: Tensor
    names: tuple[str, ...]
    pad: Tree = None
    mask: Mapping[Any, Any] | None = None
    modules: tuple[LightningDataModule, ...] = ()
    device: torch.device = _CPU
    on_disk: bool = field(init=False, default=True)
    _block: type[ClientLoaders] = field(init=False)
    _known: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_block", type("ClientLoaders", (ClientLoaders,), {"source": self}))

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return (
            f"FederatedLoaders({len(self)} client{'s' * (len(self) != 1)}, {int(self.counts.sum())} rows, "
            f"{int(self.counts.min())}–{int(self.counts.max())} per client, from loaders)"
        )

    def __getitem__(self, client: int) -> NoReturn:
        raise NoRows

    @property
    def rows(self) -> NoReturn:
        """Raise NoRows: there are no rows in tensors."""
        raise NoRows

    def loader(self, client: int | str, stage: Stage = "fit") -> Any:
        """Return a client's own loader, of one of its data module's stages if it has one.

        Raises:
            ValueError: there is no loader, client or stage of this name.
        """
        number = expected.client_number(client, self.names)
        if stage not in _LOADERS:
            raise ValueError(f"Expected a stage among {list(_LOADERS)}, but got {stage!r}")
        if stage == "fit":
            return self.loaders[number]
        if not self.modules:
            raise ValueError(
                f"Expected a data module for the loader of stage {stage!r} of client {self.names[number]!r}, but got a "
                "single loader; make other data of these: ft.data.from_loaders({name: loader})"
            )
        return _loader_of(self.modules[number], self.names[number], stage)

    def for_stage(self, stage: Stage, lengths: Mapping[str, int] | None = None) -> FederatedLoaders:
        """Return the same clients with their loaders of another stage, such as "validate", "test" or "predict".

        Args:
            stage: of the data modules.
            lengths: the rows of one pass, by client, if the loaders have no length; see `from_loaders`.
        """
        loaders = {name: self.loader(name, stage) for name in self.names}
        return replace(_made(loaders, lengths or {}, self.pad, self.mask, self.modules), device=self.device)

    def batches(self, client: int | str, seed: int) -> Iterator[Any]:
        """Iterate over one pass of a client's loader, with its random draws from `seed`, on the device of the data.

        Torch's, NumPy's and Python's generators are seeded while a batch is read, and restored after it; those of
        loader and samplers are restored at the end: iterate to the end, or close it.

        Raises:
            BadClients: the loader fails, or has no batch.
        """
        with self.stack([expected.client_number(client, self.names)]).opened(0, seed, apart=True) as passes:
            yield from passes

    def steps(self, client: int) -> int:
        """Return the batches of one pass over a client's loader, as far as its length is known."""
        if client not in self._known:
            self._known[client] = steps_of_pass(self.loaders[client], int(self.counts[client]))
        return self._known[client]

    def stack(self, ids: Tensor | Sequence[int], size: int | None = None) -> ClientLoaders:
        """Return the loaders of clients `ids` `(C,)` as one block, for any `size`."""
        ids = torch.as_tensor(ids, dtype=torch.int64, device="cpu")
        return self._block(ids, self.counts[ids].to(self.device))

    def groups(self, max_ratio: float = 1.5, small: int = 0) -> list[Tensor]:
        """Return the ids of all clients as one group, because nothing is padded."""
        return [torch.arange(len(self))]

    def buckets(self, max_ratio: float = 1.5, small: int = 0) -> NoReturn:
        """Raise NoRows: there are no rows in tensors."""
        raise NoRows

    def split(self, fraction: float, seed: int) -> NoReturn:
        """Raise NoRows: there are no rows in tensors."""
        raise NoRows

    def select(self, ids: Tensor | Sequence[int]) -> FederatedLoaders:
        """Return the clients `ids` `(C,)`, all different, in the order of `ids`."""
        ids = torch.as_tensor(ids, dtype=torch.int64)
        some = lambda every: tuple(every[k] for k in ids.tolist())
        modules = some(self.modules) if self.modules else ()
        return replace(
            self, loaders=some(self.loaders), counts=self.counts[ids], names=some(self.names), modules=modules
        )

    def to(self, device: torch.device | str) -> FederatedLoaders:
        """Return loaders whose batches are moved to `device`."""
        return replace(self, device=torch.device(device))


def from_loaders(
    loaders: Mapping[str, Any],
    *,
    lengths: Mapping[str, int] | None = None,
    pad: Tree = None,
    mask: Mapping[Any, Any] | None = None,
) -> FederatedLoaders:
    """Make a client of each `DataLoader`, whose batches are used unchanged.

    Its `collate_fn`, samplers, workers and data set stay as they are: items may be lists, None, ragged, any objects. In
    every round torch's, NumPy's and Python's generators, those of the workers, and generators of loader and samplers
    are seeded from the client's key, so that a run is reproducible, also when resumed. Workers end with the client's
    part in a round.

    Args:
        loaders: one for each client, by name: a `DataLoader`, or another iterable of batches that restarts with every
            `iter`, such as Lightning's `CombinedLoader`.
        lengths: the rows of one pass, by client, if a loader has no length, as over an `IterableDataset`. They are the
            client's weight, and with the loader's batch size the position in its schedule.
        pad: makes tensors of ragged batches: the value that pads the rows of each leaf, in the structure of a batch,
            such as `{"words": 0, "label": -100}`. A leaf is a tensor `(B, ...)`, which is not changed, or a list of B
            tensors, which are padded to the longest of their own batch. `ft.gradient_descent` trains batches with equal
            resulting shapes together, so that a client's numbers do not depend on the others'.
        mask: entries that are added to a padded batch: `{"mask": "words"}` adds `mask`, `(B, ...)` bool, which is True
            where `words` has data; `{2: 0}` does so for batches that are tuples.

    Raises:
        TypeError: not a loader, or one that can be iterated once only.
        ValueError: a loader without batches, or of unknown length; the message names the client.

    Example:
        >>> import torch, fedtorch as ft
        >>> from torch.utils.data import DataLoader
        >>> def collate(items):  # sentences of several lengths, and some without a label
        ...     known = [(torch.tensor(words), label) for words, label in items if label is not None]
        ...     return [words for words, _ in known], torch.tensor([label for _, label in known])
        >>> class Sentences(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.words = torch.nn.EmbeddingBag(10, 2)
        ...     def forward(self, sentences):
        ...         return torch.cat([self.words(words[None]) for words in sentences])
        >>> clients = {"a": [([1, 2], 0), ([3], None), ([4, 5, 6], 1)], "b": [([7], 1), ([8, 9], 0)]}
        >>> data = ft.data.from_loaders(
        ...     {name: DataLoader(items, batch_size=3, collate_fn=collate) for name, items in clients.items()})
        >>> local = ft.gradient_descent(
        ...     Sentences(), epochs=1, batched=False, loss=torch.nn.functional.cross_entropy,
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        >>> run = ft.run(ft.fedavg(local), ft.InProcess(data), rounds=2, progress=False)
        >>> run.history["train_loss"].notna().tolist()
        [True, True]
    """
    if not isinstance(loaders, Mapping):
        raise TypeError(f"Expected loaders by client, {{name: DataLoader}}, but got {type(loaders).__name__}")
    return _made(loaders, lengths or {}, pad, mask, ())


def from_datamodules(
    modules: Mapping[str, LightningDataModule],
    *,
    lengths: Mapping[str, int] | None = None,
    pad: Tree = None,
    mask: Mapping[Any, Any] | None = None,
) -> FederatedLoaders:
    """Make a client of each LightningDataModule, which is prepared and set up here, once, and provides its loaders.

    `ft.lightning_fit` passes it to the client's Trainer, so that its hooks act and its validation runs if the module
    has a `validation_step`. Its other loaders are those of `FederatedLoaders.for_stage`.

    Args:
        modules: one for each client, by name.
        lengths: the rows of one pass, by client; see `from_loaders`.
        pad, mask: conversion of ragged batches to tensors; see `from_loaders`.

    Raises:
        TypeError: not a data module.
        ValueError: one has no training loader; the message names the client.

    Example:
        >>> import lightning, torch, fedtorch as ft
        >>> class Hospital(lightning.LightningDataModule):
        ...     def __init__(self, rows):
        ...         super().__init__()
        ...         self.rows = rows
        ...     def train_dataloader(self):
        ...         return torch.utils.data.DataLoader(self.rows, batch_size=2, shuffle=True)
        ...     def val_dataloader(self):
        ...         return torch.utils.data.DataLoader(self.rows[:1])
        >>> data = ft.data.from_datamodules({"A": Hospital([1.0, 2.0, 3.0]), "B": Hospital([4.0, 5.0])})
        >>> data.counts, data.for_stage("validate").counts
        (tensor([3, 2]), tensor([1, 1]))
    """
    from lightning.pytorch import LightningDataModule

    for name, module in modules.items():
        if not isinstance(module, LightningDataModule):
            raise TypeError(
                f"Expected a LightningDataModule for client {name!r}, but got {type(module).__name__}; loaders go into "
                "ft.data.from_loaders"
            )
        module.prepare_data()
    loaders = {name: _loader_of(module, name, "fit") for name, module in modules.items()}
    return _made(loaders, lengths or {}, pad, mask, tuple(modules.values()))


def _loader_of(module: LightningDataModule, client: str, stage: Stage) -> Any:
    """Return the loader of a data module, after setting it up for the stage."""
    from lightning.pytorch import LightningDataModule

    name = _LOADERS[stage]
    if getattr(type(module), name) is getattr(LightningDataModule, name) and name not in vars(module):
        raise ValueError(
            f"Expected {name} of {type(module).__name__}, the data module of client {client!r}, but got none"
        )
    module.setup(stage)
    return getattr(module, name)()


def _made(
    loaders: Mapping[str, Any],
    lengths: Mapping[str, int],
    pad: Tree,
    mask: Mapping[Any, Any] | None,
    modules: tuple[Any, ...],
) -> FederatedLoaders:
    if not loaders:
        raise ValueError("Expected at least one client, but got none; pass {name: loader}")
    unknown = [name for name in lengths if name not in loaders]
    if unknown:
        raise ValueError(f"Expected lengths of the clients {list(loaders)}, but got {unknown}; name them alike")
    if mask and pad is None:
        raise ValueError(
            f"Expected pad= beside mask={dict(mask)}, but got none; give the value that fills up each leaf"
        )
    if mask and not isinstance(pad, (Mapping, tuple, list)):
        raise ValueError(
            f"Expected pad= as a dict or a tuple, as batches are that mask={dict(mask)} is added to, but got {pad!r}; "
            "let collate_fn make such batches"
        )
    counts = [rows_of_pass(name, loader, lengths.get(name)) for name, loader in loaders.items()]
    return FederatedLoaders(tuple(loaders.values()), torch.tensor(counts), tuple(loaders), pad, mask, modules)


def rows_of_pass(name: str, loader: Any, stated: int | None) -> int:
    """Return the number of rows of one pass over a client's loader."""
    if not isinstance(name, str):
        raise TypeError(f"Expected client names as strings, but got {name!r}; use str()")
    if isinstance(loader, Tensor | str) or not hasattr(loader, "__iter__"):
        raise TypeError(f"Expected a DataLoader for client {name!r}, but got {type(loader).__name__}")
    parts = loader.values() if isinstance(loader, Mapping) else loader if isinstance(loader, (list, tuple)) else ()
    if any(isinstance(part, DataLoader) for part in parts):
        raise TypeError(
            f"Expected one loader for client {name!r}, but got a {type(loader).__name__} of {len(loader)}; join "
            "them by Lightning's CombinedLoader, or make data of each"
        )
    if hasattr(loader, "__next__") and not hasattr(loader, "__len__"):
        raise TypeError(
            f"Expected a loader that begins anew in every round for client {name!r}, but got {type(loader).__name__}, "
            "which can be gone through once only"
        )
    count = _known_rows(loader) if stated is None else operator.index(stated)
    if count is None:
        raise ValueError(
            f"Expected a known number of rows of client {name!r}, but its loader has none; pass "
            f"lengths={{{name!r}: rows}}"
        )
    if count < 1 or steps_of_pass(loader, count) < 1:
        raise ValueError(
            f"Expected at least one batch per client, but got none from the loader of client {name!r}; leave the "
            "client out, or take drop_last=False"
        )
    return count


def _known_rows(loader: Any) -> int | None:
    """Return the number of rows of one pass, None where the loader has no length."""
    if not isinstance(loader, DataLoader):
        return None
    if loader.batch_sampler is None and loader.batch_size is None:  # items may be rows or whole batches
        return None
    if isinstance(loader.batch_sampler, (list, tuple)):
        return sum(len(batch) for batch in loader.batch_sampler)
    try:
        if isinstance(loader.dataset, IterableDataset) or type(loader.batch_sampler) is not BatchSampler:
            return len(loader.dataset)  # type: ignore[arg-type]
        count = len(loader.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    size = loader.batch_size or 1
    return count // size * size if loader.drop_last else count


def steps_of_pass(loader: Any, count: int) -> int:
    """Return the batches of one pass, by the loader's length or else by its rows and batch size."""
    try:
        # some have a length only after their start
        return len(loader if not hasattr(loader, "__next__") else iter(loader))
    except (TypeError, NotImplementedError):
        size = getattr(loader, "batch_size", None) or 1
        return count // size if getattr(loader, "drop_last", False) else -(-count // size)
