"""The Triton programs of the operations of `fedtorch.kernels`; they need Triton to be imported, and nothing else."""
