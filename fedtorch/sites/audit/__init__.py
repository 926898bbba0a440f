"""Records of who asked what of whom, and what was answered: signed, chained, and verified by anybody."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
