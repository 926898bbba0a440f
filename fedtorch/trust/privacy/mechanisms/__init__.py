"""Protect clients, nodes, sums and labels by clipping and noise."""
