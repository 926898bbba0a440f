"""Differential privacy of single rows: DP-SGD on stacked clients.

*Who is protected:* one row of one client; two neighbouring data sets differ in one row whose gradients are zeros in one
of them (zero-out), so a client's number of rows is public. *From whom:* everybody, the server included, who sees a
client's messages; not from an adversary who sees which rows its steps draw, which come from the operating system's
entropy. Other values (losses) are not sent. All clients' rows have the same ε: all steps of all rounds are counted for
every client, an upper bound for those asked less often.

Source: Abadi et al. (2016), "Deep learning with differential privacy", Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from scipy.special import bdtrc
from torch import nn

from fedtorch import tree
from fedtorch.data import BadClients
from fedtorch.data.client_loaders import ClientLoaders
from fedtorch.federation.algorithm import LocalSolver
from fedtorch.federation.local_schedule import local_schedule
from fedtorch.federation.solvers.descent import Descent
from fedtorch.federation.solvers.objective import Loss, Objective, training_copy
from fedtorch.federation.solvers.prediction import predictor
from fedtorch.optimisers import MakeOptimizer
from fedtorch.random.entropy import Entropy, from_system
from fedtorch.tree import Tree
from fedtorch.trust.privacy._checks import check_clip, check_noise, check_rate, check_rounds
from fedtorch.trust.privacy.accounting.accountant import Release
from fedtorch.trust.privacy.accounting.ledger import NO_GUARANTEE, SYSTEM, Claim, Ledger
from fedtorch.trust.privacy.accounting.spending import Spending, one_process
from fedtorch.trust.privacy.examples._per_example import PrivateLoss
from fedtorch.trust.privacy.examples._refused import refuse_layers
from fedtorch.trust.privacy.examples._separable import check_separable, in_double, look_alone

ADJACENCY = "zero-out: one row of one client has gradients of zeros instead of its own, in all steps"
ADVERSARY = "everybody who sees what clients send, the server included, and not which rows their steps draw"
_LOOKED_AT = 8, 5  # rows of two clients in the trial: different from each other and from the number of clients


class PrivateDescent(Descent):
    """Steps of DP-SGD, whose module is tried example by example instead of stacked.

    Args:
        module: the module to train.
        steps: in each round.
        rounds: planned number of rounds.
        criterion: (output, target) -> mean loss.
        make: parameters -> optimiser.
        reset: whether its moments restart each round.
        project: applied after every step.
        ignore_hooks: of the module.
        private: (objective, names of trained tensors) -> loss.
    """

    loss: PrivateLoss

    def __init__(
        self,
        module: nn.Module,
        steps: int,
        rounds: int | None,
        criterion: Loss | None,
        make: MakeOptimizer | None,
        reset: str,
        project: Callable[[Tree], Tree] | None,
        ignore_hooks: Sequence[str],
        private: Callable[[Objective, Sequence[str]], PrivateLoss],
    ) -> None:
        if isinstance(module, nn.Module):
            refuse_layers(module)  # before the copy, which some spectral norms do not allow
        super().__init__(
            module, None, steps, rounds, None, criterion, make, reset, "refuse", True, False, None, "32", project,
            ignore_hooks, rowwise=True,
        )  # fmt: skip
        self.loss, self._criterion, self._ignored = private(self.objective, self.trained), criterion, ignore_hooks

    def _learn(self, data: Any) -> None:
        """Try with the largest and smallest clients whether the module can train example by example."""
        if len(data.count) == 0 or self.loss.checked:
            return
        self.move(data.count.device)
        order = data.count.argsort(stable=True)
        rows = [
            tree.map(lambda leaf, k=k, most=most: leaf[k, : min(most, int(data.count[k]))], data.batch)
            for k, most in zip((int(order[-1]), int(order[0])), _LOOKED_AT)
        ]
        values = {name: tensor.to(data.count.device) for name, tensor in self.parameters.items()}
        look_alone(self.loss, values, rows[0])
        self.loss.observed = True
        double = in_double(self.loss, training_copy(self.module, self._ignored), self._criterion)
        check_separable(self.loss, double, values, rows)


class Cut(NamedTuple):
    """Limit on the rows of a batch, so that a step never needs more memory than planned.

    A batch that would be larger keeps a random part of its rows. That is accounted for in δ: with n rows a batch is cut
    with the probability τ = P(Binomial(n, q) > batch), see `fedtorch.trust.privacy.accounting.accountant`.

    Example:
        >>> Cut(batch=2, rows=3).excess(sampling_rate=0.5)  # all three rows are drawn in one of eight batches
        0.125
    """

    batch: int  # rows of a client in a step
    rows: int  # the most that any client has, n

    def excess(self, sampling_rate: float) -> float:
        """Return τ, with which a step's batch is cut."""
        return 0.0 if self.rows <= self.batch else float(bdtrc(self.batch, self.rows, sampling_rate))


