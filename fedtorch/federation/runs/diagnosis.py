r"""Whether a method overfits or underfits, by its training, validation and reference errors.

With "much larger" being a factor `much`:

- training much larger than validation: the parts differ, or are small;
- validation much larger than training: it overfits;
- neither, and training much larger than the reference: it underfits, or training has not ended;
- neither, and training near the reference: little is to be gained.

Validation much larger than training and training much larger than the reference may both hold; then the text has both.

Source: Jung, "Federated learning: from theory to practice", section 2.5.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Diagnosis(NamedTuple):
    """Three errors and the verdict on them, which is its `str`."""

    training: float
    validation: float
    reference: float | None
    verdict: str

    def __str__(self) -> str:
        return self.verdict


def diagnosis(training: float, validation: float, reference: float | None, much: float) -> Diagnosis:
    """Compare errors, of which less is better.

    Args:
        training: error on the training rows.
        validation: error on other rows.
        reference: attainable error, of a probabilistic model, another method or people; None if unknown.
        much: the factor from which an error is much larger than another, above 1.

    Raises:
        ValueError: an error that is negative or not finite, or a factor of 1 or less.

    Example:
        >>> print(diagnosis(training=0.1, validation=0.9, reference=0.1, much=1.5))
        overfits: the validation error is 9 times the training error; take a smaller or penalised model, or more rows
        >>> print(diagnosis(training=0.9, validation=1.0, reference=None, much=1.5))
        does not overfit; whether more can be reached needs a reference error
    """
    if not 1 < much < math.inf:
        raise ValueError(f"Expected much= above 1 and finite, the factor of a much larger error, but got {much}")
    for name, error in (("training", training), ("validation", validation), ("reference", reference)):
        if error is not None and not 0 <= error < math.inf:
            raise ValueError(
                f"Expected errors of at least 0, of which less is better, but got a {name} error of {error}; take a "
                "loss such as torch.nn.functional.mse_loss"
            )
    sentences = []
    if training > much * validation:
        sentences.append(
            f"the training error is {_times(training, validation)} times the validation error: the parts are small, or "
            "not rows of one distribution; compare them, or take more rows"
        )
    if validation > much * training:
        sentences.append(
            f"overfits: the validation error is {_times(validation, training)} times the training error; take a "
            "smaller or penalised model, or more rows"
        )
    if reference is not None and training > much * reference:
        sentences.append(
            f"underfits: the training error is {_times(training, reference)} times the reference; take a larger model, "
            "or train to the end"
        )
    if not sentences and reference is None:
        sentences.append("does not overfit; whether more can be reached needs a reference error")
    elif not sentences:
        sentences.append("is near the reference, and does not overfit: little is to be gained")
    return Diagnosis(training, validation, reference, "; and ".join(sentences))


def _times(larger: float, smaller: float) -> str:
    return f"{larger / smaller:.3g}" if smaller > 0 else "infinitely many"
