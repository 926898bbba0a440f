"""Federations: the interface of algorithms, exchanges, populations and runs."""
