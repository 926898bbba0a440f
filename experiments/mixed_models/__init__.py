"""Examples that the documentation of mixed-model software prints, ours beside theirs."""
