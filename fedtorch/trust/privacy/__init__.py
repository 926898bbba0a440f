"""Privacy that is accounted for: what a run tells of one client or one example, and how it is bounded."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
