"""Conversations between two ends: halves that send and receive, and drivers in one process or over ranks."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
