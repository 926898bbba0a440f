"""`fedtorch launch`: a script on several ranks that begin anew when one of them dies::

    fedtorch launch --processes 4 --restarts 3 train.py …                                 one machine
    fedtorch launch --processes 8 --machines 2 --at node-1:29400 train.py …               on each of two
    fedtorch launch --processes 8 --machines 1:2 --at node-1:29400 train.py …             on two, of which one may go

It is `torchrun` with a rendezvous that survives: after a death all ranks are started again, and meet at a store of
their own. (With gloo and the store that torchrun shares by default, the new ranks may read there where the dead ones
listened, and connect to nobody.) The script goes on from the last round that it has saved, where all machines can read
it, with as many ranks as there are::

    run = ft.Run(algorithm, ft.Distributed(data))
    if file.exists():
        run.load(file)
    while run.number < 100:
        run.step()
        run.save(file)
"""

from __future__ import annotations

import argparse
import os
from typing import Any

STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# A word, which argparse turns into a number; the variable may list threads by nesting.
THREADS = os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    what = "run a script on several ranks, anew when one dies; `torchrun` inside"
    parser = commands.add_parser("launch", help=what, description=what)
    parser.set_defaults(run=launch)
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="ranks on this machine (default 1)")
    parser.add_argument("--machines", default="1", metavar="N|MIN:MAX", help="that take part (default 1)")
    parser.add_argument(
        "--threads", type=int, default=THREADS, metavar="N", help="of torch in a rank (default OMP_NUM_THREADS, or 1)"
    )
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help="so many at most (default 3)")
    parser.add_argument("--at", default="localhost:0", metavar="HOST:PORT", help="where machines meet; one of them")
    parser.add_argument("--id", default="fedtorch", metavar="NAME", help="of the run, the same on all machines")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def torchrun_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `torchrun`.

    Raises:
        ValueError: several machines that do not know where to meet.
    """
    if options.machines != "1" and options.at.startswith("localhost"):
        raise ValueError("Expected --at HOST:PORT of one of the machines, the same on all, but got none")
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", options.at, "--rdzv-id", options.id]
    size = ["--nproc-per-node", str(options.processes), "--nnodes", options.machines]
    return [*meeting, *size, "--max-restarts", str(options.restarts), options.script, *options.arguments]


def launch(options: argparse.Namespace) -> None:
    """Run the script until all ranks have ended well.

    Raises:
        ValueError: several machines that do not know where to meet.
        ChildProcessError: ranks have died more often than they are started anew.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    given = torchrun_arguments(options)
    os.environ[STORE] = "1"
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        run.main(given)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise ChildProcessError(
            f"Expected all ranks to end well after {options.restarts} restarts, but rank {rank} ended with exit code "
            f"{failure.exitcode}; see what it says above"
        ) from error
