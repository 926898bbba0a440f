r"""The bound of a vertical model, as a sum of terms that each of its nodes can compute by itself.

The bound of one draw is

.. math::
    \log p(y | s, e, \gamma) + \log\frac{p(\gamma)}{q(\gamma)} +
    \sum_j \Big[\log\frac{p(\theta_j)}{q(\theta_j)} + \log\frac{p(z_j | \theta_j)}{q(z_j | \theta_j)}\Big] ,

The server computes the first terms (in the power model, with z drawn by the parties, the parties do), and party j its
terms of the sum. `bound` adds all terms in one graph; `fedtorch.vfl.nodes` computes the same numbers from messages.
All is batched over folds × models × seeds; elements of the batch do not influence each other.

Source: Hassan et al., section 4, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch.vfl.fit.guide import Guide, Noise, Parameters, draw_theta, fixed
from fedtorch.vfl.model.vertical import VerticalModel
from fedtorch.vfl.rows.data import VerticalData

Groups = dict[str, dict[str, Tensor]]


def party_bound(
    model: VerticalModel, guide: Guide, index: int, q: Groups, theta: Tensor, data: VerticalData, noise: Noise
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the value that a party sends, η, its terms of the bound without log q(θ) `(B, M)`).

    Args:
        model: the model.
        guide: the family.
        index: j, from 1 on.
        q: the party's parameters.
        theta: θ_j, `(B, M, d_j)`.
        data: the party's, by `VerticalData.of_party`, with the response where parties see it.
        noise: of the iteration.
    """
    predictor = model.predictors[index - 1]
    eta = predictor(theta, data.features[0], *noise.keys[index : index + 1])
    value, terms = eta, model.masked(predictor.log_prior(theta), 0.0)
    if guide.auxiliary.party is not None:
        drawn, ratio = guide.auxiliary.party(q["z"], fixed(guide, q["z"]), eta, noise.z[index], data, model)
        value, terms = model.masked(drawn, eta), terms + model.masked(data.weighted_sum(ratio), 0.0)
    return value if data.present is None else value * data.present[:, 0].to(value.dtype), eta, terms


def server_bound(
    model: VerticalModel,
    guide: Guide,
    q: Groups,
    gamma: Tensor,
    values: Sequence[Tensor],
    deviations: Tensor | None,
    data: VerticalData,
    noise: Noise,
) -> Tensor:
    """Return the server's terms of the bound without log q(γ): the likelihood and the prior of γ, `(B, M)`.

    Args:
        model: the model.
        guide: the family.
        q: the server's parameters.
        gamma: γ, `(B, M, S)`.
        values: of the parties, `(B, M, C_j, n)` each.
        deviations: e_j of the parties, `(J, B, M, C, n)`, where the power model's parties draw z.
        data: the response, offset and weights.
        noise: of the iteration.
    """
    centre, shared = model.centre(gamma, model.cut(values, *noise.keys[:1]), data.offset)
    terms, weights = shared_terms(model, q, gamma, data)
    ratio = None
    if guide.auxiliary.server is not None:
        seen = centre, shared, noise.z[0], data, model
        total, deviations, ratio = guide.auxiliary.server(q["z"], fixed(guide, q["z"]), *seen)
        centre, ratio = model.masked(total, centre), None if ratio is None else model.masked(ratio, 0.0)
    rows = model.log_likelihood(data.y, centre, shared, deviations, weights)
    return terms + data.weighted_sum(rows if ratio is None else rows + ratio)


def shared_terms(model: VerticalModel, q: Groups, gamma: Tensor, data: VerticalData) -> tuple[Tensor, Tensor | None]:
    """Return the prior of γ and of learnt weights, `(B, M)`, and these weights `(B, J)`."""
    log_prior = model.log_shared_prior(gamma)
    if model.concentration is None:
        return log_prior, None
    logits = q["weights"]["logits"].log_softmax(-1)
    rows = data.weighted_sum(torch.ones_like(data.y))
    return log_prior + model.concentration * rows * logits.mean(-1, True), logits.exp()


def bound(model: VerticalModel, guide: Guide, parameters: Parameters, data: VerticalData, noise: Noise) -> Tensor:
    """Return the bound of each draw, `(B, M)`, differentiable in all parameters."""
    thetas, log_q = draw_theta(model, guide, parameters, noise.theta)
    parts = [
        party_bound(model, guide, j, q, thetas[j], data.of_party(j - 1), noise)
        for j, q in enumerate(parameters.parties, start=1)
    ]
    sent, etas, terms = zip(*parts)
    drawn_apart = model.power and guide.auxiliary.party is not None
    deviations = torch.stack(sent) - torch.stack(etas) if drawn_apart else None
    server = server_bound(model, guide, parameters.server, thetas[0], sent, deviations, data, noise)
    return server + sum(terms[1:], terms[0]) - log_q


def climb(optimizer: torch.optim.Optimizer, rate: float | None = None) -> None:
    """Step an optimiser along its leaves' gradients, with this learning rate or the optimiser's own."""
    for group in optimizer.param_groups if rate is not None else ():
        group["lr"] = rate
    optimizer.step()


def ascend(
    optimizer: torch.optim.Optimizer, objective: Tensor, rate: float | None = None, also: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Step an optimiser up an objective `(B, M)`, averaged over draws; return its gradients with respect to `also`.

    Args:
        optimizer: of the leaves.
        objective: to be maximised.
        rate: learning rate of this step; the optimiser's own by default.
        also: other tensors of the graph.
    """
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
    gradients = torch.autograd.grad(objective.sum(), [*leaves, *also], allow_unused=True)
    for leaf, gradient in zip(leaves, gradients):
        # Contiguous like the leaves, because torch's fused Adam ignores the strides of gradients.
        leaf.grad = None if gradient is None else (gradient / -objective.shape[1]).contiguous()
    climb(optimizer, rate)
    return tuple(g if g is not None else torch.zeros_like(a) for g, a in zip(gradients[len(leaves) :], also))
