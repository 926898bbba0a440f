"""A Trainer inside of another program: whatever it or a module changes in the process is put back."""

from __future__ import annotations

import logging
import os
import random as python_random
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only

from fedtorch._devices import every_generator, restored

_SIGNALS = tuple(sorted(signal.valid_signals()))  # as numbers and names, which takes long to ask for


@contextmanager
def isolated(device: torch.device, accelerator: Any, seed: int) -> Iterator[None]:
    """Seed generators from `seed`, gradients on, Lightning silent; afterwards everything is as it was.

    Args:
        device: of the data.
        accelerator: what the Trainer is told to use; None leaves it to the device.
        seed: of torch's, numpy's and Python's generators.
    """
    if accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available():
        torch.cuda.init()  # its generators are there only then; where nobody uses it, it is left alone
    with (
        _restored(),
        warnings.catch_warnings(),
        # torch.manual_seed would also seed GPUs that are not initialised yet, for good.
        restored(every_generator(), seed),
        torch.inference_mode(False),
        torch.enable_grad(),
        _without_autocast({"cpu", device.type}),
    ):
        warnings.filterwarnings("ignore", module=r"lightning(_utilities)?\.")
        python_random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        yield


@contextmanager
def _without_autocast(devices: set[str]) -> Iterator[None]:
    """Switch autocast off, without a context of its own, whose cache of weights would live as long as all steps."""
    before = {device: torch.is_autocast_enabled(device) for device in devices}
    try:
        for device in devices:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, enabled in before.items():
            torch.set_autocast_enabled(device, enabled)


@contextmanager
def _restored() -> Iterator[None]:
    """Restore generators, torch's flags, the environment, signal handlers and Lightning's loggers at the end."""
    cudnn, warn_only = torch.backends.cudnn, torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as after:
        after.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
        for name in ("benchmark", "deterministic"):
            after.callback(setattr, cudnn, name, getattr(cudnn, name))
        after.callback(torch.set_default_dtype, torch.get_default_dtype())
        after.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        after.callback(python_random.setstate, python_random.getstate())
        after.callback(_restore_environment, dict(os.environ))
        after.callback(setattr, rank_zero_only, "rank", vars(rank_zero_only)["rank"])
        if torch.cuda.is_initialized():
            after.callback(torch.cuda.set_device, torch.cuda.current_device())
        if threading.current_thread() is threading.main_thread():  # only there they can be set
            for number in _SIGNALS:
                after.callback(_restore_handler, number, signal.getsignal(number))
        for name in ("lightning.pytorch", "lightning.fabric"):
            logger = logging.getLogger(name)
            after.callback(logger.setLevel, logger.level)
            logger.setLevel(max(logger.level, logging.WARNING))
        yield


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _restore_handler(number: int, handler: Any) -> None:
    if handler is not None and signal.getsignal(number) != handler:
        signal.signal(number, handler)


def as_list(value: Any) -> list[Any]:
    """Return a value, or several, as a list; none of None."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
