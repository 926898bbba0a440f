"""What `make test-install` runs is there, with a part for every extra."""

from __future__ import annotations

import tomllib

from support import installs
from support.scripts import installed


def test_what_is_run_is_there() -> None:
    assert installs.USE.is_file()


def test_every_extra_has_a_part() -> None:
    extras = tomllib.loads((installs.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(installs.USED) == set(extras) - {"dev"} == set(installed.PARTS) - {"base"}
