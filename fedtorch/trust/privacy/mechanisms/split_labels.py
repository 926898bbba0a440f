r"""Differential privacy of labels in split networks: noise on the gradients that a server sends to the parties.

The gradient of row i's log likelihood is a function of its label and of the parties' messages, provided that the server
itself has nothing that learns. Clipped to a norm of C, another label changes it by at most 2C, so Gaussian noise of
z·2C on every number is one release a step, and T steps cost `privacy.epsilon(noise=z, rounds=T, delta=…)`.

Each release is written into a ledger before it is made: steps that are repeated after a broken connection, and all runs
that share the ledger's file, add up in one ε, and a release beyond the budget is refused.

*Who is protected:* the label of one row, against any other label (replace); features are not. *From whom:* the parties,
all together; the server knows the labels.

Source: Ghazi et al. (2021), "Deep learning with label differential privacy"; Li et al. (2022), "Label leakage and
protection in two-party split learning", for the threat.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch._representation import without_rows
from fedtorch.learns import NOISED, Learns, tells
from fedtorch.protocol.halves import Half, Receive, Send, wrapped
from fedtorch.random.entropy import Entropy, from_system
from fedtorch.trust.privacy._checks import check_clip, check_noise
from fedtorch.trust.privacy.accounting.accountant import Release
from fedtorch.trust.privacy.accounting.ledger import NO_GUARANTEE, SYSTEM, Claim, Ledger
from fedtorch.trust.privacy.accounting.spending import Spending, on_grid
from fedtorch.vfl.model.vertical import summed
from fedtorch.vfl.nodes.node import Gradient, ServerNode

ADJACENCY = "replace: one row has any other label"
ADVERSARY = "the parties, all together, who hear every gradient; not the server, which has the labels"
_NOBODY = torch.zeros(0, dtype=torch.int64)


@tells(
    Learns(
        "of each label, beyond what features predict, what ε of all steps and runs in the ledger lets through; of the "
        "others' parts what no ε bounds",
        "attacks.guessed_labels",
        "a smaller ε",
    ),
    exactness=NOISED,
)
@without_rows
class NoisedGradient(NamedTuple):
    """Down: a `Gradient` with noise."""

    gradient: Tensor  # (B, M, C, n)


class PrivateLabels:
    """Noise on servers' gradients, with one ledger for every release; see `noised_gradients`.

    Attributes:
        clip: C.
        ledger: of all wrapped halves.
    """

    def __init__(self, clip: float, noise: float, ledger: Ledger, entropy: Entropy) -> None:
        self.clip, self.ledger = clip, ledger
        self._spending = Spending(ledger, Release(float(noise)), 1, entropy, lambda cohort, clients: None)

    def __repr__(self) -> str:
        account = f"epsilon={self.ledger.epsilon:.4g} at delta={self.ledger.delta:g}"
        return f"noised_gradients(clip={self.clip:g}, noise={self._spending.release.noise:g}, {account})"

    def __call__(self, server: ServerNode, half: Half) -> Half:
        """Return a server's half, each of whose steps sends one noised gradient to all parties.

        Args:
            server: the node, which must have nothing that learns.
            half: `fedtorch.vfl.nodes.iteration.server_half(server, iterations)`.

        Raises:
            ValueError: a server that learns, as with a top network or `sums`; another cut layer than a sum; a response
                that the parties share; a δ that is not below one over the number of rows; or, in a step, a minibatch
                with a row twice, whose label would change two gradients.
            RuntimeError: in a step, a release beyond the budget; nothing of it has been sent.
        """
        learns = [name for name, value in server.part.named_parameters() if value.numel()]
        if learns:
            raise ValueError(
                f"Expected a server that learns nothing from the labels, but got {learns[0]!r}; its gradients would "
                "disclose a row's label through other rows"
            )
        if server.response_shared or server.model.power or server.model.combine is not summed:
            raise ValueError(
                "Expected labels that stay at the server and a sum at the cut layer, but got another model"
            )
        rows = server.data.response.shape[-1]
        if not self.ledger.delta < 1 / rows:
            raise ValueError(
                f"Expected delta below one over the {rows} rows, but got {self.ledger.delta}: publishing one label "
                "would count as private"
            )
        return self._noised(server, half)

    def _noised(self, server: ServerNode, half: Half) -> Half:
        released: NoisedGradient | None = None

        def take(step: Send | Receive) -> Half:
            nonlocal released
            if isinstance(step, Receive):  # in every iteration values come before gradients, which belong to a sum
                released = None
            elif isinstance(step.message, Gradient):
                if released is None:
                    _check_distinct(server.batch)
                    size = server.data.total.to(step.message.gradient).reshape(-1, 1, 1, 1) if server.per_row else 1.0
                    released = NoisedGradient(self.release(step.message.gradient * size) / size)
                step = step._replace(message=released)
            return (yield step)

        return wrapped(half, take)

    def release(self, gradient: Tensor) -> Tensor:
        """Write a release into the ledger, clip gradients `(B, M, C, n)`, all of a row together, and add noise."""
        rows = gradient.to("cpu", torch.float64)
        norm = rows.flatten(0, 2).norm(dim=0)
        rows = torch.where(norm.isfinite(), rows * (self.clip / norm).clamp(max=1), 0.0)
        scale = torch.tensor(2 * self.clip * self._spending.release.noise, dtype=torch.float64)
        self._spending.spend(self.ledger.entries, None, _NOBODY)
        noise = self._spending.noise("gradients", scale.expand(rows.numel())).reshape(rows.shape)
        return on_grid(rows + noise, scale).to(gradient.device, gradient.dtype)


def noised_gradients(
    clip: float,
    noise: float,
    *,
    delta: float,
    budget: float | None = None,
    ledger: Path | str | None = None,
    entropy: Entropy | None = None,
) -> PrivateLabels:
    """Clip and noise a server's gradients row by row, with fresh noise in each step, and count every release.

    The result wraps a server's half, `noised_gradients(…)(server, half)`. A sum at the cut layer has one gradient for
    all parties, which is noised once: all of them receive the same numbers. A half with a journal
    (`fedtorch.sites.vertical`) repeats steps after a broken connection, with other noise; these are further releases.

    Args:
        clip: C, of a row's gradient times its weight (n/m in minibatches of m of n rows), before any division by the
            sum of weights.
        noise: z, in units of the sensitivity 2C.
        delta: δ of all ε, below one over the number of rows.
        budget: the largest ε: a step that would exceed it is refused, which ends the protocol at all nodes.
        ledger: a file that only grows, beside the labels; all runs on these labels share it. None keeps it in memory,
            for the halves that this one call's result is put around.
        entropy: source of the noise; default: the operating system's.

    Raises:
        ValueError: clip, noise, δ or budget out of range; or a file that is damaged, or of another claim or δ.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import privacy
        >>> from fedtorch.vfl.nodes import iteration
        >>> from fedtorch.vfl.model import likelihoods, split_nn
        >>> from fedtorch.protocol import halves as protocol
        >>> data = ft.vfl.VerticalData([torch.eye(2), torch.ones(2, 1)], torch.tensor([0.0, 1.0]))
        >>> bottoms = [split_nn.mlp(2, [], 1), split_nn.mlp(1, [], 1)]
        >>> network = ft.vfl.SplitNetwork(bottoms, likelihoods.bernoulli())
        >>> server, parties = network.nodes(data, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        >>> private = noised_gradients(clip=1.0, noise=4.0, delta=1e-3, budget=1.0, entropy=privacy.from_seed(0))
        >>> for _ in range(2):  # a step, and the same once more
        ...     steps = [iteration.Iteration()]
        ...     halves = {0: private(server, iteration.server_half(server, steps))}
        ...     halves |= {party.index: iteration.party_half(party, steps) for party in parties}
        ...     _ = protocol.together(halves)
        >>> private
        noised_gradients(clip=1, noise=4, epsilon=0.8941 at delta=0.001)
        >>> round(privacy.epsilon(noise=4.0, rounds=2, delta=1e-3), 4)
        0.8941
    """
    check_clip(clip)
    check_noise(noise)
    entropy = from_system() if entropy is None else entropy
    claim = Claim("label", ADJACENCY, ADVERSARY, SYSTEM if entropy.guarantees else NO_GUARANTEE)
    return PrivateLabels(float(clip), noise, Ledger(ledger, claim, delta, budget), entropy)


def _check_distinct(rows: Tensor | None) -> None:
    """Raise ValueError for a minibatch that has a row twice."""
    if rows is not None and len(rows.unique()) < len(rows):
        raise ValueError(
            f"Expected a minibatch of distinct rows, but got {len(rows)} of which {len(rows.unique())} differ: one "
            "label would change several gradients, which the noise is not made for; draw rows without replacement"
        )
