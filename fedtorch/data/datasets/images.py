"""Images without natural clients, for `fedtorch.data.partition`."""

from __future__ import annotations

import gzip

import numpy
import torch
from torch import Tensor

from fedtorch.data.cache import locate


def mnist(train: bool = True) -> tuple[Tensor, Tensor]:
    """Load handwritten digits: x `(60000, 28, 28)` float32 in [0, 1], y `(60000,)` int64 in 0…9.

    Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits"; commonly given as CC BY-SA 3.0.

    Args:
        train: whether to take the 60000 training or the 10000 test images.
    """
    part = "train" if train else "t10k"
    images, labels = _idx(f"{part}-images-idx3-ubyte.gz"), _idx(f"{part}-labels-idx1-ubyte.gz")
    return images.float().div_(255), labels.long()


def _idx(filename: str) -> Tensor:
    """Return bytes in a gzipped idx file: two zeros, the type 8, how many dimensions, big-endian sizes, data."""
    content = gzip.decompress(locate("mnist", filename).read_bytes())
    dimensions = content[3]
    shape = numpy.frombuffer(content, dtype=">i4", count=dimensions, offset=4)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * dimensions).reshape(shape.tolist())
