"""Ranks as forked processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from experiments.benchmarks.parts.forked import fork


def over_ranks(
    folder: Path, count: int, body: Callable[[int], Any], timeout: float = 20.0, longest: float = 60.0
) -> list[Any]:
    """What `body(rank)` returns on each of `count` ranks, as JSON, or its error as text; None where it died.

    Args:
        folder: an empty one, of these ranks only.
        count: how many.
        body: what each does, in a process group of gloo.
        timeout: of the process group, seconds.
        longest: seconds after which all are killed, which counts as an error here.
    """
    folder.mkdir(parents=True)
    pids = [fork(lambda rank=rank: _one(folder, count, rank, body, timeout)) for rank in range(count)]
    ends = time.monotonic() + longest
    while pids and time.monotonic() < ends:
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(0.005)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    files = [folder / f"{rank}.json" for rank in range(count)]
    told = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return [*told, f"hung after {longest} s"] if pids else told


def _one(folder: Path, count: int, rank: int, body: Callable[[int], Any], timeout: float) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout),
    )
    try:
        found = body(rank)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.part").write_text(json.dumps(found))
    os.replace(folder / f"{rank}.part", folder / f"{rank}.json")
