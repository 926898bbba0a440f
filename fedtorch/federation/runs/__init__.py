"""Runs round by round: cohorts, faults, history, evaluation, tuning, samplers."""
