r"""The same inference as messages: values go up, gradients come down.

A `PartyNode` holds one party's features and parameters, a `ServerNode` the response and the shared parameters; nothing
but the messages below passes between them, and the numbers are those of `sfvi` in one graph.

- *Response at the server* (augmented model): up z_j (or η_j with `sums`), down ∂L₀/∂s, the same for everybody.
- *Response with the parties* (augmented model, `ServerNode(..., response_shared=True)`): up z_j, down the predictor
  b + o + Σ z and the likelihood's shared parameters; every party finds the gradient itself, and can do so again for
  further local steps with the others' z held.
- *Power model*, two exchanges: up z_j; down b + o + Σ_{k≠j} z_k and the shared parameters; up ∂L_{0,j}/∂ of these; down
  Σ_{k≠j} ∂L_{0,k}/∂z_j. The source sends all of z and J − 1 gradients; the sums are enough and are smaller.

With `sums` the server must only ever learn Σ_j η_j, which carries no noise of ρ: put a secure sum there.

A joint q(γ, θ) of full covariance adds one short message per party and iteration, of as many numbers as there are
coordinates before its own, in the order of the parties from last to first: the gradient of log q by back substitution
of L. One of low rank adds two, up and down, of r² + Mr numbers: each node has its rows of (μ, D, W) and all draw the
same noise of the factor, so that log q needs sums over the nodes only, by Woodbury's identity.

Several local steps per exchange keep the iteration's draws: with the response at the server the party moves along the
gradient that it was told (first order), with the response shared it computes it anew.

Source: Hassan et al., algorithms 1 and 2.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Backward", "Gradient", "Pooled", "Share", "Traffic", "Value"]


class Value(NamedTuple):
    """Up: what a party contributes to the predictor."""

    value: Tensor  # (B, M, C, n) z_j, or η_j with `sums`


class Gradient(NamedTuple):
    """Down: the gradient of the others' terms with respect to what the party sent."""

    gradient: Tensor  # (B, M, C, n)


class Share(NamedTuple):
    """Down, to a party that evaluates the likelihood; and up, the gradients with respect to it."""

    predictor: Tensor  # (B, M, C, n) intercept + offset + Σ z, in the power model of the others
    shared: Tensor  # (B, M, S)
    weight: Tensor | None  # (B,) of the party's likelihood, where weights are learnt


class Backward(NamedTuple):
    """Along the chain of nodes where q(γ, θ) is joint: part of L⁻ᵀε for the nodes before."""

    told: Tensor  # (B, M, coordinates up to the receiver's last)


class Pooled(NamedTuple):
    """Where q(γ, θ) is joint and of low rank: up a node's part of WᵀD⁻²W and WᵀD⁻²(θ − μ), down the sum over nodes."""

    gram: Tensor  # (B, rank, rank)
    moment: Tensor  # (B, M, rank)


class Traffic(NamedTuple):
    """Bytes of an exchange, as `fedtorch.wire` would send them."""

    up: int
    down: int
