"""Clients' rows in a safetensors file, from which a round reads only its clients' rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from fedtorch import checkpoint, tree

_COUNTS = "counts"


def write_rows(file: Path | str, rows: tree.Tree, counts: Tensor, about: dict[str, Any]) -> None:
    """Write clients' rows and their description to a safetensors file, which gets its name only when complete.

    Raises:
        ValueError: rows that are no tuple or dict of tensors, of which the last may be a dict of tensors.
    """
    fields = dict(tree.items(rows))
    if fields.keys() != {name for name in _names(rows) if name != _COUNTS}:
        raise ValueError(
            f"Expected rows as a tuple or dict of tensors, none of them called {_COUNTS!r}, but got the fields "
            f"{sorted(fields)}; put them into one, such as (x, y)"
        )
    checkpoint.write(file, {**fields, _COUNTS: counts}, {"fields": list(fields), **about})


def read_rows(file: Path | str) -> dict[str, Any]:
    """Return the arguments of `FederatedData`: memory-mapped rows, and their description.

    A file of `write_rows` is read once from end to end to compare its digest, in blocks; one of another program is not.

    Raises:
        ValueError: the file is damaged, or has no counts.

    >>> import tempfile, torch, fedtorch as ft
    >>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor(y)) for y in ([1.0, 2.0], [3.0, 4.0])])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data.to_file(f"{folder}/rows.safetensors")
    ...     stored = ft.InProcess(ft.data.FederatedData.from_file(f"{folder}/rows.safetensors"))
    ...     run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False))), stored, rounds=2)
    >>> run.server["weight"].round(decimals=3)
    tensor([[2., 3.]])
    """
    with checkpoint.opened(file, foreign=True) as content:
        fields, about = {name: content.tensor(name) for name in content.names}, content.about
    if _COUNTS not in fields:
        raise ValueError(
            f"Expected a tensor {_COUNTS!r} of how many rows each client has, but got {sorted(fields)}; write the file "
            "with data.to_file(file)"
        )
    counts = fields.pop(_COUNTS)
    order = about.get("fields", sorted(fields))
    if sorted(order) != sorted(fields):
        raise ValueError(f"Expected the fields {order} in {file}, but got {sorted(fields)}; write the file again")
    rows: tree.Tree = {name: fields[name] for name in order}
    beside = {name.partition(".")[2]: field for name, field in fields.items() if "." in name}
    plain = {name: field for name, field in fields.items() if "." not in name}
    if plain.keys() == {str(i) for i in range(len(plain))}:
        rows = (*(plain[str(i)] for i in range(len(plain))), *([beside] if beside else []))
    known: dict[str, Any] = {name: tuple(about.get(name, ())) for name in ("names", "features")}
    known["design"] = about.get("design")
    return {"rows": rows, "counts": counts, "allow_empty": bool(about.get("allow_empty")), **known}


def _names(rows: tree.Tree) -> list[str]:
    """Return the names of the fields of a tuple or dict of tensors; none of other rows."""
    if isinstance(rows, dict):
        return [str(name) for name in rows]
    if type(rows) is not tuple:
        return []
    *plain, last = rows
    beside = [f"{len(plain)}.{name}" for name in last] if isinstance(last, dict) else [str(len(plain))]
    return [*map(str, range(len(plain))), *beside]
