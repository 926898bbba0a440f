"""Situations by theme."""

from situations.cases import coupled, embeddings, gradients, layers, losses, operations, state, training

CASES = [
    *embeddings.CASES,
    *coupled.CASES,
    *losses.CASES,
    *gradients.CASES,
    *state.CASES,
    *layers.CASES,
    *operations.CASES,
    *training.CASES,
]
