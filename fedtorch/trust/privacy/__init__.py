"""Differential privacy with accounting: bounds on what a run reveals about one client or one example."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
