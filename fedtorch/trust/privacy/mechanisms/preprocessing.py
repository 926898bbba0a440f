r"""Private data instead of private training: changes of rows before they are shared.

By post-processing, everything trained on the changed rows, any number of times, is as private as they are. Randomised
response keeps a label with probability p and otherwise returns one of the other K − 1 at random; it is ε-private with

.. math:: p = \frac{e^\varepsilon}{e^\varepsilon + K - 1}, \qquad q = \frac{1 - p}{K - 1},

for labels only: the features beside them are unchanged. Because E[1{ỹ = c}] = q + (p − q) 1{y = c}, frequencies and
losses have unbiased estimators, (f̃ − q)/(p − q) and (ℓ(ỹ) − q Σ_c ℓ(c))/(p − q).

That holds if the features themselves do not reveal the label. If they do, a row is kept whole with probability p and
otherwise replaced by one with a random label and synthetic features for that label (`replaced_rows`): with features
drawn from f(x | y) and synthesised from g(x | y), a label is ε-private with

.. math:: p = \frac{e^\varepsilon - 1}{e^\varepsilon - 1 + K r}, \qquad r = \sup_{x, y} \frac{f(x | y)}{g(x | y)},

so well-synthesised features (r = 1) cost no more than none, and bad ones leave hardly a row unchanged.

Publishing a random part of the unchanged rows is no protection: it is (0, q)-private, where q is the probability of a
row to be published, and nothing better.

Sources: Jung, "Federated learning: from theory to practice", section 9.3, pre-processing; Warner (1965), "Randomized
response"; Busa-Fekete et al. (2023), "Label differential privacy and private training data release", mechanisms 1 and
2, whose guarantee is derived here again; Natarajan et al. (2013), "Learning with noisy labels", Lemma 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fedtorch.random.entropy import Entropy, Purpose, from_system
from fedtorch.trust.privacy._checks import check_clip, check_noise
from fedtorch.trust.privacy.accounting.spending import on_grid
from fedtorch.trust.privacy.noise import Mechanism, Uniforms, gaussian

MadeUp = Callable[[Tensor, Uniforms], Tensor]  # (labels (m,), source of uniform numbers) -> features (m, d)
_CALLS = itertools.count()  # a seed repeats within a call only if the caller makes a new entropy


def keeping(epsilon: float, classes: int) -> tuple[float, float]:
    """Return (p of the true label, q of each other) of randomised response.

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
    """Randomise labels so that each is ε-private against any other in its place.

    Args:
        labels: integers from 0 to `classes` − 1, any shape.
        classes: K.
        epsilon: of each label; a person with m labels has m times ε.
        entropy: source of the draws; default: the operating system's. A seeded one repeats itself in every call.

    Raises:
        ValueError: labels or settings out of range.

    >>> import torch
    >>> from fedtorch.trust import privacy
    >>> labels = torch.zeros(1000, dtype=torch.int64)
    >>> told = privacy.randomised_response(labels, classes=2, epsilon=1.0, entropy=privacy.from_seed(0))
    >>> shares = told.bincount() / 1000, label_frequencies(told, 2, epsilon=1.0)
    >>> [share.round(decimals=2).tolist() for share in shares]  # what was told, and what it says of the true labels
    [[0.75, 0.25], [1.04, -0.04]]
    """
    keep, _ = keeping(epsilon, classes)
    _check_labels(labels, classes)
    uniforms = _uniforms("labels", 2 * labels.numel(), entropy).reshape(2, *labels.shape).to(labels.device)
    step = (uniforms[1] * (classes - 1)).long() + 1
    return torch.where(uniforms[0] < keep, labels, (labels + step).remainder(classes))


def replaced_rows(
    features: Tensor,
    labels: Tensor,
    classes: int,
    epsilon: float,
    made_up: MadeUp,
    *,
    ratio: float = 1.0,
    entropy: Entropy | None = None,
) -> tuple[Tensor, Tensor]:
    """Replace some whole rows, so that features and label together reveal little about a label.

    A row's label is ε-private against any other label with features that belong to it; only if `ratio` is right, and if
    `made_up` was not learnt from these rows.

    Args:
        features: `(n, d)`.
        labels: `(n,)` integers from 0 to `classes` − 1.
        classes: K.
        epsilon: of each label.
        made_up: (labels `(m,)`, source of uniform numbers) -> features `(m, d)` for them; see `normal_rows`.
        ratio: r, by which true features are at most more likely than made-up ones.
        entropy: source of the draws; default: the operating system's. A seeded one repeats itself in every call.

    Returns:
        (features, labels), in the rows' order.

    Raises:
        ValueError: labels or settings out of range, or made-up features of another shape.

    >>> import torch
    >>> from fedtorch.trust import privacy
    >>> public, kinds = torch.tensor([[1.0], [3.0], [-1.0], [-3.0]]), torch.tensor([0, 0, 1, 1])
    >>> made_up = normal_rows(public, kinds, classes=2)  # with means of 2 and −2
    >>> features, labels = torch.full((1000, 1), 2.0), torch.zeros(1000, dtype=torch.int64)
    >>> rows, told = replaced_rows(features, labels, 2, 1.0, made_up, entropy=privacy.from_seed(0))
    >>> round(float((rows == features).float().mean()), 1)  # p = (e − 1) / (e + 1) of them are as they were
    0.5
    >>> [round(float(rows[told == label].mean())) for label in (0, 1)]
    [2, -2]
    """
    keeping(epsilon, classes)
    _check_labels(labels, classes)
    if not 1 <= ratio < math.inf:
        raise ValueError(f"Expected a ratio of at least 1, but got {ratio}")
    entropy = from_system() if entropy is None else entropy
    draws = entropy.uniforms(_purpose("rows", entropy), 2 * len(labels)).reshape(2, -1).to(labels.device)
    truthful = draws[0] < -math.expm1(-epsilon) / (-math.expm1(-epsilon) + classes * ratio * math.exp(-epsilon))
    released = torch.where(truthful, labels, (draws[1] * classes).long())
    instead = made_up(released, partial(entropy.uniforms, _purpose("made up", entropy)))
    if instead.shape != features.shape:
        raise ValueError(f"Expected made-up features {tuple(features.shape)}, but got {tuple(instead.shape)}")
    return torch.where(truthful[:, None], features, instead.to(features)), released


