"""The same work in fedtorch, in a plain PyTorch loop and in the simulators people use, side by side."""
