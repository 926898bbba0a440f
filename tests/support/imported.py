"""Import what processes of the tests need and what takes seconds; see `support.processes`."""

import lightning  # noqa: F401
import torch

import fedtorch.cli
import fedtorch.sites  # noqa: F401
from experiments.benchmarks.parts.forked import warm

torch.set_num_threads(1)
warm()
