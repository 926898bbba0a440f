"""Vertical protocols over streams between organisations: drivers, going on after cuts and kills."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
