"""Situations by theme."""

from situations.cases import (
    coupled,
    embeddings,
    forms,
    gradients,
    layers,
    losses,
    operations,
    packages,
    state,
    training,
)

CASES = [
    *embeddings.CASES,
    *coupled.CASES,
    *losses.CASES,
    *forms.CASES,
    *gradients.CASES,
    *state.CASES,
    *layers.CASES,
    *operations.CASES,
    *training.CASES,
    *packages.CASES,
]
