"""Projects of other people; before anything imports torchvision, the operators are named that it wants."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import torch

_OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def name_torchvision_operators() -> None:
    """Name the operators that `import torchvision` asks for, where its library is for CUDA and PyTorch for the CPU.

    The networks of the zoo call none of them.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            ctypes.CDLL(str(library))
    except OSError:
        for name, schema in _OPERATORS.items():
            torch.library.define(f"torchvision::{name}", schema)


name_torchvision_operators()
