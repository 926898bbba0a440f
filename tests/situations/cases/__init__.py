"""Situations by theme."""

from situations.cases import coupled, embeddings

CASES = [*embeddings.CASES, *coupled.CASES]
