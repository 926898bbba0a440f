"""Every kind of model under a Lightning Trainer: a logger, checkpoints, early stopping, and going on from a file.

A script each, `python -m experiments.trainers.<name> [--smoke]`; `--gpu` trains more clients on a CUDA device and
measures that. What they share is in `training`.
"""
