"""Exchanges: which parties receive which messages, and how messages are aggregated."""
