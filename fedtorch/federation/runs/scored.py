"""Scores and predictions of a run's clients: by metrics, or by the module's own evaluation steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedtorch import expected, random, tree
from fedtorch.data import BadClients, FederatedData
from fedtorch.expected import loaded
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.populations.population import Clients, Population
from fedtorch.federation.runs.evaluation import (
    ClientBatches,
    Evaluable,
    Newcomers,
    Split,
    evaluate,
    evaluate_batches,
    inputs_and_targets,
)
from fedtorch.random.named import numbers
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from fedtorch.data import FederatedLoaders
    from fedtorch.federation.runs.diagnosis import Diagnosis
    from fedtorch.federation.runs.own_steps import OwnSteps
    from fedtorch.metrics.scores import Score

_TOGETHER = 64  # clients whose tensors are fetched together
_NAMED = 3  # clients in a message
_KEY = -1  # key of the draws in evaluation; those of rounds are the numbers of rounds


class Scored:
    """The part of a `Run` that scores its clients' models and predicts with them."""

    algorithm: Algorithm
    population: Population
    clients: Clients
    number: int
    seed: int
    _newcomers: Newcomers
    _warned = False  # about scores without noise

    @property
    def outbox(self) -> Tree:
        """Return the server's current broadcast."""
        raise NotImplementedError

    def evaluate(
        self,
        data: Evaluable,
        metrics: Mapping[str, Any] | None = None,
        split: Split = inputs_and_targets,
        unseen: bool = False,
        *,
        stage: Literal["validate", "test"] = "validate",
        batch_size: int | None = None,
        trainer: Any = None,
    ) -> dict[str, Score]:
        """Return scores of every client's model on its rows of `data`; see `ft.metrics`.

        Without `metrics` they are the logs of the LightningModule's own `validation_step` or `test_step`, and of the
        hooks around it, such as `on_validation_epoch_end`; for a client, a Trainer's report on its batches. Over all
        clients numbers are reduced over all batches, and metrics are those of all rows, not the clients' means.

        Scores have no noise, even for a private algorithm: its ε covers training and not these scores. Publish scores
        of rows that need no protection, or count them as disclosed. Scores of the rows in memory that a private run
        trains on warn once.

        Args:
            data: rows of the run's clients; or their loaders, which define the batches.
            metrics: by name: torchmetrics, `MetricCollection`s, `ft.metrics`, a loss such as
                `torch.nn.functional.mse_loss`, or a function. A function is called with one client's own predictions
                and targets, `(N, ...)` without padding, like `loss=`. It returns a value per row, `(N,)`, whose mean is
                taken over a client's rows and over all rows; or one number or a tree of tensors for a client's rows,
                and, for all clients, for their rows one after the other.
            split: rows -> (inputs, targets), for `metrics`. Inputs that are a dict are arguments of the module's
                `forward` by name; targets that are a dict are those of a torchmetrics metric's `update`.
            unseen: whether `data` are the rows of other clients, which start like the run's did.
            stage: without `metrics`, the step whose logs are returned: that of "validate" or of "test".
            batch_size: rows of a client in one evaluation batch; default: all of them.
            trainer: `self.trainer` in the module's own steps; default: one with the number of finished rounds.

        Raises:
            ValueError: no metrics, and a module without such a step; or another stage.
        """
        if stage not in ("validate", "test"):
            raise ValueError(f"Expected stage='validate' or 'test', but got {stage!r}; run.predict(data) predicts")
        _check_order(data, self.population.names, unseen)
        self._warn_of_training_rows(data)
        if metrics is None:
            step = "validation" if stage == "validate" else stage
            return _own(self, step, trainer).scores(partial(client_batches, self, data, unseen, batch_size))
        if self.algorithm.predict is None:
            raise ValueError("Expected an algorithm that predicts, but got one without `predict`; see its own results")
        if _has_loaders(data):
            each = client_batches(self, data, unseen, batch_size)
            return evaluate_batches(each, self.algorithm.predict, metrics, split)
        clients = self._newcomers if unseen else self.clients
        return evaluate(clients, self.outbox, self.algorithm.predict, data, metrics, split, batch_size)

    def diagnosis(
        self,
        validation: Evaluable,
        error: Any,
        *,
        reference: float | None = None,
        training: Evaluable | None = None,
        much: float = 1.5,
    ) -> Diagnosis:
        """Return a verdict in words: whether the clients' models overfit or underfit.

        The result has `training`, `validation`, `reference` and `verdict`, and prints as the verdict.

        Args:
            validation: rows of the run's clients outside training.
            error: a metric as for `evaluate`, of which less is better, at least 0.
            reference: the error that can be reached: of a probabilistic model, another method or people.
            training: the rows of training; default: those of the population, if they are in this process.
            much: the factor from which an error counts as much larger than another.

        Raises:
            ValueError: no rows of training here, a metric of which more is better, or errors below 0 or not finite.

        Source: Jung, "Federated learning: from theory to practice", section 2.5.

        Example:
            >>> import torch, fedtorch as ft
            >>> rows = lambda *y: ft.data.from_tensors([(torch.eye(2), torch.tensor(y))])
            >>> local = ft.least_squares(torch.nn.Linear(2, 1, bias=False))  # as many parameters as rows
            >>> run = ft.run(ft.pooled(local), ft.InProcess(rows(1.0, -1.0)), rounds=1)
            >>> print(run.diagnosis(rows(0.0, 0.5), torch.nn.functional.mse_loss).verdict[:9])
            overfits:
        """
        from fedtorch.federation.runs.diagnosis import diagnosis

        training = getattr(self.population, "data", None) if training is None else training
        if training is None:
            raise ValueError("Expected the rows of training, which are not in this process; pass training=")
        first, second = (self.evaluate(rows, {"error": error})["error"] for rows in (training, validation))
        if first.largest_is_best:
            raise ValueError("Expected an error, of which less is better, but got a metric of which more is better")
        return diagnosis(float(first.overall), float(second.overall), reference, much)

    def _warn_of_training_rows(self, data: Evaluable) -> None:
        """Warn once of a private run where the rows that it trains on are scored."""
        if self.algorithm.budget is None or self._warned or not isinstance(data, FederatedData) or data.on_disk:
            return
        from fedtorch.data.digests import different, noted

        trained, names = self.population.noted(), self.population.names
        if "digests" in trained and different(trained, noted(data), names) is None:
            self._warned = True
            warnings.warn(
                "These are scores of the rows that a private run trains on. They have no noise, and the run's epsilon "
                "does not count them: keep them, or publish scores of other rows",
                stacklevel=3,
            )

    def predict(
        self,
        data: Evaluable,
        split: Callable[[Tree], tuple[Tree, Any]] | None = None,
        unseen: bool = False,
        *,
        clients: Sequence[int] | None = None,
        batch_size: int | None = None,
        trainer: Any = None,
    ) -> dict[str, list[Any]]:
        """Return the predictions of every client's model for its rows of `data`: by client, an output for each batch.

        The outputs are those of the LightningModule's own `predict_step`. A module without one is called on the inputs
        of `split`; by default they are the first of rows `(inputs, targets)`, and rows of other forms unchanged.

        Args:
            data: rows of the run's clients.
            split: rows -> (inputs, targets), for a module without `predict_step`.
            unseen: whether `data` are the rows of other clients.
            clients: indices of the clients; default: all.
            batch_size: rows that are predicted at once; default: all of a client's.
            trainer: as in `evaluate`.

        Example:
            >>> import torch, fedtorch as ft
            >>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor(y)) for y in ([1.0, 2.0], [3.0, 4.0])])
            >>> algorithm = ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1, bias=False)))
            >>> run = ft.run(algorithm, ft.InProcess(data), rounds=1)
            >>> [batch.shape for batch in run.predict(data, batch_size=1)["0"]]
            [torch.Size([1, 1]), torch.Size([1, 1])]
        """
        _check_order(data, self.population.names, unseen)
        outputs = predictor_of(self, split, trainer)
        return {each.name: outputs(each) for each in client_batches(self, data, unseen, batch_size, clients)}


