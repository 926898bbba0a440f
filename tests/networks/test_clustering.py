"""Clusters that are there are found, and equal partitions have equal labels."""

import math

import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture

import fedtorch as ft
from fedtorch.networks import clustering

SIZES = [40, 25, 35]
TRUTH = torch.arange(3).repeat_interleave(torch.tensor(SIZES))


def test_k_means_finds_separate_groups():
    noise = ft.random.normal(ft.random.key(0), (100, 2, 2), torch.float64)
    parameters = noise + 10 * TRUTH[:, None, None]
    assert torch.equal(clustering.k_means(parameters, 3, seed=1), TRUTH)
    order = ft.random.permutation(ft.random.key(2), 100)
    moved = clustering.k_means(parameters[order], 3, seed=1)
    assert adjusted_rand_score(moved, TRUTH[order]) == 1
    assert moved[0] == 0


@pytest.mark.parametrize("covariance", ["full", "diag"])
def test_mixtures_find_what_scikit_learn_does_on_the_same_points(covariance):
    """A narrow and a wide cluster side by side, which k-means cuts elsewhere."""
    noise = ft.random.normal(ft.random.key(0), (120, 2), torch.float64)
    truth = torch.arange(2).repeat_interleave(60)
    points = noise * torch.tensor([0.1, 3.0])[truth, None] + torch.tensor([4.0, 0.0])[truth, None]
    labels = clustering.gaussian_mixture(points, 2, seed=1, covariance=covariance)
    theirs = GaussianMixture(2, covariance_type=covariance, n_init=10, random_state=5).fit_predict(points.numpy())
    assert adjusted_rand_score(labels, theirs) == 1
    means = clustering.k_means(points, 2, seed=1)
    assert adjusted_rand_score(labels, truth) > 0.85 > adjusted_rand_score(means, truth)
    assert torch.equal(clustering.gaussian_mixture(points, 2, seed=1, covariance=covariance), labels)


@pytest.mark.parametrize("dense", [400, 0])
def test_spectral_clustering_finds_blocks(dense, monkeypatch):
    monkeypatch.setattr(clustering, "_DENSE", dense)
    network = ft.Network.stochastic_blocks(SIZES, 0.6, 0.03, seed=0)
    assert torch.equal(clustering.spectral(network, 3, seed=1), TRUTH)


def test_spectral_clustering_of_components_and_of_nodes_without_neighbours():
    network = ft.Network([(0, 3), (1, 4), (4, 5), (1, 5)], nodes=6)
    assert clustering.spectral(network, 3, seed=0).tolist() == [0, 1, 2, 0, 1, 1]


def test_tied_parameters_make_clusters_only_along_edges():
    network = ft.Network.ring(6)
    parameters = torch.tensor([1.0, 1.0, 5.0, 1.0, 5.0, 5.0 + 1e-9], dtype=torch.float64)[:, None]
    assert clustering.tied(network, parameters).tolist() == [0, 0, 1, 2, 3, 3]
    assert clustering.tied(network, parameters, tolerance=0.0).tolist() == [0, 0, 1, 2, 3, 4]
    assert len(clustering.tied(network, parameters, tolerance=1.0).unique()) == 1


def test_bad_input():
    with pytest.raises(ValueError, match="from 1 to 3 clusters"):
        clustering.k_means(torch.eye(3), 4, seed=0)
    with pytest.raises(ValueError, match="finite parameters"):
        clustering.k_means(torch.eye(3) * math.nan, 2, seed=0)
    with pytest.raises(ValueError, match="finite parameters"):
        clustering.gaussian_mixture(torch.eye(3) * math.nan, 2, seed=0)
    with pytest.raises(ValueError, match="from 1 to 3 clusters"):
        clustering.gaussian_mixture(torch.eye(3), 4, seed=0)
    with pytest.raises(ValueError, match="from 1 to 3 clusters"):
        clustering.spectral(ft.Network.ring(3), 0, seed=0)
    with pytest.raises(ValueError, match="parameters of 3 nodes"):
        clustering.tied(ft.Network.ring(3), torch.zeros(4, 2))
