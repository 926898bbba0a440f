"""`fedtorch launch`: a script on several ranks, which are restarted when one of them dies::

    fedtorch launch --processes 4 --restarts 3 train.py …                                 one machine
    fedtorch launch --processes 8 --machines 2 --at node-1:29400 train.py …               on each of two
    fedtorch launch --processes 8 --machines 1:2 --at node-1:29400 train.py …             on two, of which one may fail

It is `torchrun` with a safe rendezvous: after a failure all ranks are restarted with a store of their own. (With gloo
and torchrun's shared store, the new ranks may read addresses of dead ones from the store, and fail to connect.) The
script resumes from the last saved round, in a file that all machines can read, with the present number of ranks::

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
# Text, which argparse converts to a number; the variable may be a list by nesting level.
THREADS = os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    what = "run a script on several ranks by `torchrun`, and restart them when one dies"
    parser = commands.add_parser("launch", help=what, description=what)
    parser.set_defaults(run=launch)
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="ranks on this machine (default 1)")
    parser.add_argument("--machines", default="1", metavar="N|MIN:MAX", help="number of machines (default 1)")
    parser.add_argument(
        "--threads", type=int, default=THREADS, metavar="N", help="threads of a rank (default OMP_NUM_THREADS, or 1)"
    )
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help="most restarts (default 3)")
    parser.add_argument("--at", default="localhost:0", metavar="HOST:PORT", help="address of one of the machines")
    parser.add_argument("--id", default="fedtorch", metavar="NAME", help="name of the run, the same on all machines")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def torchrun_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `torchrun`.

    Raises:
        ValueError: several machines without --at.
    """
    if options.machines != "1" and options.at.startswith("localhost"):
        raise ValueError("Expected --at HOST:PORT of one of the machines, the same on all, but got none")
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", options.at, "--rdzv-id", options.id]
    size = ["--nproc-per-node", str(options.processes), "--nnodes", options.machines]
    return [*meeting, *size, "--max-restarts", str(options.restarts), options.script, *options.arguments]


def launch(options: argparse.Namespace) -> None:
    """Run the script until all ranks have succeeded.

    Raises:
        ValueError: several machines without --at.
        ChildProcessError: a rank has failed after the last restart.
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
            f"Expected all ranks to succeed within {options.restarts} restarts, but rank {rank} ended with exit code "
            f"{failure.exitcode}; see its output above"
        ) from error
