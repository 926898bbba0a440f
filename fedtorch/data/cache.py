"""Where the files of real data sets come from.

A file is taken from the folder that the environment variable `FEDTORCH_DATA_DIR` names, if it is there, as
`<folder>/<file>`; otherwise from the cache, into which it is downloaded from its publisher once. The cache is
the operating system's usual one, or the folder that `FEDTORCH_CACHE` names. Checksums are verified in every
case.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["cache_folder", "path"]


def cache_folder() -> Path:
    """The folder that downloads go to."""
    import pooch  # here, because data that is at hand does not need it

    return Path(os.environ.get("FEDTORCH_CACHE") or pooch.os_cache("fedtorch")).expanduser()


def path(dataset_folder: str, filename: str, sha256: str | Sequence[str], url: str) -> Path:
    """The file `filename` of a data set, checked; downloaded if needed.

    Args:
        dataset_folder: the data set's folder, in `FEDTORCH_DATA_DIR` as in the cache.
        filename: the file in it.
        sha256: its checksum, or several acceptable ones where copies differ in their packing:
            the publisher's first.
        url: the publisher's public address of the file.

    Raises:
        ValueError: the file in `FEDTORCH_DATA_DIR` has another checksum.
        FileNotFoundError: the file could not be downloaded; the message says how to provide it.
    """
    digests = (sha256,) if isinstance(sha256, str) else tuple(sha256)
    folder = os.environ.get("FEDTORCH_DATA_DIR")
    if folder and (given := Path(folder).expanduser() / dataset_folder / filename).is_file():
        if (actual := _digest(given)) not in digests:
            raise ValueError(
                f"Expected {given} with sha256 {' or '.join(digests)}, but got {actual}; replace it by the "
                f"file from {url}, or remove it so that it is downloaded"
            )
        return given
    cached = cache_folder() / dataset_folder / filename
    if not (cached.is_file() and _digest(cached) in digests):
        _download(cached, digests, url)
    return cached


def _download(cached: Path, digests: tuple[str, ...], url: str) -> None:
    import pooch

    downloader = pooch.HTTPDownloader(stream=False)  # streaming leaves the socket of a failed request open
    try:
        pooch.retrieve(url, f"sha256:{digests[0]}", cached.name, cached.parent, downloader=downloader)
    except (OSError, ValueError) as error:
        layout = f"{cached.parent.name}/{cached.name}"
        raise FileNotFoundError(
            f"Expected to download {layout} from {url}, but got: {error}\nGet the file by other means "
            f"(sha256 {' or '.join(digests)}), put it as {layout} into a folder, and set the environment "
            "variable FEDTORCH_DATA_DIR to that folder"
        ) from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
