"""Integrals over coefficients of devices about their modes."""
