"""Operations that are worth a GPU kernel of their own: torch reference, Triton program, and choice between them.

A module here is one operation under one signature. Its program, which needs Triton, is in the module of the same name
in `fedtorch.kernels.programs` and is imported when it first runs; `fedtorch.dispatch.choice` says when that is.
Programs for the CPU are in `fedtorch.programs`.
"""
