"""Triton kernels of the operations of `fedtorch.programs` for a GPU; importing them needs Triton."""
