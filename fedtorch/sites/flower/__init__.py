"""Sites over Flower's deployment engine."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
