"""An authority, the identities of sites under it, and its roster, made once."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fedtorch.sites import Roster
from fedtorch.sites.identity import identity, key_directory
from fedtorch.sites.identity.identity import Identity


class Certified(NamedTuple):
    """What an authority has made."""

    folder: Path
    identities: dict[str, Identity]
    roster: bytes


@lru_cache
def certified(names: str = "abcdef") -> Certified:
    """Sites of one letter each."""
    folder = Path(tempfile.mkdtemp(prefix="fedtorch-authority-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    identity.make_server(folder)
    roster, made = Roster(folder / "roster.json"), {}
    for name in names:
        made[name] = identity.make_site(folder, name)
        roster.add(name, identity.fingerprint(made[name].certificate))
    return Certified(folder, made, key_directory.sign_roster(folder, roster))
