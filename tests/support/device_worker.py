"""A process that has a pretended device, which does what tests ask it.

Torch learns of a device before its first backward pass or not at all, and a process that knows one behaves otherwise
elsewhere (`torch.accelerator`), so that the device is not pretended in the tests' own process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1]
_SHOWN = 12  # lines of a traceback


class Worker:
    """Calls functions of test modules in the process, one after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.device_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_TESTS.parent,
            env={
                **os.environ,
                "TRITON_INTERPRET": "1",
                "PYTHONPATH": os.pathsep.join([str(_TESTS.parent), str(_TESTS)]),
            },
        )

    def __call__(self, function: Any, *args: Any) -> Any:
        """Return what `function(*args)` returns there, of JSON both.

        Raises:
            AssertionError: it raised an error, of which the text has the end of the traceback.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([function.__module__, function.__name__, args]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["found"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _serve() -> None:
    """Answer requests until there are no more; what they print goes to the error stream."""
    from support import pretended_device

    answers, sys.stdout = sys.stdout, sys.stderr
    pretended_device.register()
    for line in sys.stdin:
        module, name, args = json.loads(line)
        try:
            answer = {"found": getattr(importlib.import_module(module), name)(*args)}
        except Exception:
            answer = {"error": "\n".join(traceback.format_exc().splitlines()[-_SHOWN:])}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
