"""The data sets with loaders: descriptions, owners, licences, and files.

The catalogue itself is `catalogue.toml` beside this file.
"""

from __future__ import annotations

import importlib.resources
import tomllib
from typing import NamedTuple


class File(NamedTuple):
    """A file of a data set.

    >>> file = describe("heart_failure").files[0]
    >>> file.name, file.size, len(file.sha256[0])
    ('heart.csv', 35921, 64)
    """

    name: str
    sha256: tuple[str, ...]  # several if copies differ in their packing, the publisher's first
    size: int  # bytes, of the publisher's
    url: str | None = None  # its public address; None if the publisher has none for this file alone
    note: str = ""  # how to obtain it otherwise


class DataSet(NamedTuple):
    """A data set and its source; without files it ships inside scikit-learn.

    >>> [data_set.name for data_set in DATA_SETS if not data_set.files]
    ['breast_cancer', 'diabetes', 'digits']
    """

    name: str  # also of the loader
    what: str
    clients: str
    licence: str
    page: str  # the publisher's page
    citation: str
    folder: str = ""  # in FEDTORCH_DATA_DIR and in the cache
    files: tuple[File, ...] = ()


def describe(name: str) -> DataSet:
    """Return the data set called `name`.

    Raises:
        ValueError: unknown name; the message lists the known ones.

    >>> describe("digits").licence
    'CC BY 4.0'
    """
    for data_set in DATA_SETS:
        if data_set.name == name:
            return data_set
    raise ValueError(f"Expected a data set in {[data_set.name for data_set in DATA_SETS]}, but got {name!r}")


def _read(text: str) -> tuple[DataSet, ...]:
    described = []
    for entry in tomllib.loads(text)["data_set"]:
        files = tuple(File(**{**file, "sha256": tuple(file["sha256"])}) for file in entry.pop("files", ()))
        described.append(DataSet(**entry, files=files))
    return tuple(described)


DATA_SETS = _read((importlib.resources.files("fedtorch.data") / "catalogue.toml").read_text("utf-8"))
