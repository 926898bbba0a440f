"""Operations with compiled programs: a formula, a torch reference, and a program by numba or in Triton each.

A module here is an operation, and its function uses a program if there is one for the tensors' device and dtype
(`fedtorch.programs.choice`). Those for the CPU are functions that numba compiles on their first call; those in Triton
are in `fedtorch.programs.triton`.

A program is written in the part of Python that numba supports, with a few loops in LLVM's instructions
(`fedtorch.programs.lanes`). Its operation has a reference in torch, which runs if numba cannot be imported, and if
`FEDTORCH_PROGRAMS` is `off`. No rounding is fused away, no sum reordered and no function of a C library called, so
results depend on neither a processor's vector instructions nor its system.

Compiled programs are stored for later processes in `fedtorch/programs` below `XDG_CACHE_HOME`, or the home's `.cache`,
under the conditions of `fedtorch.programs.cache`. `python -m fedtorch.programs` compiles all of them ahead.

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
