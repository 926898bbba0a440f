"""Rounds over ranks with a checkpoint after each, `launched_script.py FOLDER ROUNDS FATAL PAUSE`.

The last rank kills itself in the middle of round FATAL (0: never), once: FOLDER/died says that it has. Ranks rest for
PAUSE seconds after each round.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

import fedtorch as ft
from support.oracles.closed_forms import linear_clients, sgd

DATA = linear_clients([3, 12, 5, 9, 7])


def scaffold() -> ft.Algorithm:
    """An algorithm whose clients have states, and tell something for good."""
    return ft.scaffold(sgd(0.05, epochs=1, batch_size=4))


def main(folder: Path, rounds: int, fatal: int, pause: float) -> None:
    """Goes on from the checkpoint if there is one."""
    run, file = ft.Run(scaffold(), ft.Distributed(DATA), seed=3), folder / "run.safetensors"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if file.exists():
        run.load(file)
    with (folder / f"began-{rank}").open("a") as began:
        began.write(f"{run.number} of {ranks} as {os.getpid()} under {os.getppid()}\n")
    while run.number < rounds:
        if fatal and run.number == fatal and rank == ranks - 1 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        run.step()
        run.save(file)
        time.sleep(pause)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
