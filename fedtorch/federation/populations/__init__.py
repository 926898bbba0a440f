"""Populations: where clients run, and what is kept of them."""