def predictor_of(
    run: Scored, split: Callable[[Tree], tuple[Tree, Any]] | None, trainer: Any
) -> Callable[[ClientBatches], list[Any]]:
    """Return the function that predicts for a client: the outputs of its batches; see `Scored.predict`."""
    from fedtorch.federation.runs.own_steps import has_step

    if has_step(run.algorithm.module, "predict"):
        return _own(run, "predict", trainer).outputs
    predict, device = run.algorithm.predict, run.population.device
    if predict is None:
        raise ValueError("Expected an algorithm that predicts, but got one without `predict`; see its own results")

    def outputs(client: ClientBatches) -> list[Any]:
        tensors = tree.map(lambda leaf: leaf[None], client.tensors)
        every = []
        for batch, _ in client.batches:
            inputs = _inputs(batch) if split is None else split(batch)[0]
            with torch.inference_mode(False), torch.no_grad():
                stacked = predict(tensors, tree.map(lambda leaf: leaf.to(device)[None], inputs))
            every.append(tree.map(lambda leaf: leaf[0].cpu(), stacked))
        return every

    return outputs


def client_batches(
    run: Scored,
    data: Evaluable,
    unseen: bool = False,
    batch_size: int | None = None,
    some: Sequence[int] | None = None,
) -> Iterator[ClientBatches]:
    """Yield clients for evaluation, with their tensors and their rows of `data` in batches.

    Raises:
        ValueError: the rows are not those of the run's clients.
    """
    if not _has_loaders(data):
        expected.kind(
            data, FederatedData, "FederatedData to evaluate on", "make it with ft.data.from_tensors([(x, y), …])"
        )
    names = run.population.names
    if not unseen and len(data) != len(names) > 1:
        raise ValueError(
            f"Expected data of the population's {len(names)} clients, but got {len(data)}; split the data of the "
            "same clients, or pass unseen=True for others, such as all rows as one client"
        )
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"Expected batch_size of at least 1, but got {batch_size}")
    if not int(data.counts.sum()):
        raise ValueError(
            "Expected rows to evaluate on, but got none; where they are at sites, pass metrics= that the sites offer"
        )
    if batch_size is not None and _has_loaders(data):
        raise ValueError(f"Expected batch_size=None for clients with loaders, which have theirs, but got {batch_size}")
    keys = random.fold_in(random.fold_in(random.key(run.seed), _KEY), numbers(tuple(data.names)))
    for ids in torch.arange(len(data))[slice(None) if some is None else list(some)].split(_TOGETHER):
        tensors, seeds = _models(run, ids, unseen), keys[ids].tolist()
        for row, (client, seed) in enumerate(zip(ids.tolist(), seeds)):
            model = tree.map(lambda leaf, row=row: leaf[row], tensors)
            batches = _loaded(data, client, seed) if _has_loaders(data) else _batches(data[client], batch_size)
            yield ClientBatches(client, data.names[client], seed, model, batches)


