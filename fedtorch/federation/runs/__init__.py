"""Runs round by round: cohorts, faults, history, evaluation, tuning, samplers."""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach(__name__, submodules=["recipes"])
