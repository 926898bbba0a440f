"""Representations of nodes' data against direct formulas, scikit-learn and differentiation."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression

import fedtorch as ft
from fedtorch.networks import discrepancy

COUNTS = torch.tensor([7, 12, 9, 5])


def regression(seed=0):
    key = ft.random.key(seed)
    x = ft.random.normal(key, (int(COUNTS.sum()), 3), torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + ft.random.normal(
        ft.random.fold_in(key, 1), (len(x),), torch.float64
    )
    return ft.data.FederatedData((x, y), COUNTS)


def test_distances_are_euclidean():
    vectors = ft.random.normal(ft.random.key(0), (20, 4), torch.float64)
    expected = (vectors[:, None] - vectors).square().sum(2).sqrt()
    found = discrepancy.distances(vectors)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert torch.equal(found, found.T)


def test_distances_of_complex_vectors_count_both_parts():
    vectors = torch.tensor([[1 + 1j, 2.0], [4 - 3j, 2j]], dtype=torch.complex128)
    wanted = (vectors[0] - vectors[1]).abs().square().sum().sqrt()
    assert torch.allclose(ft.networks.discrepancy.distances(vectors), torch.tensor([[0, wanted], [wanted, 0]]).double())


def test_mean_label():
    data = regression()
    expected = torch.stack([y.mean() for _, y in data])[:, None]
    torch.testing.assert_close(discrepancy.mean_label(data), expected, rtol=1e-12, atol=0)


def test_maximum_likelihood_is_each_nodes_regression():
    data = regression()
    expected = [LinearRegression(fit_intercept=False).fit(x, y).coef_ for x, y in data]
    np.testing.assert_allclose(discrepancy.maximum_likelihood(data), np.stack(expected), rtol=1e-10)
    means = discrepancy.maximum_likelihood(data, lambda rows: rows[1].mean())
    torch.testing.assert_close(means, discrepancy.mean_label(data), rtol=1e-12, atol=0)


def test_the_pooled_gradient_is_a_gradient_and_vanishes_on_the_whole():
    data = regression()
    x, y = data.rows
    optimum = torch.linalg.lstsq(x, y).solution
    loss = lambda w, rows: (rows[0] @ w - rows[1]).square().mean()
    found = discrepancy.pooled_gradient(data)
    torch.testing.assert_close(found, discrepancy.gradients(loss, optimum, data), rtol=0, atol=1e-12)
    assert (found * COUNTS[:, None]).sum(0).abs().max() < 1e-11  # rounding


def test_gradients_of_a_tree_of_parameters():
    data = regression()
    parameters = {"bias": torch.zeros((), dtype=torch.float64), "weight": torch.zeros(3, dtype=torch.float64)}
    loss = lambda p, rows: (rows[0] @ p["weight"] + p["bias"] - rows[1]).square().mean()
    found = discrepancy.gradients(loss, parameters, data)
    assert found.shape == (4, 4)
    torch.testing.assert_close(found[:, :1], -2 * discrepancy.mean_label(data), rtol=1e-12, atol=0)
    assert not parameters["bias"].requires_grad


def test_a_mixture_of_one_component_is_mean_and_covariance():
    data = regression()
    upper = torch.triu_indices(3, 3)
    for vector, (x, _) in zip(discrepancy.gaussian_mixture(data), data):
        covariance = torch.cov(x.T, correction=0) + 1e-6 * torch.eye(3)  # scikit-learn adds this to the diagonal
        assert vector[0] == pytest.approx(1)
        torch.testing.assert_close(vector[1:4], x.mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(vector[4:], covariance[upper[0], upper[1]], rtol=0, atol=1e-12)


def test_components_of_a_mixture_have_an_order():
    x = ft.random.normal(ft.random.key(0), (60, 1), torch.float64)
    x[::2] += 40  # two components that any start tells apart
    data = ft.data.FederatedData((x, x[:, 0]), torch.tensor([30, 30]))
    found = discrepancy.gaussian_mixture(data, components=2)
    assert bool((found[:, 2] < found[:, 3] - 30).all())
    torch.testing.assert_close(found[:, :2], torch.full((2, 2), 0.5, dtype=torch.float64), rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="31 rows or more"):
        discrepancy.gaussian_mixture(data, components=31)


def test_an_autoencoder_without_hidden_layers_is_principal_components():
    data = ft.data.FederatedData(regression().rows, torch.ones(33, dtype=torch.int64))
    rows = torch.cat([data.rows[0], data.rows[1][:, None]], 1)
    rows = (rows - rows.mean(0)) / rows.std(0, correction=0)
    codes = discrepancy.autoencoder_code(data, seed=0, code=2, hidden=0)
    scores = torch.from_numpy(PCA(2).fit_transform(rows))
    design = torch.cat((scores, torch.ones(33, 1, dtype=torch.float64)), 1)
    fitted = design @ torch.linalg.lstsq(design, codes).solution  # codes are an affine function of the scores
    assert (codes - fitted).norm() < 1e-4 * codes.norm()  # how far L-BFGS has come


def test_codes_tell_groups_apart():
    x = ft.random.normal(ft.random.key(3), (400, 5), torch.float64)
    x[200:, :2] += 4
    data = ft.data.FederatedData((x, x.sum(1)), torch.full((10,), 40))
    codes = discrepancy.autoencoder_code(data, seed=3, iterations=40)
    assert torch.equal(ft.networks.clustering.k_means(codes, 2, seed=3), torch.arange(2).repeat_interleave(5))
    assert torch.equal(codes, discrepancy.autoencoder_code(data, seed=3, iterations=40))


def test_bad_input():
    data = regression()
    with pytest.raises(ValueError, match=r"one of the fields \['0', '1'\]"):
        discrepancy.mean_label(data, "label")
    with pytest.raises(ValueError, match="finite vectors"):
        discrepancy.distances(torch.zeros(3))
    empty = ft.data.FederatedData((torch.zeros(2, 1), torch.zeros(2)), torch.tensor([2, 0]), allow_empty=True)
    with pytest.raises(ValueError, match="a node without"):
        discrepancy.mean_label(empty)
