"""The programs of the operations of `fedtorch.kernels` in Triton, which they need to be imported."""
