"""Find the files of real data sets.

A file is read from `<folder>/<file>` in the folder named by the environment variable `FEDTORCH_DATA_DIR`, if it exists;
otherwise from the cache, into which it is downloaded once, if its publisher offers it at its own address. The cache is
the operating system's usual one, or the folder named by `FEDTORCH_CACHE`. Checksums are verified in every case.

>>> import tempfile
>>> from unittest import mock
>>> from fedtorch.data import cache
>>> from fedtorch.data.catalogue import DataSet, File
>>> from fedtorch.data.download import digest
>>> with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, FEDTORCH_DATA_DIR=folder):
...     given = Path(folder, "wells", "depths.csv")  # a data set of one's own
...     given.parent.mkdir()
...     _ = given.write_text("3,5")
...     file = File("depths.csv", sha256=(digest(given),), size=3)
...     wells = DataSet("wells", "depths", "1 client", "CC0", "https://example.org", "", folder="wells", files=(file,))
...     print(cache.is_present(wells, file), cache.path(wells, file).read_text())
...     print(cache.is_present(wells, file._replace(name="heights.csv")))
True 3,5
False
"""

from __future__ import annotations

import os
from pathlib import Path

from fedtorch.data import catalogue
from fedtorch.data.catalogue import DataSet, File, describe
from fedtorch.data.download import digest, download


def cache_folder() -> Path:
    """Return the folder that downloads go to."""
    import pooch  # imported here, because local data do not need it

    return Path(os.environ.get("FEDTORCH_CACHE") or pooch.os_cache("fedtorch")).expanduser()


def data_sets(*, present: bool = False) -> tuple[DataSet, ...]:
    """Return all data sets, by name; with `present`, those with local files only, without comparing checksums.

    Example:
        >>> import fedtorch as ft
        >>> "digits" in [data_set.name for data_set in ft.data.data_sets(present=True)]  # scikit-learn has it
        True
    """
    return tuple(
        each for each in catalogue.DATA_SETS if not present or all(is_present(each, file) for file in each.files)
    )


def locate(name: str, filename: str) -> Path:
    """Return the file `filename` of the data set `name`, checked; downloaded if needed. Errors: see `path`.

    The way to the raw files: `pandas.read_csv(locate("heart_failure", "heart.csv"))`.
    """
    data_set = describe(name)
    for file in data_set.files:
        if file.name == filename:
            return path(data_set, file)
    raise ValueError(f"Expected a file of {name}, {[file.name for file in data_set.files]}, but got {filename!r}")


def path(data_set: DataSet, file: File) -> Path:
    """Return the file of a data set, checked; downloaded if needed.

    Raises:
        ValueError: the file in `FEDTORCH_DATA_DIR` has another checksum.
        FileNotFoundError: the file is not local and could not be downloaded; the message explains how to provide it.
    """
    if (given := _given(data_set, file)) is not None:
        if (actual := digest(given)) not in file.sha256:
            raise ValueError(
                f"Expected {given} with {file.size} bytes and sha256 {' or '.join(file.sha256)}, but got "
                f"{given.stat().st_size} bytes and {actual}; replace it by the file from "
                f"{file.url or data_set.page}, or remove it"
            )
        return given
    cached = cache_folder() / data_set.folder / file.name
    if cached.is_file() and digest(cached) in file.sha256:
        return cached
    if file.url is None:
        raise FileNotFoundError(
            f"Expected {data_set.folder}/{file.name} in the folder FEDTORCH_DATA_DIR, but got no such file in "
            f"{os.environ.get('FEDTORCH_DATA_DIR') or 'it, for the variable is not set'}, and the publisher has "
            f"no address for this file alone\n{_instructions(data_set, file)}"
        )
    try:
        # The checksum decides; the bound only stops a server that sends endless other data.
        download(file.url, cached, file.sha256, max_bytes=2 * file.size + 2**20)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"Expected to download {data_set.folder}/{file.name} from {file.url}, but got: {error}\n"
            f"{_instructions(data_set, file)}"
        ) from error
    return cached


def is_present(data_set: DataSet, file: File) -> bool:
    """Return whether the file is local; its checksum is not compared."""
    return _given(data_set, file) is not None or (cache_folder() / data_set.folder / file.name).is_file()


def _given(data_set: DataSet, file: File) -> Path | None:
    folder = os.environ.get("FEDTORCH_DATA_DIR")
    given = Path(folder or ".").expanduser() / data_set.folder / file.name
    return given if folder and given.is_file() else None


def _instructions(data_set: DataSet, file: File) -> str:
    note = f" ({file.note})" if file.note else ""
    return (
        f"Get the file by other means, see {data_set.page}{note}: {file.size} bytes, sha256 "
        f"{' or '.join(file.sha256)}. Put it as {data_set.folder}/{file.name} into a folder, and set the "
        "environment variable FEDTORCH_DATA_DIR to that folder"
    )
