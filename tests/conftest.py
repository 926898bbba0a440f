"""Before anything imports Triton: without a CUDA device its programs are interpreted, which it decides at import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
