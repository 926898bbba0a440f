"""Children of one process that has imported the package: an import takes seconds, a fork none.

The process that forks must not have used threads before, nor automatic differentiation on a device;
`warm` only imports.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import torch


def warm() -> None:
    """Load what the first optimiser of a process loads, which takes a second."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def fork(body: Callable[[], object]) -> int:
    """A child that runs `body` on one thread and ends, with 1 after an error; its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid
