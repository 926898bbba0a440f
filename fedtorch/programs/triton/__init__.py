"""Programs in Triton, which they need to be imported: those of the operations of `fedtorch.programs` for a GPU."""
