"""Operations that are worth a program: its formula, a torch reference, and a program by numba or in Triton.

A module here is an operation, and its function takes the program where there is one for the tensors' device and dtype
(`fedtorch.programs.choice`). Those for the CPU are functions that numba compiles when they are first called; those in
Triton are in `fedtorch.programs.triton`.

A program is written in the part of Python that numba knows, and a few loops in LLVM's instructions
(`fedtorch.programs.lanes`). Its operation has a reference in torch beside it, which runs where numba cannot be
imported, and where `FEDTORCH_PROGRAMS` is `off`. No rounding is fused away, no sum reordered and no function
of a C library called, so that numbers depend on neither a processor's vector instructions nor its system.

What is compiled is kept for the next process in `fedtorch/programs` below `XDG_CACHE_HOME`, or the home's `.cache`:
`fedtorch.programs.cache` says under which conditions. `python -m fedtorch.programs` compiles all of it ahead.

>>> import numpy
>>> from fedtorch.programs import program
>>> @program("void(float64[::1], float64[::1])")
... def twice(x, out):
...     for i in range(len(x)):
...         out[i] = 2 * x[i]
>>> x, out = numpy.ones(2), numpy.empty(2)
>>> twice(x, out) if twice.usable() else numpy.multiply(x, 2, out=out) and None
>>> out
array([2., 2.])
"""

from fedtorch.programs.engine import Program, program

__all__ = ["Program", "program"]