def normal_rows(features: Tensor, labels: Tensor, classes: int, widen: float = 1.0) -> MadeUp:
    """Build a generator of features by normal distributions, one a class, with the moments of public rows.

    See `replaced_rows`.

    Args:
        features: `(n, d)` of public rows, without the rows to protect.
        labels: `(n,)` theirs, every class more often than d times.
        classes: K.
        widen: factor on the standard deviations, above 1 for a bounded ratio to true normal features.

    Raises:
        ValueError: too few rows of a class, or features that depend on each other in it.
    """
    means, roots = [], []
    for label in range(classes):
        rows = features[labels == label].to(torch.float64)
        root, bad = torch.linalg.cholesky_ex(torch.cov(rows.T, correction=0).reshape(rows.shape[1], -1))
        if len(rows) <= rows.shape[1] or int(bad):
            raise ValueError(f"Expected more rows than features in class {label}, and independent ones, but got others")
        means.append(rows.mean(0))
        roots.append(widen * root)
    return partial(_normal, torch.stack(means), torch.stack(roots))


def _normal(means: Tensor, roots: Tensor, labels: Tensor, uniforms: Uniforms) -> Tensor:
    classes = labels.to(means.device)
    noise = gaussian.draw(uniforms, len(labels) * means.shape[1]).reshape(len(labels), -1)
    return means[classes] + (roots[classes] @ noise[..., None])[..., 0]


def label_frequencies(randomised: Tensor, classes: int, epsilon: float) -> Tensor:
    """Estimate frequencies `(K,)` of the true labels from randomised ones, without bias; some may be below zero."""
    keep, other = keeping(epsilon, classes)
    frequencies = torch.bincount(randomised.flatten(), minlength=classes).to(torch.float64) / randomised.numel()
    return (frequencies - other) / (keep - other)


class RandomisedCrossEntropy(nn.Module):
    """Compute a cross entropy of randomised labels that is, on average over their draws, that of the true ones.

    Args:
        classes: K.
        epsilon: of the randomised response.

    >>> import math, torch
    >>> from fedtorch.trust import privacy
    >>> loss, logits = privacy.RandomisedCrossEntropy(classes=2, epsilon=math.log(3)), torch.tensor([[2.0, 0.0]])
    >>> same, other = (loss(logits, torch.tensor([label])) for label in (0, 1))
    >>> average = 0.75 * same + 0.25 * other  # of a label 0, which is kept with probability ¾
    >>> torch.allclose(average, torch.nn.functional.cross_entropy(logits, torch.tensor([0])))
    True
    """

    def __init__(self, classes: int, epsilon: float) -> None:
        super().__init__()
        self.keep, self.other = keeping(epsilon, classes)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over rows, of logits `(n, K)` and randomised labels `(n,)`; it may be negative."""
        losses = -output.log_softmax(-1)
        chosen = losses.gather(-1, target[..., None])[..., 0]
        return ((chosen - self.other * losses.sum(-1)) / (self.keep - self.other)).mean()


def noised_features(
    features: Tensor, clip: float, noise: float, mechanism: Mechanism = gaussian, entropy: Entropy | None = None
) -> Tensor:
    """Add noise to rows so that each is private against any other in its place.

    A row is scaled down to a norm of at most C and gets noise of z·2C on every number, so that it costs
    `privacy.epsilon(noise=z, delta=…, mechanism=…)`, once.

    Args:
        features: `(n, d)`.
        clip: the bound C, Euclidean or, for `laplace`, on the sum of absolute values.
        noise: z.
        mechanism: `gaussian` or `laplace`.
        entropy: source of the noise; default: the operating system's. A seeded one repeats itself in every call.

    Raises:
        ValueError: clip or noise out of range.

    >>> import torch
    >>> from fedtorch.trust import privacy
    >>> rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> privacy.noised_features(rows, clip=1.0, noise=1e-4, entropy=privacy.from_seed(0)).round(decimals=1)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
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


def _check_labels(labels: Tensor, classes: int) -> None:
    if labels.is_floating_point() or (labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes):
        raise ValueError(f"Expected whole labels from 0 to {classes - 1}, but got {labels.dtype} beyond")


def _uniforms(phase: str, count: int, entropy: Entropy | None) -> Tensor:
    entropy = from_system() if entropy is None else entropy
    return entropy.uniforms(_purpose(phase, entropy), count)


def _purpose(phase: str, entropy: Entropy) -> Purpose:
    """Return a new purpose for every call, unless the numbers are to repeat."""
    return Purpose(b"", 0, next(_CALLS) if entropy.guarantees else 0, phase, b"")
