"""Randomised labels and noised features: their probabilities, and estimators that average out what was done."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fedtorch as ft
from fedtorch.random.entropy import from_system
from fedtorch.trust import privacy
from fedtorch.trust.privacy.mechanisms.preprocessing import (
    keeping,
    label_frequencies,
    normal_rows,
    replaced_rows,
)
from fedtorch.trust.privacy.noise import gaussian


@pytest.mark.parametrize(("classes", "epsilon"), [(2, 0.5), (5, 1.0), (10, 4.0)])
def test_no_answer_is_more_likely_by_more_than_its_epsilon(classes: int, epsilon: float) -> None:
    keep, other = keeping(epsilon, classes)
    assert keep + (classes - 1) * other == pytest.approx(1.0)
    assert math.log(keep / other) == pytest.approx(epsilon)
    labels = torch.full((100_000,), 1)
    told = privacy.randomised_response(labels, classes, epsilon, privacy.from_seed(0))
    expected = torch.full((classes,), other, dtype=torch.float64)
    expected[1] = keep
    found = torch.bincount(told, minlength=classes) / 100_000
    error = (expected * (1 - expected) / 100_000).sqrt()
    assert bool(((found - expected).abs() < 4 * error).all())


def test_frequencies_are_estimated_without_bias() -> None:
    """400 data sets of 500 labels; their mean is known to four standard errors."""
    truth = torch.tensor([0] * 250 + [1] * 200 + [2] * 50)
    estimates = torch.stack([
        label_frequencies(privacy.randomised_response(truth, 3, 1.0, privacy.from_seed(seed)), 3, 1.0)
        for seed in range(400)
    ])  # fmt: skip
    error = estimates.std(0) / math.sqrt(400)
    assert bool(((estimates.mean(0) - torch.tensor([0.5, 0.4, 0.1])).abs() < 4 * error).all())
    assert estimates.sum(1).tolist() == pytest.approx([1.0] * 400)


def test_the_corrected_loss_is_that_of_the_true_labels_on_average() -> None:
    """Exactly: weighted by the probabilities of all answers."""
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(1, 4, generator=generator, dtype=torch.float64)
    loss = privacy.RandomisedCrossEntropy(4, 1.3)
    keep, other = keeping(1.3, 4)
    for label in range(4):
        answers = torch.stack([loss(output, torch.tensor([told])) for told in range(4)])
        probabilities = torch.tensor([keep if told == label else other for told in range(4)], dtype=torch.float64)
        plain = nn.functional.cross_entropy(output, torch.tensor([label]))
        assert float(probabilities @ answers) == pytest.approx(float(plain))


def test_a_model_learns_from_randomised_labels() -> None:
    """Which the plain loss pulls towards the classes that are told by chance."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20_000, 2, generator=generator)
    y = (x[:, 0] + 0.3 * torch.randn(20_000, generator=generator) > 0.8).long()
    told = privacy.randomised_response(y, 2, 0.5, privacy.from_seed(3))
    chances = []
    for labels, loss in ((y, nn.functional.cross_entropy), (told, privacy.RandomisedCrossEntropy(2, 0.5)),
                         (told, nn.functional.cross_entropy)):  # fmt: skip
        torch.manual_seed(0)
        local = ft.gradient_descent(nn.Linear(2, 2), steps=60, loss=loss,
                                    optimizer=lambda p: torch.optim.SGD(p, lr=1.0))  # fmt: skip
        run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors([(x, labels)])), rounds=1)
        chances.append(float(run.client_module(0)(x).detach().softmax(1)[:, 1].mean()))
    assert abs(chances[1] - chances[0]) < 0.03
    assert abs(chances[2] - chances[0]) > 0.1


def test_replaced_rows_tell_a_label_and_its_features_by_no_more_than_epsilon() -> None:
    """Features of five kinds; made up well (r = 1), and alike for all labels (r = 5 · 0.4), 400 000 rows of each label.

    Logarithms of counts are known to 4 standard errors of both.
    """
    epsilon, rows = 1.0, 400_000
    shares = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.3, 0.4]], dtype=torch.float64)
    drawn = lambda labels, uniforms, given: (
        (uniforms(len(labels))[:, None] > given[labels].cumsum(1)[:, :-1]).sum(1, True).double()
    )
    well = lambda labels, uniforms: drawn(labels, uniforms, shares)
    alike = lambda labels, uniforms: drawn(labels, uniforms, torch.full((2, 5), 0.2, dtype=torch.float64))
    for made_up, ratio in ((well, 1.0), (alike, 2.0)):
        counts = []
        for label in (0, 1):
            labels = torch.full((rows,), label)
            uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(label), dtype=torch.float64)
            features = drawn(labels, lambda count, given=uniforms: given, shares)
            told, kind = replaced_rows(
                features, labels, 2, epsilon, made_up, ratio=ratio, entropy=privacy.from_seed(label)
            )
            counts.append(torch.bincount(5 * kind + told[:, 0].long(), minlength=10).double())
        losses = (counts[0] / counts[1]).log().abs()
        error = 4 * (1 / counts[0] + 1 / counts[1]).sqrt()
        assert bool((losses <= epsilon + error).all())
        assert float(losses.max()) == pytest.approx(epsilon, abs=float(error.max()))  # and no less than could be
    assert math.log(float(shares[0, 0] / shares[1, 0])) > epsilon  # which features beside randomised labels would tell