def example_level(
    module: nn.Module,
    *,
    clip: float,
    noise: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    reset: Literal["round", "never"] = "round",
    budget: float | None = None,
    ledger: Path | str | None = None,
    entropy: Entropy | None = None,
    ghost: bool = False,
    cut: Cut | None = None,
    rounds: int | None = None,
    project: Callable[[Tree], Tree] | None = None,
    ignore_hooks: Sequence[str] = (),
) -> LocalSolver:
    """Build a local solver that trains `module` by DP-SGD, for any algorithm whose clients solve once a round.

    Layers are torch's own, recurrent ones and their cells included. Layers that mix examples are refused by name.
    Optimiser, schedule, `reset`, `rounds`, `project` and `ignore_hooks` are those of `ft.gradient_descent`.

    Args:
        module: an unmodified LightningModule, or an `nn.Module` with `loss` and `optimizer`.
        clip: the bound C on the Euclidean norm of an example's gradient.
        noise: z, so that the sum of a step's clipped gradients has noise of z·C.
        sampling_rate: q, with which every step draws each of a client's rows, independently and in secret. Sums are
            divided by q times the client's rows. In the history of a seeded simulation `train_loss` is the mean over
            the steps that drew rows.
        steps: in each round.
        delta: δ of all ε, below one over any client's rows.
        loss: (output, target) -> mean loss of a batch.
        optimizer: parameters -> optimiser.
        reset: whether the optimiser's moments restart each round.
        budget: the largest ε: a run ends before the round that would exceed it.
        ledger: a file that only grows; None keeps it in memory.
        entropy: source of noise and batches; default: the operating system's. `from_seed(0)` makes a simulation
            reproducible for the same blocks of clients, and guarantees nothing, as its ledger states.
        ghost: whether modules of linear layers and convolutions are trained without forming examples' gradients: on a
            network of two layers 2.5 times as fast with batches of 16, 35 times with 256, in less memory. A step whose
            loss depends on a weight other than by one call of its layer (a penalty, a second call) uses ghost=False,
            and so do all later ones; a warning is logged.
        cut: the largest batch of a client; None has no limit, and adds nothing to δ.
        rounds: planned number of rounds, for schedules that need it.
        project: applied to the stacked parameters after every step.
        ignore_hooks: overridden Lightning hooks that training does not depend on.

    Raises:
        ValueError: settings out of range, or a layer that mixes examples (BatchNorm) or changes its state; when the
            data are first seen, a loss that is not the mean of its examples', or a δ of one over a client's rows or
            more.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import privacy
        >>> local = privacy.example_level(
        ...     torch.nn.Linear(10, 1), clip=1.0, noise=1.0, sampling_rate=0.1, steps=5, delta=1e-3,
        ...     loss=lambda output, target: torch.nn.functional.mse_loss(output[:, 0], target),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=4, seed=0)
        >>> run = ft.run(ft.fedavg(local), ft.InProcess(data), rounds=3)
        >>> float(run.history["epsilon"].iloc[-1].round(2))
        1.87
        >>> round(privacy.epsilon(noise=1.0, sampling_rate=0.1, rounds=15, delta=1e-3), 2)
        1.87
    """
    check_clip(clip)
    check_noise(noise)
    check_rate(sampling_rate)
    check_rounds(steps)
    if cut is not None and not (cut.batch >= 1 and cut.rows >= 1):
        raise ValueError(f"Expected a cut at a batch of at least 1, of at least 1 rows, but got {cut}")
    excess = 0.0 if cut is None else cut.excess(sampling_rate)
    entropy = from_system() if entropy is None else entropy
    claim = Claim("example", ADJACENCY, ADVERSARY, SYSTEM if entropy.guarantees else NO_GUARANTEE)
    account = Ledger(ledger, claim, delta, budget)
    spending = Spending(
        account, Release(float(noise), float(sampling_rate), excess=excess), steps, entropy, one_process
    )
    private = lambda objective, trained: PrivateLoss(
        objective, trained, clip, sampling_rate, spending, ghost, cut and cut.batch
    )
    descent = PrivateDescent(module, steps, rounds, loss, optimizer, reset, project, ignore_hooks, private)
    if unreal := [name for name in descent.trained if descent.parameters[name].is_complex()]:
        raise TypeError(
            f"Expected real parameters for gradients of single rows, but got {descent.parameters[unreal[0]].dtype} in "
            f"{unreal[0]!r}; keep its real and imaginary parts as one real parameter (..., 2), and take "
            "torch.view_as_complex of it in forward"
        )
    about = {
        "clip": clip,
        "noise": noise,
        "sampling_rate": sampling_rate,
        "steps": steps,
        "delta": delta,
        "reset": reset,
        "cut": cut,
    }
    return LocalSolver(
        solve=descent.solve,
        parameters=descent.parameters,
        init=descent.init,
        predict=predictor(descent.module),
        tensors=descent.tensors,
        prepare=partial(_prepare, descent, delta, cut),
        module=descent.module,
        settings={
            "solver": "example_level",
            "module": type(module),
            "loss": loss,
            **descent.optimizer_settings,
            **about,
        },
        budget=spending,
        schedule=local_schedule(descent.configured, torch.ones_like, None, steps, rounds, takes_limit=False),
    )


def _prepare(descent: PrivateDescent, delta: float, cut: Cut | None, data: Any) -> Any:
    """Return the data, after checks that single rows can be protected."""
    if isinstance(data, ClientLoaders):
        return data.batch  # raises an error with the remedy
    descent.prepare(data)
    small = (data.count * delta >= 1).nonzero()[:, 0].cpu()
    if len(small):
        raise BadClients(
            small,
            f"expected delta below one over its {int(data.count[small[0]])} rows, but got {delta}: publishing one of "
            "them whole would count as private",
        )
    large = (data.count > (torch.inf if cut is None else cut.rows)).nonzero()[:, 0].cpu()
    if len(large):
        raise BadClients(large, f"expected at most the rows of {cut}, but got {int(data.count[large[0]])}")
    return data
