"""Small vertical problems in float64, and their closed forms."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import torch
from torch import Tensor

from fedtorch import random, tree, vfl
from fedtorch.models import encoders
from fedtorch.protocol.halves import Half, decode, drive, encode
from fedtorch.vfl.fit.guide import Noise, draw_noise, initial, low_rank
from fedtorch.vfl.fit.part import parts
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.checks import prepared
from fedtorch.vfl.model.predictors import Predictor
from fedtorch.vfl.nodes.node import PartyNode, ServerNode

WIDTHS = [2, 3, 1]
SD = 0.8
KEY, ROWS, DRAWS, STEPS = random.key(0), 12, 2, 3


def draw(key: int, *shape: int) -> Tensor:
    return random.normal(random.key(key), shape, torch.float64)


def gaussian_data(widths: list[int] = WIDTHS, rows: int = 40, seed: int = 0) -> vfl.VerticalData:
    """Independent features, and a response with noise of standard deviation `SD`."""
    width = sum(widths)
    x = draw(seed, rows, width)
    y = 0.5 + x @ draw(seed + 100, width) + SD * draw(seed + 200, rows)
    return vfl.VerticalData(x.split(widths, 1), y)


def logistic_data(widths: list[int], rows: int, seed: int = 0) -> vfl.VerticalData:
    """Independent features, and labels of a logistic model with standard normal coefficients."""
    x = draw(seed, rows, sum(widths))
    chance = (x @ draw(seed + 100, sum(widths))).sigmoid()
    return vfl.VerticalData(x.split(widths, 1), random.bernoulli(random.key(seed + 300), chance, (rows,)).double())


def counts_data(widths: list[int], rows: int, seed: int = 0) -> vfl.VerticalData:
    """Counts with an offset."""
    x = draw(seed, rows, sum(widths))
    offset = 1 + 0.1 * draw(seed + 400, rows)
    y = torch.poisson((x @ draw(seed + 100, sum(widths)) * 0.3 + offset).exp(), torch.Generator().manual_seed(seed))
    return vfl.VerticalData(x.split(widths, 1), y, offset)


def predictors(widths: list[int] = WIDTHS) -> list[Predictor]:
    return [vfl.linear(width) for width in widths]


def regression(data: vfl.VerticalData, variance: float) -> tuple[Tensor, Tensor, float]:
    """Mean, covariance and log evidence of (intercept, β) with N(0, 1) priors and noise of this variance."""
    ones = torch.ones(len(data.response), 1, dtype=torch.float64)
    design = torch.cat([ones, *data.features], 1)
    precision = design.T @ design / variance + torch.eye(design.shape[1], dtype=torch.float64)
    covariance = torch.linalg.inv(precision)
    marginal = variance * torch.eye(len(design), dtype=torch.float64) + design @ design.T
    evidence = torch.distributions.MultivariateNormal(torch.zeros_like(data.response), marginal)
    return covariance @ design.T @ data.response / variance, covariance, float(evidence.log_prob(data.response))


MODELS = {"augmented": vfl.augmented, "power": vfl.power}
APART = {  # of which each node holds its own part
    "mean field": lambda: vfl.Guide(vfl.mean_field(), vfl.diagonal()),
    "amortised": lambda: vfl.Guide(vfl.amortised(encoders.perceptron(4))),
    "amortised, y seen": lambda: vfl.Guide(vfl.amortised(encoders.perceptron(4), sees_response=True), low_rank(1)),
    "sums": lambda: vfl.Guide(vfl.sums(encoders.perceptron(4))),
    "noiseless": lambda: vfl.Guide(vfl.noiseless()),
}
GUIDES = {
    **APART,
    "sums, joint": lambda: vfl.Guide(vfl.sums(encoders.affine(), skewed=False), joint=True),
    "amortised, joint": lambda: vfl.Guide(vfl.amortised(encoders.affine()), joint=True),
    "sums, low rank, joint": lambda: vfl.Guide(vfl.sums(encoders.affine()), low_rank(2), joint=True),
}
LIKELIHOODS = {
    "gaussian": (likelihoods.gaussian, gaussian_data),
    "bernoulli": (likelihoods.bernoulli, logistic_data),
    "poisson": (likelihoods.poisson, counts_data),
    "negative binomial": (likelihoods.negative_binomial, counts_data),
}


def some_parameters(
    model: vfl.VerticalModel, guide: vfl.Guide, data: vfl.VerticalData, size: int = 2
) -> vfl.Parameters:
    """Parameters that are nowhere special."""
    begin = initial(model, guide, data.response.shape[-1], size, random.key(0), torch.float64)
    return tree.map(lambda leaf: leaf + 0.2 * draw(leaf.numel(), *leaf.shape), begin)


def some_model(name: str, likelihood: str, widths: list[int] = WIDTHS) -> tuple[vfl.VerticalModel, vfl.VerticalData]:
    make, data = LIKELIHOODS[likelihood]
    return MODELS[name](make(), predictors(widths), torch.tensor([0.7, 1.3])), data(widths, 12)


def nodes(
    model: vfl.VerticalModel, guide: vfl.Guide, q: vfl.Parameters, data: vfl.VerticalData, shared: bool
) -> tuple[ServerNode, list[PartyNode]]:
    """All nodes, with the response at the parties too where it is `shared`."""
    server, *holders = parts(model, guide, q)
    known = zip(holders, data.known_to_parties(response=shared))
    parties = [PartyNode(part, own, response_shared=shared) for part, own in known]
    return ServerNode(server, prepared(model, data).known_to_server(), response_shared=shared), parties


def gathered(server: ServerNode, parties: list[PartyNode]) -> vfl.Parameters:
    """All nodes' parameters in one place."""
    return tree.map(torch.detach, vfl.Parameters(None, server.q, tuple(party.q for party in parties)))


def noises(model: vfl.VerticalModel, guide: vfl.Guide, rows: int, steps: int = STEPS) -> list[Noise]:
    return [
        draw_noise(model, guide, random.fold_in(KEY, t).reshape(1), rows, DRAWS, torch.float64) for t in range(steps)
    ]


def in_threads(halves: dict[int, Half], patience: float = 60) -> None:
    """Runs every half in a thread of its own, with queues of encoded messages between them."""
    waiting: dict[tuple[int, int], Queue[bytes]] = {(one, other): Queue() for one in halves for other in halves}

    def run(own: int, half: Half) -> None:
        receive = lambda step: decode(waiting[step.sender, own].get(timeout=patience), step, str(step.sender))
        drive(half, lambda step: waiting[own, step.to].put(encode(step)), receive)

    with ThreadPoolExecutor(len(halves)) as pool:
        for each in [pool.submit(run, *item) for item in halves.items()]:
            each.result()
