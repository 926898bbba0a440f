"""A site's states as they were after rounds that the server may still go back to.

A version has the number of the request whose answer it goes with. It is kept, on the disk where there is a folder,
before the answer is sent, so that wherever either side is killed the site has what the server counts on.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from fedtorch.federation import checkpoint

FIRST = 0  # the version before any round

Flat = dict[str, Tensor]


class Versions:
    """The versions of one run.

    Args:
        folder: where they are kept; None keeps them in memory, where a site that is killed loses them.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._held: dict[int, Flat] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def put(self, version: int, states: Flat) -> None:
        """Keeps a version; raises OSError where it cannot be written."""
        if self.folder is not None and version != FIRST:
            checkpoint.write(self._path(version), states)
        self._held[version] = states

    def get(self, version: int) -> Flat | None:
        """A version, None if it is not here."""
        if version not in self._held and self.folder is not None and self._path(version).exists():
            self._held[version] = checkpoint.read(self._path(version))
        return self._held.get(version)

    def retain(self, versions: Collection[int]) -> None:
        """Forgets all but these and the first."""
        for version in [v for v in self._held if v not in versions and v != FIRST]:
            del self._held[version]
        for path in self.folder.glob("*.safetensors") if self.folder else ():
            if path.stem not in {str(version) for version in versions}:
                path.unlink(missing_ok=True)

    def _path(self, version: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{version}.safetensors"
