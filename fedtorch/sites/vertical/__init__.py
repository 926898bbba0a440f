"""Drivers of vertical protocols over streams between organisations, which can resume after failures."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
