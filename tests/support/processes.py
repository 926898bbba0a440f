"""Processes that start in milliseconds: forked from one process that has imported torch and the package.

That process is the fork server of `multiprocessing`; it starts with the first process and ends with the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}
_CONTEXT = multiprocessing.get_context("forkserver")


class Process:
    """A process that runs `python command…`, where `command` is `-m`, a module and arguments, or a file and arguments.

    Args:
        command: see above.
        environment: variables beside those of this process.
    """

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        self._log = Path(name)
        _CONTEXT.set_forkserver_preload(["support.imported"])
        with mock.patch.dict(os.environ, ENVIRONMENT):
            forkserver.ensure_running()
        every = {**os.environ, **ENVIRONMENT, **environment}
        self._process = _CONTEXT.Process(target=_run, args=(list(command), every, name), daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal that ended it, or None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()

    def await_text(self, text: str, timeout: float) -> None:
        """Wait until it has written a text."""
        ends = time.monotonic() + timeout
        while text not in self._log.read_text():
            if time.monotonic() > ends:
                raise TimeoutError(f"Expected {text!r} within {timeout} s, but got {self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def communicate(self, timeout: float | None = None) -> str:
        """Wait for its end, and return what it has written, errors included."""
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"Expected the process to end within {timeout} s, but it goes on")
        said = self._log.read_text() if self._log.exists() else ""
        self._log.unlink(missing_ok=True)
        return said


def _run(command: list[str], environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.argv = command[command[0] == "-m" :]
    if command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")
