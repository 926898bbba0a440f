"""Nodes of a network with different kinds of models: their fits to own rows and neighbours' predictions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from fedtorch import functional, random, tree
from fedtorch.data import ClientData
from fedtorch.federation.algorithm import LocalSolver, Quadratic
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree

_LEAST = 1e-12  # least probability whose logarithm is taken


class Regressor(Protocol):
    """Fit and predict, as scikit-learn's regressors do."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Fit to rows with weights."""
        ...

    def predict(self, X: Any) -> Any:
        """Return predictions, `(rows,)`."""
        ...


class NodeRows(NamedTuple):
    """The data of a node's fit: its own rows, and its neighbours' predictions."""

    x: Tensor  # (m, d)
    y: Tensor  # (m,)
    shared: Tensor  # (m', d)
    targets: Tensor  # (m',) or (m', C): the neighbours' mean prediction
    pull: float  # αd_i of the neighbours that have answered, or zero


class Fit(NamedTuple):
    """Result of a node's fit."""

    kept: Tensor  # (size,) start of the next round's fit
    predictions: Tensor  # (m',) or (m', C) on the shared inputs
    loss: float


class Node(Protocol):
    """A node's model: how many numbers it keeps between rounds, its fit, and the fitted model itself."""

    size: int

    def fit(self, kept: Tensor | None, rows: NodeRows, turn: Turn | None) -> Fit:
        """Fit from the last round's numbers, None in the first round."""
        ...

    def model(self, kept: Tensor, rows: NodeRows) -> Any:
        """Return the fitted model."""
        ...


def node(make: Callable[[], Regressor] | LocalSolver, classes: int | None, repeats: int = 1) -> Node:
    """Return the node of a local solver, or of a function that makes a regressor."""
    return Descending(make, classes, repeats) if isinstance(make, LocalSolver) else Refitted(make, classes)


