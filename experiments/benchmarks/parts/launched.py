"""Processes of sites for benchmarks of what crosses a network, and their identities."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedtorch.sites.identity import identity
from fedtorch.sites.identity.identity import Identity


def authority(folder: Path, names: Sequence[str]) -> Identity:
    """A server's identity, and those of its sites in folders of their names."""
    own = identity.make_server(folder / "server")
    for name in names:
        identity.make_site(folder / "server", name).save(folder / name)
    return own


@contextmanager
def started(role: str, folder: Path, port: int, processes: Sequence[Sequence[str]]) -> Iterator[list[int]]:
    """The numbers of processes, one of each item, that take part in a role; they end with this one, however it ends."""
    command = [sys.executable, "-m", "experiments.benchmarks.remote", role, str(folder), f"127.0.0.1:{port}"]
    command += [",".join(each) for each in processes]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as launcher:
        try:
            assert launcher.stdout is not None
            yield [int(number) for number in launcher.stdout.readline().split()]
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Ends all processes of this group once nobody holds the other end of the input, as when its process is killed."""
    sys.stdin.buffer.read()
    os.killpg(os.getpgrp(), signal.SIGKILL)
