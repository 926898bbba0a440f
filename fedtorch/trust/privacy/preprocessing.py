r"""Private data instead of private training: what is done to rows before anybody else sees them.

By post-processing, whatever is then trained on the rows, as often as one likes, is as private as they are. Randomised
response keeps a label with probability p and else tells one of the other K − 1 at random; it is ε-private with

.. math:: p = \frac{e^\varepsilon}{e^\varepsilon + K - 1}, \qquad q = \frac{1 - p}{K - 1},

for labels only: the features beside them stay as they are. Because E[1{ỹ = c}] = q + (p − q) 1{y = c}, frequencies and
losses have unbiased estimators, (f̃ − q)/(p − q) and (ℓ(ỹ) − q Σ_c ℓ(c))/(p − q).

Publishing a random part of the rows, as they are, is no protection: it is (0, q)-private, where q is the probability of
a row to be published, and nothing better (`subsampling_delta`).

Sources: Jung, "Federated learning: from theory to practice", section 9.3, pre-processing; Warner (1965), "Randomized
response"; Natarajan et al. (2013), "Learning with noisy labels", Lemma 1.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch
from torch import Tensor, nn

from fedtorch.trust.privacy.analytic import check_noise
from fedtorch.trust.privacy.clipping import check_clip
from fedtorch.trust.privacy.entropy import Entropy, Purpose, from_system
from fedtorch.trust.privacy.mechanisms import Mechanism, gaussian
from fedtorch.trust.privacy.renyi import check_rate
from fedtorch.trust.privacy.spending import on_grid

_CALLS = itertools.count()  # a seed repeats within a call only if the caller makes the entropy anew


def keeping(epsilon: float, classes: int) -> tuple[float, float]:
    """(p of the true label, q of each other) of randomised response.

    Raises:
        ValueError: an ε that is not positive, or fewer than two classes.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"Expected a positive finite epsilon, but got {epsilon}")
    if classes < 2:
        raise ValueError(f"Expected at least two classes, but got {classes}")
    other = math.exp(-epsilon) / (1 + (classes - 1) * math.exp(-epsilon))
    return 1 - (classes - 1) * other, other


def randomised_response(labels: Tensor, classes: int, epsilon: float, entropy: Entropy | None = None) -> Tensor:
    """Labels of which each is ε-private, against any other label in its place.

    Args:
        labels: integers from 0 to `classes` − 1, any shape.
        classes: K.
        epsilon: of each label; a person with several labels has as many times ε.
        entropy: of the draws; default: the operating system's. A seeded one repeats itself in every call.

    Raises:
        ValueError: labels or settings out of range.
    """
    keep, _ = keeping(epsilon, classes)
    if labels.is_floating_point() or (labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes):
        raise ValueError(f"Expected whole labels from 0 to {classes - 1}, but got {labels.dtype} beyond")
    uniforms = _uniforms("labels", 2 * labels.numel(), entropy).reshape(2, *labels.shape).to(labels.device)
    step = (uniforms[1] * (classes - 1)).long() + 1
    return torch.where(uniforms[0] < keep, labels, (labels + step).remainder(classes))


def label_frequencies(told: Tensor, classes: int, epsilon: float) -> Tensor:
    """Unbiased frequencies `(K,)` of the true labels, from randomised ones; some may be below zero."""
    keep, other = keeping(epsilon, classes)
    frequencies = torch.bincount(told.flatten(), minlength=classes).to(torch.float64) / told.numel()
    return (frequencies - other) / (keep - other)


class RandomisedCrossEntropy(nn.Module):
    """A cross entropy of randomised labels that is, on average over their draws, that of the true ones.

    Args:
        classes: K.
        epsilon: of the randomised response.
    """

    def __init__(self, classes: int, epsilon: float) -> None:
        super().__init__()
        self.keep, self.other = keeping(epsilon, classes)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over rows, of logits `(n, K)` and told labels `(n,)`; it may be below zero."""
        losses = -output.log_softmax(-1)
        told = losses.gather(-1, target[..., None])[..., 0]
        return ((told - self.other * losses.sum(-1)) / (self.keep - self.other)).mean()


def noised_features(
    features: Tensor, clip: float, noise: float, mechanism: Mechanism = gaussian, entropy: Entropy | None = None
) -> Tensor:
    """Rows of which each is private against any other row in its place.

    A row is scaled down to a norm of at most C and gets noise of z·2C on every number, so that it costs
    `privacy.epsilon(noise=z, delta=…, mechanism=…)`, once.

    Args:
        features: `(n, d)`.
        clip: the bound C, Euclidean or, for `laplace`, on the sum of absolute values.
        noise: z.
        mechanism: `gaussian` or `laplace`.
        entropy: of the noise; default: the operating system's. A seeded one repeats itself in every call.

    Raises:
        ValueError: clip or noise out of range.
    """
    check_clip(clip)
    check_noise(noise)
    rows = features.to("cpu", torch.float64)
    norm = mechanism.norm(rows)[:, None]
    rows = torch.where(norm.isfinite(), rows * (clip / norm).clamp(max=1), 0.0)
    entropy = from_system() if entropy is None else entropy
    uniforms = partial(entropy.uniforms, _purpose("features", entropy))
    scale = torch.tensor(2 * clip * noise, dtype=torch.float64)
    noised = on_grid(rows + scale * mechanism.draw(uniforms, rows.numel()).reshape(rows.shape), scale)
    return noised.to(features.device, features.dtype)


def subsampling_delta(rate: float) -> float:
    """The δ at which publishing each row with probability `rate`, as it is, is (0, δ)-private: the rate itself."""
    check_rate(rate)
    return rate


def _uniforms(phase: str, count: int, entropy: Entropy | None) -> Tensor:
    entropy = from_system() if entropy is None else entropy
    return entropy.uniforms(_purpose(phase, entropy), count)


def _purpose(phase: str, entropy: Entropy) -> Purpose:
    """A purpose of its own for every call, unless the numbers are to repeat."""
    return Purpose(b"", 0, next(_CALLS) if entropy.guarantees else 0, phase, b"")