class Refitted:
    """Fit a new regressor or classifier in every round.

    Args:
        make: a new one.
        classes: their number; None for a regressor.
    """

    size = 0

    def __init__(self, make: Callable[[], Regressor], classes: int | None) -> None:
        self.make, self.classes = make, classes

    def fit(self, kept: Tensor | None, rows: NodeRows, turn: Turn | None) -> Fit:
        """Fit own rows with weights 1/m, and the shared inputs with αd/m'."""
        model = self.model(torch.zeros(0), rows)
        predictions = self._predictions(model, rows.shared.numpy())
        mine, y = self._predictions(model, rows.x.numpy()), rows.y.numpy()
        if self.classes is None:
            loss = np.square(y - mine).mean()
        else:
            loss = -np.log(mine[np.arange(len(y)), y.astype(int)].clip(_LEAST)).mean()
        return Fit(torch.zeros(0, dtype=torch.float64), torch.as_tensor(predictions), float(loss))

    def model(self, kept: Tensor, rows: NodeRows) -> Any:
        """Return the fitted regressor: Σ_j A_ij (h − h_j)² is Σ_j A_ij (h − their mean)², up to a constant."""
        model, x, y = self.make(), rows.x.numpy(), rows.y.numpy()
        weights = np.full(len(y), 1 / max(len(y), 1))
        if rows.pull == 0:
            model.fit(x, y, sample_weight=weights)
            return model
        shared, labels, theirs = self._labelled(rows)
        every = np.concatenate((weights, rows.pull / len(rows.shared) * theirs))
        model.fit(np.concatenate((x, shared)), np.concatenate((y, labels)), sample_weight=every)
        return model

    def _labelled(self, rows: NodeRows) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the shared inputs with labels and weights: a row for each class with positive probability."""
        shared, targets = rows.shared.numpy(), rows.targets.numpy()
        if self.classes is None:
            return shared, targets, np.ones(len(targets))
        which, labels = np.nonzero(targets > 0)
        return shared[which], labels.astype(rows.y.numpy().dtype), targets[which, labels]

    def _predictions(self, model: Any, x: NDArray[Any]) -> NDArray[Any]:
        if self.classes is None:
            predicted = np.asarray(model.predict(x))
            if predicted.shape not in ((len(x),), (len(x), 1)):
                raise ValueError(
                    f"Expected a prediction for each of {len(x)} rows, but {type(model).__name__}.predict gives shape "
                    f"{predicted.shape}; give all nodes models of one output, or classifiers with classes=C"
                )
            return predicted.reshape(len(x))
        probabilities = np.zeros((len(x), self.classes))
        probabilities[:, np.asarray(model.classes_).astype(int)] = model.predict_proba(x)
        return probabilities


class Descending:
    """Continue a node's training by a local solver, with a quadratic that majorises the coupling.

    Args:
        local: solver of the node's module.
        classes: number of logits in the output; None if the output is the prediction.
        repeats: calls a round.
    """

    def __init__(self, local: LocalSolver, classes: int | None, repeats: int) -> None:
        self.local, self.classes, self.repeats = local, classes, repeats
        self.template = (local.parameters, local.init(local.parameters))
        self.size = sum(leaf.numel() for leaf in tree.leaves(self.template))
        self.evaluated = copy.deepcopy(local.module).eval()
        self.dtype = next(iter(local.parameters.values())).dtype

    def fit(self, kept: Tensor | None, rows: NodeRows, turn: Turn | None) -> Fit:
        """Take the local solver's steps on own rows with the coupling's quadratic, `repeats` times."""
        assert turn is not None
        parameters, state = self._unpacked(kept)
        count = torch.tensor([len(rows.y)])
        data = self.local.prepare(ClientData((self._cast(rows.x)[None], self._cast(rows.y)[None]), count))
        steepest = self._steepest(parameters, state, rows) if rows.pull > 0 else None
        for repeat in range(self.repeats):
            quadratic = None if steepest is None else self._coupling(parameters, state, rows, steepest)
            start, inner = tree.expand((parameters, state), 1)
            again = turn.with_key(random.fold_in(turn.key, repeat))
            solved = self.local.solve(start, inner, data, quadratic, again)
            parameters, state = tree.map(lambda leaf: leaf[0], (solved.parameters, solved.state))
        with torch.no_grad():
            outputs = self._outputs(parameters, state, rows.shared)
        predictions = (outputs if self.classes is None else outputs.softmax(-1)).to(torch.float64)
        loss = solved.info.get("loss", torch.zeros(1))
        return Fit(self._packed(parameters, state), predictions, float(loss[0]))

    def model(self, kept: Tensor, rows: NodeRows) -> Any:
        """Return the module with the learnt parameters."""
        return functional.load(self.local.module, self.local.tensors(*self._unpacked(kept)))

    def _steepest(self, parameters: dict[str, Tensor], state: Tree, rows: NodeRows) -> Tensor:
        """Return a bound on the coupling's second derivatives, for outputs linear in the parameters, ()."""
        free, outputs = self._free(parameters, state, rows.shared)
        jacobian = torch.stack([_gradient(one, free) for one in outputs.reshape(-1)])
        bend = 2.0 if self.classes is None else 0.5  # second derivative of the square; bound for the cross-entropy
        return bend * rows.pull / len(rows.shared) * torch.linalg.eigvalsh(jacobian @ jacobian.T)[-1].clamp(min=0)

    def _coupling(self, parameters: dict[str, Tensor], state: Tree, rows: NodeRows, steepest: Tensor) -> Quadratic:
        """Return λ/2 ‖w − w₀‖² + ⟨g, w⟩ for the gradient g of the coupling at the parameters w₀."""
        free, outputs = self._free(parameters, state, rows.shared)
        targets = rows.targets.to(outputs.dtype)
        if self.classes is None:
            coupling = (outputs - targets).square().sum()
        else:
            coupling = -(targets * outputs.log_softmax(-1)).sum()
        gradient = _gradient(rows.pull / len(rows.shared) * coupling, free)
        pieces = gradient.split([leaf.numel() for leaf in parameters.values()])
        shift = {
            name: (steepest * leaf - piece.reshape(leaf.shape))[None]
            for (name, leaf), piece in zip(parameters.items(), pieces)
        }
        return Quadratic(steepest[None], shift)

    def _free(self, parameters: dict[str, Tensor], state: Tree, inputs: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return copies of the parameters, and the outputs on shared inputs as a function of them."""
        free = {name: leaf.detach().clone().requires_grad_() for name, leaf in parameters.items()}
        with torch.enable_grad():
            return free, self._outputs(free, state, inputs)

    def _outputs(self, parameters: dict[str, Tensor], state: Tree, inputs: Tensor) -> Tensor:
        tensors = self.local.tensors(parameters, state)
        outputs = functional_call(self.evaluated, tensors, (self._cast(inputs),))
        return outputs.squeeze(-1) if self.classes is None and outputs.ndim == 2 else outputs

    def _cast(self, leaf: Tensor) -> Tensor:
        return leaf.to(self.dtype) if leaf.is_floating_point() else leaf

    def _packed(self, parameters: Tree, state: Tree) -> Tensor:
        return torch.cat([leaf.reshape(-1).to(torch.float64) for leaf in tree.leaves((parameters, state))])

    def _unpacked(self, kept: Tensor | None) -> tuple[dict[str, Tensor], Any]:
        if kept is None:
            return self.template
        leaves = tree.leaves(self.template)
        pieces = kept[: self.size].split([leaf.numel() for leaf in leaves])
        filled: Any = tree.refill(
            self.template, [piece.reshape(leaf.shape).to(leaf.dtype) for piece, leaf in zip(pieces, leaves)]
        )
        return filled


def _gradient(value: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    """Return the derivatives of a number, `(P,)`."""
    parts = list(parameters.values())
    gradients = torch.autograd.grad(value, parts, retain_graph=True, allow_unused=True)
    filled = [torch.zeros_like(part) if each is None else each for each, part in zip(gradients, parts)]
    return torch.cat([each.reshape(-1) for each in filled])
