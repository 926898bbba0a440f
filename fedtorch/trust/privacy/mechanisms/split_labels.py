r"""Differential privacy of labels in split networks: noise on the gradients that a server sends to the parties.

The gradient of row i's log likelihood is a function of its label and of what the parties sent, as long as the server
has nothing of its own that learns. Clipped to a norm of C, another label moves it by at most 2C, so that Gaussian noise
of z·2C on every number is one release a step, and T steps cost `privacy.epsilon(noise=z, rounds=T, delta=…)`.

*Who is protected:* the label of one row, against any other label (replace); features are not. *From whom:* the parties,
all together; the server knows the labels.

Source: Ghazi et al. (2021), "Deep learning with label differential privacy"; Li et al. (2022), "Label leakage and
protection in two-party split learning", for the threat.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch._representation import without_rows
from fedtorch.learns import NOISED, Learns, tells
from fedtorch.protocol.halves import Half, Receive, Send, wrapped
from fedtorch.random.entropy import Entropy, Purpose, from_system
from fedtorch.trust.privacy._checks import check_clip, check_noise
from fedtorch.trust.privacy.accounting.spending import on_grid
from fedtorch.trust.privacy.noise import gaussian
from fedtorch.vfl.model.vertical import summed
from fedtorch.vfl.nodes.node import Gradient, ServerNode


@tells(
    Learns(
        "of each label, beyond what features predict, what ε of all steps together lets through, steps that are done "
        "again included; of the others' parts what no ε bounds",
        "attacks.guessed_labels",
        "a smaller ε",
    ),
    exactness=NOISED,
)
@without_rows
class NoisedGradient(NamedTuple):
    """Down: a `Gradient` with noise."""

    gradient: Tensor  # (B, M, C, n)


_CALLS = itertools.count()  # of releases in this process, so that no two have the same noise


def noised_gradients(
    server: ServerNode, half: Half, *, clip: float, noise: float, entropy: Entropy | None = None
) -> Half:
    """Clip and noise a server's gradients row by row, with fresh noise in each step.

    A sum at the cut layer has one gradient for all parties, which is noised once: all of them hear the same numbers.
    Nothing counts releases. A half of a journal (`fedtorch.sites.vertical`) does steps again after a broken line, with
    other noise, and each of them costs ε: pass the half itself, which a broken line ends, or count them.

    Args:
        server: the node, which must have nothing that learns.
        half: `fedtorch.vfl.nodes.iteration.server_half(server, iterations)`.
        clip: C, of a row's gradient times its weight (n/m in minibatches of m of n rows), before any division by the
            sum of weights.
        noise: z.
        entropy: of the noise; default: the operating system's.

    Raises:
        ValueError: clip or noise out of range; a server that learns, as with a top network or `sums`; another cut layer
            than a sum; or a response that the parties share.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import privacy
        >>> from fedtorch.vfl.nodes import iteration
        >>> from fedtorch.vfl.model import likelihoods, split_nn
        >>> from fedtorch.protocol import halves as protocol
        >>> data = ft.vfl.VerticalData([torch.eye(2), torch.ones(2, 1)], torch.tensor([0.0, 1.0]))
        >>> keys, bottoms = ft.random.key(0)[None], [split_nn.mlp(2, [], 1), split_nn.mlp(1, [], 1)]
        >>> network = ft.vfl.SplitNetwork(bottoms, likelihoods.bernoulli(), keys=keys)
        >>> server, parties = network.nodes(data, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        >>> iterations = [iteration.Iteration(step=step) for step in range(2)]
        >>> halves = {party.index: iteration.party_half(party, iterations) for party in parties}
        >>> half = iteration.server_half(server, iterations)
        >>> private = noised_gradients(server, half, clip=1.0, noise=4.0, entropy=privacy.from_seed(0))
        >>> _, traffic = protocol.together({0: private, **halves})
        >>> round(privacy.epsilon(noise=4.0, rounds=2, delta=1e-3), 2)  # what both steps tell of a label
        0.89
    """
    check_clip(clip)
    check_noise(noise)
    learns = [name for name, value in server.part.named_parameters() if value.numel()]
    if learns:
        raise ValueError(
            f"Expected a server that learns nothing from the labels, but got {learns[0]!r}; its gradients would tell "
            "one row's label through other rows"
        )
    if server.response_shared or server.model.power or server.model.combine is not summed:
        raise ValueError("Expected labels that stay at the server and a sum at the cut layer, but got another model")
    return _noised(server, half, clip, noise, from_system() if entropy is None else entropy)


def _noised(server: ServerNode, half: Half, clip: float, noise: float, entropy: Entropy) -> Half:
    released: NoisedGradient | None = None

    def take(step: Send | Receive) -> Half:
        nonlocal released
        if isinstance(step, Receive):  # values come before gradients in every iteration, which are those of a sum
            released = None
        elif isinstance(step.message, Gradient):
            if released is None:
                size = server.data.total.to(step.message.gradient).reshape(-1, 1, 1, 1) if server.per_row else 1.0
                released = NoisedGradient(release(step.message.gradient * size, clip, noise, entropy) / size)
            step = step._replace(message=released)
        return (yield step)

    return wrapped(half, take)


def release(gradient: Tensor, clip: float, noise: float, entropy: Entropy) -> Tensor:
    """Clip gradients `(B, M, C, n)`, all of a row together, to a norm of `clip`, and add noise of 2·`clip`·`noise`."""
    rows = gradient.to("cpu", torch.float64)
    norm = rows.flatten(0, 2).norm(dim=0)
    rows = torch.where(norm.isfinite(), rows * (clip / norm).clamp(max=1), 0.0)
    scale = torch.tensor(2 * clip * noise, dtype=torch.float64)
    uniforms = partial(entropy.uniforms, Purpose(b"", 0, next(_CALLS), "gradients", b""))
    noised = on_grid(rows + scale * gaussian.draw(uniforms, rows.numel()).reshape(rows.shape), scale)
    return noised.to(gradient.device, gradient.dtype)
