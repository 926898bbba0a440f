r"""FLTrust: messages are weighted by their similarity to that of a trusted client.

The trusted client, the first message :math:`x_0`, learns from rows that the server has collected itself. The others
are scaled to its length and averaged with the positive part of their cosine with it:

.. math:: \sum_i t_i \frac{\|x_0\|}{\|x_i\|} x_i \Big/ \sum_i t_i, \qquad
    t_i = \max\Big(0, \frac{\langle x_i, x_0\rangle}{\|x_i\| \|x_0\|}\Big).

Source: Cao, Fang, Liu and Gong (2021), "FLTrust: Byzantine-robust federated learning via trust bootstrapping",
Algorithm 2 and equation (4).

>>> import torch
>>> from fedtorch.federation.exchanges.robust.fltrust import fltrust
>>> messages = torch.tensor([[1.0, 0.0], [3.0, 0.0], [-50.0, 0.0]], dtype=torch.float64)
>>> fltrust(trusted=0).average(messages, torch.full((3,), 1 / 3, dtype=torch.float64))
tensor([1., 0.], dtype=torch.float64)
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtorch.federation.exchanges.robust.rules import Rule, by_inner_products, one_hot


def fltrust(trusted: int) -> Rule:
    """Build FLTrust, which takes the weights of the other clients as equal.

    Args:
        trusted: index of the client whose rows are the server's own; it must answer in every round.
    """
    return Rule("fltrust", by_inner_products(_trust), least=2, reference=trusted)


def _trust(products: Tensor, weights: Tensor) -> Tensor:
    """Return the coefficients; if no client is trusted, the reference alone."""
    lengths = products.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = torch.where(lengths > 0, lengths[..., :1] / lengths, 0.0)
    cosine = torch.where(lengths > 0, products[..., 0, :] / (lengths * lengths[..., :1]), 0.0)
    cosine = cosine.nan_to_num(0.0)  # if the reference has length zero
    trust = cosine.clamp(min=0).index_fill(-1, torch.tensor(0, device=cosine.device), 0.0)
    total = trust.sum(-1, keepdim=True)
    alone = one_hot(torch.zeros_like(total[..., 0], dtype=torch.int64), trust.shape[-1])
    return torch.where(total > 0, trust * scale / total.clamp(min=torch.finfo(torch.float64).tiny), alone)