def test_made_up_rows_have_the_moments_of_public_ones() -> None:
    generator = torch.Generator().manual_seed(2)
    public = (
        torch.randn(4000, 2, generator=generator, dtype=torch.float64) @ torch.tensor([[2.0, 1.0], [0.0, 0.5]]).double()
    )
    labels = torch.arange(4000) % 2
    public[labels == 1] += 7
    features, told = replaced_rows(
        torch.zeros(40_000, 2), torch.zeros(40_000, dtype=torch.int64), 2, 1e-6,
        normal_rows(public, labels, 2, widen=1.5), entropy=privacy.from_seed(4),
    )  # fmt: skip
    for label in (0, 1):
        own, true = features[told == label].double(), public[labels == label]
        assert abs(len(own) - 20_000) < 4 * math.sqrt(10_000)
        error = 4 * 1.5 * true.std(0) / math.sqrt(len(own))
        assert bool(((own.mean(0) - true.mean(0)).abs() < error).all())
        assert torch.allclose(torch.cov(own.T), 2.25 * torch.cov(true.T), rtol=4 * math.sqrt(2 / len(own)) + 0.02)
    with pytest.raises(ValueError, match="more rows than features"):
        normal_rows(public[:2], labels[:2], 2)


def test_noised_rows_are_private_against_any_other_row() -> None:
    rows = torch.randn(40_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5
    for mechanism, order, spread in ((gaussian, 2, 1.0), (privacy.laplace, 1, math.sqrt(2))):
        noised = privacy.noised_features(rows, 0.5, 3.0, mechanism, privacy.from_seed(0))
        clipped = rows * (0.5 / rows.norm(p=order, dim=1, keepdim=True)).clamp(max=1)
        deviations = (noised - clipped).flatten() / (2 * 0.5 * 3.0 * spread)
        # The fourth moment of a Laplace is 6 times its squared variance, so that variances have errors of √(5/n).
        assert float(deviations.std()) == pytest.approx(1.0, abs=2.5 * math.sqrt(5 / 80_000))
        assert float(deviations.mean()) == pytest.approx(0.0, abs=4 / math.sqrt(80_000))
    broken = torch.tensor([[math.nan, 1.0], [1.0, 0.0]], dtype=torch.float64)
    assert bool(privacy.noised_features(broken, 1.0, 1.0).isfinite().all())


def test_draws_are_fresh_unless_they_are_seeded() -> None:
    rows, labels = torch.zeros(5, 3), torch.zeros(200, dtype=torch.int64)
    features = lambda entropy: privacy.noised_features(rows, 1.0, 1.0, entropy=entropy)
    response = lambda entropy: privacy.randomised_response(labels, 3, 1.0, entropy)
    system = from_system()
    for make in (features, response):
        assert not torch.equal(make(None), make(None))
        assert not torch.equal(make(system), make(system))
        assert torch.equal(make(privacy.from_seed(1)), make(privacy.from_seed(1)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: privacy.randomised_response(torch.tensor([3]), 3, 1.0), "whole labels"),
        (lambda: privacy.randomised_response(torch.tensor([0.5]), 3, 1.0), "whole labels"),
        (lambda: privacy.randomised_response(torch.tensor([0]), 1, 1.0), "at least two classes"),
        (lambda: privacy.randomised_response(torch.tensor([0]), 2, 0.0), "positive finite epsilon"),
        (lambda: replaced_rows(torch.zeros(1, 2), torch.tensor([2]), 2, 1.0, torch.zeros), "whole labels"),
        (
            lambda: replaced_rows(torch.zeros(1, 2), torch.tensor([0]), 2, 1.0, torch.zeros, ratio=0.5),
            "ratio of at least 1",
        ),
        (
            lambda: replaced_rows(
                torch.zeros(1, 2), torch.tensor([0]), 2, 1.0, lambda labels, uniforms: torch.zeros(1)
            ),
            "made-up features",
        ),
        (lambda: privacy.noised_features(torch.zeros(2, 2), 0.0, 1.0), "positive finite clip"),
        (lambda: privacy.noised_features(torch.zeros(2, 2), 1.0, 0.0), "positive finite noise"),
    ],
)
def test_impossible_settings_are_refused(call, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
