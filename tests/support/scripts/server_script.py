"""A server in a process of its own, `server_script.py FOLDER PORT ROUNDS`, that may be killed and begun anew."""

from __future__ import annotations

import sys
from pathlib import Path

import fedtorch as ft
from fedtorch.sites import Remote, Roster, serve
from fedtorch.sites.identity import identity
from support.scripts.my_data import scaffold


def main(folder: Path, port: str, rounds: int) -> None:
    """Goes on from the checkpoint if there is one, saves after every round, and tells the sites at the end."""
    own = identity.read(folder / "server")
    host = serve(f"127.0.0.1:{port}", own, Roster(folder / "server" / "roster.json"))
    sites = Remote(host, ["a", "b", "c"], "scaffold", {"rate": 0.05}, quorum=1.0, seconds=60.0)
    run, file = ft.Run(scaffold(0.05), sites, seed=3), folder / "run.safetensors"
    if file.exists():
        run.load(file)
    run.save(file)
    for _ in run.rounds(rounds):
        run.save(file)
    sites.finish(run)
    host.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
