"""Protect single examples: DP-SGD on stacked clients."""
