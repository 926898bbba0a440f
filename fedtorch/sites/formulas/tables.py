"""Readers of a site's frame, as given in its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedtorch.data import FederatedData
from fedtorch.data.formulas.cells import Cells, as_frame, level_name

if TYPE_CHECKING:
    import pandas


def read_frame(source: Any) -> pandas.DataFrame:
    """Return a frame from a frame, a function that returns one, or the path of a CSV or parquet file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is of another kind.
        TypeError: the source is none of these.
    """
    import pandas as pd  # at first use, because it takes long to import

    if callable(source):
        source = source()
    if not isinstance(source, (str, Path)):
        return as_frame(source)
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"Expected a file with the site's frame, but {path} is not there")
    readers = {".csv": pd.read_csv, ".parquet": pd.read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"Expected a file that ends in {' or '.join(readers)}, but got {path}; pass a frame instead")
    return readers[path.suffix](path)


def without_rows(frame: pandas.DataFrame, client: str) -> FederatedData:
    """Return a frame's clients and their row counts, as data without columns.

    >>> import pandas
    >>> without_rows(pandas.DataFrame({"ward": ["7", "8", "7"]}), "ward").counts
    tensor([2, 1])
    """
    owners = Cells(frame).complete(client)
    counts = owners.value_counts(sort=False)
    names = tuple(map(level_name, owners.unique()))
    return FederatedData(
        torch.empty(len(frame), 0), torch.tensor([int(counts[name]) for name in owners.unique()]), names
    )
