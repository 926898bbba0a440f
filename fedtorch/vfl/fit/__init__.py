"""Fit vertical models: guides, the variational bound, SFVI, SOUL, and what parties keep."""
