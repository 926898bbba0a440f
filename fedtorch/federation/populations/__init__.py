"""Populations: where clients run, and where their states are stored."""
