"""Frames of people, and sites that agree on a design, for tests of formulas."""
