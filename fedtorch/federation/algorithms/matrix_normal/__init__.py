"""HM1, a matrix-normal prior whose correlation between devices is learnt: the algorithm, and its posterior."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
