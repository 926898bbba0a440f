"""The draws of clients' own coefficients that a Gibbs sampler has kept."""

from __future__ import annotations

import warnings

import torch

from fedtorch import tree
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.sampler import Sampler, load_arviz
from fedtorch.inference.site_draws import PREFIX
from fedtorch.models.gibbs.kernels import LocalKernel, Responses

_MEASURED = 100  # numbers whose effective sizes are taken


class _Variables(dict[str, torch.Tensor]):
    """Variables of clients by name, which kernels read as attributes."""

    __getattr__ = dict.__getitem__


def kept_draws(run: Run, most: int) -> tuple[Responses, float]:
    """Return draws of all clients, `(clients, S, ...)`, and how many effective ones each is.

    Raises:
        TypeError: a kernel that is no regression, or one whose intercepts are integrated out.
        ValueError: no sampler that keeps draws of the clients' own variables.
    """
    local = run.algorithm.settings["local"]
    if not isinstance(local, LocalKernel) or local.responses is None:
        raise TypeError(
            "Expected a sampler of regressions with all their coefficients, such as sparse.regression() or "
            "logistic_regression(), but got another; add a column of ones to x in place of intercept=True"
        )
    for sampler in run.recorders:
        if isinstance(sampler, Sampler) and any(name.startswith(PREFIX) for name in sampler.moments):
            flat = {
                name.removeprefix(PREFIX): leaf for name, leaf in sampler.draws().items() if name.startswith(PREFIX)
            }
            break
    else:
        raise ValueError(
            "Expected draws of the clients' own coefficients, but got none: record the run with "
            "ft.Sampler(burn_in=…, watch=fedtorch.inference.site_draws.site_draws)"
        )
    chains, length = next(iter(flat.values())).shape[:2]
    if flat["theta"].shape[2] != len(run.population.names):
        raise ValueError(
            f"Expected draws of all {len(run.population.names)} clients, but got those of {flat['theta'].shape[2]}; "
            "take cohort=None"
        )
    step = -(-chains * length // most)
    joined = tree.map(lambda leaf: leaf[:, ::step].flatten(0, 1).transpose(0, 1), flat)  # (clients, S, ...)
    responses = local.responses(_Variables(joined))
    draws = responses.coefficients.shape[1]
    stack = flat["theta"].flatten(2)[..., :_MEASURED].numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what never moves has no size
        sizes = [float(load_arviz().ess(stack[..., i], method="mean")) for i in range(stack.shape[-1])]
    known = torch.tensor(sizes)[torch.tensor(sizes).isfinite()]
    efficiency = min(1.0, float(known.mean()) / draws) if len(known) else 1.0
    return responses, efficiency
