"""Situations by theme."""

from situations.cases import coupled, embeddings, gradients, layers, state

CASES = [*embeddings.CASES, *coupled.CASES, *gradients.CASES, *state.CASES, *layers.CASES]