def _has_loaders(data: Evaluable) -> TypeIs[FederatedLoaders]:
    return isinstance(data, loaded("fedtorch.data.loaders", "FederatedLoaders"))


def _check_order(data: Evaluable, names: Sequence[str], unseen: bool) -> None:
    """Raise ValueError for the population's clients in another order, for models and rows are paired by number."""
    theirs = getattr(data, "names", names)
    if not unseen and tuple(theirs) != tuple(names) and sorted(theirs) == sorted(names):
        raise ValueError(
            f"Expected data of the population's clients in its order, {', '.join(names[:_NAMED])}, …, but got "
            f"{', '.join(theirs[:_NAMED])}, …; put them in this order, as data.select does"
        )


def _own(run: Scored, step: str, trainer: Any) -> OwnSteps:
    """Return the evaluation by the module's own steps."""
    from fedtorch.federation.runs.own_steps import AloneTrainer, OwnSteps, has_step

    module = run.algorithm.module
    if not has_step(module, step):
        raise ValueError(
            f"Expected at least one metric, or a LightningModule with a {step}_step, but got "
            f"{'no module' if module is None else type(module).__name__} without metrics; pass "
            "metrics={'accuracy': ft.metrics.accuracy()}"
        )
    assert module is not None
    return OwnSteps(module, step, run.population.device, trainer or AloneTrainer(run.number))


def _models(run: Scored, ids: Tensor, unseen: bool) -> Tree:
    """Return the tensors that clients predict with, `(M, ...)`."""
    if unseen:
        return run._newcomers.tensors(run.outbox, ids)
    if len(run.population.names) > 1:
        return run.clients.tensors(run.outbox, ids)
    one = run.clients.tensors(run.outbox, torch.zeros(1, dtype=torch.int64))
    return tree.map(lambda leaf: leaf.expand(len(ids), *leaf.shape[1:]), one)


def _batches(rows: Tree, size: int | None) -> Iterator[tuple[Tree, int]]:
    """Yield a client's rows in order, in batches, with their numbers of rows."""
    total = len(tree.leaves(rows)[0])
    step = size or max(total, 1)
    for start in range(0, total, step):
        yield tree.take(rows, slice(start, start + step)), min(step, total - start)


def _loaded(data: FederatedLoaders, client: int, seed: int) -> Iterator[tuple[Any, int]]:
    """Yield the batches of a client's loader, with their number of rows as Lightning counts them.

    Raises:
        ValueError: the loader fails; the message names the client.
    """
    from lightning.pytorch.utilities.data import extract_batch_size

    try:
        for batch in data.batches(client, seed):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about tensors with different numbers of rows
                try:
                    rows = extract_batch_size(batch)
                except Exception:  # batches of objects, or without a tensor
                    rows = 1
            yield batch, rows
    except BadClients as error:
        raise ValueError(f"Client {data.names[client]!r}: {error}") from error


def _inputs(rows: Tree) -> Any:
    return rows[0] if isinstance(rows, (tuple, list)) and len(rows) == 2 else rows
