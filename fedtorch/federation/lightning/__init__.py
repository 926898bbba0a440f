"""Federations as LightningModules, and the settings of a Trainer that act on them."""
