"""Experiments: one script per table or figure, `python -m experiments.<name>`."""
