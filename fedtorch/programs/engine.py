"""Compilation of functions by numba, which is imported on the first call of one."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fedtorch.programs import choice

_LOG = logging.getLogger(__name__)
_PATIENCE = 1.0  # seconds before a message about the wait
# Programs release the interpreter's lock, and divide as NumPy does. No operations are fused or reordered.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}


class Program:
    """A function in the part of Python that numba supports, compiled on its first call.

    Args:
        function: it may call other programs by name, of its module or of the function that it is defined in.
        signatures: in numba's notation, of its supported calls. Without any it is a part of programs that call it.
        inline: whether its text is put into that of its callers, as for a formula in a loop.
    """

    def __init__(self, function: types.FunctionType, signatures: tuple[str, ...], inline: bool) -> None:
        functools.update_wrapper(self, function)
        self.name, self.signatures = function.__name__, signatures
        self._function, self._inline = function, inline

    def __call__(self, *arguments: Any) -> Any:
        """Run it.

        Raises:
            TypeError: no signature has arguments of these types.
        """
        return self.compile()(*arguments)

    def usable(self, tensors: Sequence[Tensor] = (), dtype: torch.dtype | None = None) -> bool:
        """Return whether it can run here, on these tensors.

        Args:
            tensors: plain ones, see `choice.plain`.
            dtype: required of all of them; None for any.
        """
        known = dtype is None or all(tensor.dtype == dtype for tensor in tensors)
        return known and choice.enabled() and choice.plain(tensors) and _importable()

    def compile(self) -> Any:
        """Return numba's function, compiled for all signatures or read from the cache."""
        return self._compiled

    @functools.cached_property
    def _compiled(self) -> Any:
        import numba

        from fedtorch.programs import cache

        made = numba.njit(inline="always" if self._inline else "never", **_OPTIONS)(self._resolved())
        if self.signatures:
            with ExitStack() as compiling:
                made._cache = cache.Cache(
                    self.name, self.text(), missed=lambda: compiling.enter_context(_log_if_slow(self.name))
                )
                for signature in self.signatures:
                    made.compile(signature)
            made.disable_compile()
        return made

    def text(self) -> str:
        """Return everything that determines the compiled code: the source, and all names in it."""
        code, values = self._function.__code__, self._values()
        named = [(name, value.text() if isinstance(value, Program) else repr(value)) for name, value in values.items()]
        return repr((code.co_code, code.co_consts, code.co_names, self._inline, _OPTIONS, sorted(named)))

    def _values(self) -> dict[str, Any]:
        """Return the values that the function names, of its module and of the function that it is defined in."""
        code, cells = self._function.__code__, self._function.__closure__ or ()
        of_module = {name: value for name, value in self._function.__globals__.items() if name in code.co_names}
        return {**of_module, **{name: cell.cell_contents for name, cell in zip(code.co_freevars, cells)}}

    def _resolved(self) -> types.FunctionType:
        """Return the function with programs in it replaced by numba's functions.

        Its name has a digest of its text: compiled code is linked by name, and functions from other processes' caches
        with the same name would replace each other.
        """
        function = self._function
        named = self._values().items()
        values = {name: value.compile() if isinstance(value, Program) else value for name, value in named}
        cells = tuple(types.CellType(values[name]) for name in function.__code__.co_freevars)
        scope = {"__builtins__": __builtins__, "__name__": function.__module__, **values}
        made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
        made.__qualname__ = f"{self.name}_{hashlib.sha256(self.text().encode()).hexdigest()}"
        return made


def program(*signatures: str, inline: bool = False) -> Callable[[Any], Program]:
    """Make a program of the function below; see `Program`.

    >>> @program("int64(int64)")
    ... def successor(number):
    ...     return number + 1
    >>> successor.signatures
    ('int64(int64)',)
    """
    return lambda function: Program(function, signatures, inline)


def arrays(*tensors: Tensor) -> list[Any]:
    """Return a program's arguments: the memory of CPU tensors as contiguous arrays, copied if necessary.

    >>> import torch
    >>> arrays(torch.arange(2))
    [array([0, 1])]
    """
    # Detaching each tensor would take a third of the time of a call for few numbers.
    return [(each.detach() if each.requires_grad else each).contiguous().numpy() for each in tensors]


@functools.cache
def _importable() -> bool:
    """Return whether numba can be imported; log once if not."""
    try:
        importlib.import_module("numba")
    except Exception as error:  # numba refuses releases of NumPy and Python with errors of several classes
        _LOG.warning("numba cannot be imported, so operations run without compiled programs, more slowly: %s", error)
        return False
    return True


@contextmanager
def _log_if_slow(name: str) -> Iterator[None]:
    """Log the compilation inside, if it takes longer than a moment."""
    began = time.monotonic()
    word = threading.Timer(
        _PATIENCE,
        _LOG.warning,
        ("compiling the program %s, once on this machine; `python -m fedtorch.programs` compiles all in advance", name),
    )
    word.daemon = True
    word.start()
    try:
        yield
    finally:
        word.cancel()
        _LOG.debug("the program %s is ready after %.2f s", name, time.monotonic() - began)
