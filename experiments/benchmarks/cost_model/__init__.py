"""A model of what a round costs in each population."""
