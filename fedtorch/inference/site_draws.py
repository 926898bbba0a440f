"""What a sampler watches so that its clients' predictions can be criticised.

>>> import torch, fedtorch as ft
>>> from fedtorch.inference.site_draws import site_draws
>>> from fedtorch.models.gibbs import sparse
>>> x = ft.random.normal(ft.random.key(0), (2, 50, 3), torch.float64)
>>> data = ft.data.from_tensors([(x[k], x[k, :, 0]) for k in range(2)])
>>> algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=5, chains=2)
>>> sampler = ft.Sampler(burn_in=20, watch=site_draws)
>>> run = ft.run(algorithm, ft.InProcess(data), torch.zeros(3), rounds=70, record=sampler)
>>> sampler.draws()["site.theta"].shape  # chains, draws, clients, coefficients
torch.Size([2, 50, 2, 3])
>>> ft.inference.loo(run).left_out
100
"""

from __future__ import annotations

from torch import Tensor

from fedtorch.federation.runs.sampler import global_variables
from fedtorch.history import Round

PREFIX = "site."
_KEPT = ("theta", "noise", "intercept")


def site_draws(round: Round) -> dict[str, Tensor]:
    """Return the server's variables, and the clients' own coefficients and noise, `(C, clients, ...)`.

    Clients' own variables leave them: for clients of one process or its ranks, all of which take part in every round.

    Raises:
        ValueError: a round without some of the clients, or clients at sites, which keep their variables.
    """
    if len(round.ids) < len(round.asked) or (len(round.ids) and int(round.ids[-1]) != len(round.ids) - 1):
        raise ValueError(
            f"Expected all clients in every round whose draws are kept, but got {len(round.ids)} in round "
            f"{round.number}; take cohort=None and no faults"
        )
    own = round.clients.tensors(round.server.variables, round.ids)
    found = {f"{PREFIX}{name}": getattr(own, name).transpose(0, 1) for name in _KEPT if hasattr(own, name)}
    return {**global_variables(round), **found}
