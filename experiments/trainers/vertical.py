"""Hierarchical Bayes split networks under a Trainer: each of a stack keeps the weights of its best validation epoch.

Two parties have other columns of the same rows. Four networks of other first weights are trained at once, of which two
are plain ones. A network is a LightningModule itself, and takes `ft.vfl.VerticalLoader`s. `--gpu` has a hundred
thousand rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import fedtorch as ft
from experiments.trainers.training import Script, Size, Training, command

COLUMNS = (6, 4)
SIZES = {"smoke": Size(2, 60, 3), "cpu": Size(2, 1000, 100), "gpu": Size(2, 100_000, 100)}  # rows of both parties


def rows_of(size: Size, number: int) -> ft.vfl.VerticalData:
    """Aligned rows: who is ill depends on a product of the parties' columns."""
    keys = ft.random.fold_in(ft.random.key(number), torch.arange(3))
    first, second = (ft.random.normal(key, (size.rows, width)) for key, width in zip(keys, COLUMNS))
    odds = first[:, 0].abs() + second[:, 0].abs() + first[:, 1] + second[:, 1] - 1.5
    ill = (ft.random.uniform(keys[2], (size.rows,)) < (3 * odds).sigmoid()).float()
    return ft.vfl.VerticalData((first, second), ill)


def make(size: Size, device: str) -> Training:
    """A stack of networks with the loaders that it is trained and validated by; a Trainer brings both to its device."""
    network = ft.vfl.SplitNetwork(
        [ft.vfl.mlp(width) for width in COLUMNS],
        ft.vfl.likelihoods.bernoulli(),
        seed=range(4),
        names=["clinic", "laboratory"],
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        bayes=ft.vfl.HierarchicalBayes(rho=torch.tensor([0.0, 0.0, 1.0, 1.0])),
    )
    train = ft.vfl.VerticalLoader(rows_of(size, 1), batch_size=size.rows // 4)
    validation = ft.vfl.VerticalLoader(rows_of(size, 2))
    return Training(network, ft.vfl.StackedEarlyStopping(patience=5), train=train, validation=validation)


def found(network: ft.vfl.SplitNetwork) -> Mapping[str, float]:
    """The accuracy of plain and of hierarchical networks on further rows."""
    network.eval()
    test = rows_of(Size(2, 2000, 1), 3).to(network.device)
    right = ((network.predict(test) > 0.5) == test.response.bool()).double().mean(1)
    return {"accuracy, plain": float(right[:2].mean()), "accuracy, hierarchical": float(right[2:].mean())}


SCRIPT = Script("trainers.vertical", SIZES, make, found)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, cut off, go on; or measure on a device."""
    command(SCRIPT, __doc__, argv)


if __name__ == "__main__":
    main()
