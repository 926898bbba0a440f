"""What the files in `experiments/configs` name: parts of the experiments as functions of plain values.

Where an experiment draws several things at once (rows, a network, the truth), a function here gives one of them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

import fedtorch as ft
from experiments import demo_statistics, resilience, robustness
from experiments.fedlin import (
    cmapss as fedlin_cmapss,
    selection as fedlin_selection,
    simulation as fedlin_simulation,
    student as fedlin_student,
)
from experiments.fedmgp import (
    battery as fedmgp_battery,
    extrapolation as fedmgp_extrapolation,
    faults as fedmgp_faults,
    models as fm,
    scale as fedmgp_scale,
)
from experiments.gtv import fmi as gtv_fmi, trust as gtv_trust
from experiments.sparse import common as sparse_common, directed as sparse_directed, network as sparse_network
from fedtorch.data import FederatedData
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.models.gibbs import LocalKernel, directed
from fedtorch.models.hierarchical import Model, shrinkage

Part = Literal["training", "validation"]


def engines(part: Part, sensor: int, engines: int) -> FederatedData:
    """Turbofan engines in the honest preparation of `fedlin_cmapss`."""
    return fedlin_cmapss.prepare(sensor, engines, leak=False)[part == "validation"]


def sparse_devices(case: str, seed: int) -> FederatedData:
    """Training rows of a case of `fedlin_selection`."""
    of_case, generator = fedlin_selection.CASES[case], torch.Generator().manual_seed(seed)
    truth = torch.tensor(of_case.coefficients, dtype=torch.float64).expand(len(of_case.rows), -1)
    return fedlin_selection.simulate(truth, of_case.rows, generator)


def clinics(count: int, seed: int) -> FederatedData:
    """Training rows of `demo_statistics`."""
    return demo_statistics.clinics(count, seed)[0]


def related_devices(case: str, devices: int, seed: int) -> FederatedData:
    """A case of `fedlin_simulation`."""
    return fedlin_simulation.case(case, devices, seed).data


def schools(subject: str, seed: int) -> FederatedData:
    """Training rows of `fedlin_student`."""
    return fedlin_student.prepare(subject, seed)[0]


def lasso(predictors: int) -> Model:
    """The hierarchical lasso of `fedlin_selection` and `fedlin_student`."""
    return shrinkage.penalised(shrinkage.lasso(predictors))


def extrapolated(seed: int) -> FederatedData:
    """Units of `fedmgp_extrapolation`, of which the first has lost a half."""
    kept = fedmgp_extrapolation.problem(seed)[0]
    return fm.federated(kept.x, kept.y)


def unstable(units: int, anomalous: int, seed: int) -> FederatedData:
    """Units of `fedmgp_faults`."""
    x, y, _, _ = fedmgp_faults.problem(units, anomalous, seed)
    return fm.federated(x, y)


def scaled(units: int, points: int, seed: int) -> FederatedData:
    """Units of one size of `fedmgp_scale`."""
    x, y, _, _ = fedmgp_scale.stacked(fm.signals(units, points + 200, (8, 10), seed), points)
    return fm.federated(list(x), list(y))


def cells(cell: int, fraction: float) -> FederatedData:
    """Cells of `fedmgp_battery`, one of which is observed up to a part of its cycles."""
    return fm.federated(*fedmgp_battery.observed(*fedmgp_battery.cells(), cell, fraction)[:2])


def battery_model(cell: int, fraction: float) -> ConvolvedGP:
    """FedMGP's model of `cells`: two processes, fifty inducing inputs, the pooled scale."""
    outputs = fedmgp_battery.observed(*fedmgp_battery.cells(), cell, fraction)[1]
    inducing = torch.linspace(0, 1, 50, dtype=fm.DTYPE)
    return fm.model(inducing, 2, None, fm.pooled_scale(outputs), fedmgp_battery.WEIGHT_SD)


def stations(part: Part, seed: int, stations: int | None = None) -> FederatedData:
    """Weather stations of `gtv_fmi`."""
    split = gtv_fmi.load(seed, stations)
    return split.training if part == "training" else split.validation


def nearest_stations(neighbours: int, seed: int, stations: int | None = None) -> ft.Network:
    """Their network by place."""
    return ft.Network.k_nearest(gtv_fmi.load(seed, stations).coordinates, neighbours)


def trusted_stations(part: Part, stations: int | None = None) -> FederatedData:
    """Stations of `gtv_trust`, without the minute."""
    given = gtv_trust.load(stations)
    return given.training if part == "training" else given.validation


def trusted_network(stations: int | None = None) -> ft.Network:
    """Their connected network."""
    return gtv_trust.load(stations).network


def failing_nodes(nodes: int, seed: int) -> FederatedData:
    """Nodes of `resilience`."""
    return resilience.problem(nodes, seed)[0]


def failing_network(nodes: int, seed: int) -> ft.Network:
    """Their network."""
    return resilience.problem(nodes, seed)[1]


def writers(clients: int, seed: int) -> FederatedData:
    """Clients of `robustness` with digits to train with."""
    return robustness.digits(clients, seed).training


def proteins() -> FederatedData:
    """Sites of `sparse_network`."""
    return sparse_common.standardised(ft.data.tcpa_brca_rppa(sparse_network.PROTEINS, dtype=torch.float64))


def protein_regressions(sweeps: int, chains: int) -> ft.Algorithm:
    """The algorithm of `sparse_network`."""
    return sparse_network.algorithm(sparse_common.Sizes(0, sweeps, chains), sparse_network.PROTEINS)


def genes() -> FederatedData:
    """Sites of `sparse_directed`, whose rows are the expression of its genes."""
    return sparse_common.standardised(
        ft.data.tcga_brca_expression(sparse_directed.GENES, minimum=30, dtype=torch.float64)
    )


def gene_regressions() -> LocalKernel:
    """The clients' half of the sampler of `sparse_directed`, for its genes."""
    return directed.regression(names=sparse_directed.GENES)


def zeros(size: int) -> Tensor:
    """A start of a chain, `(size,)`."""
    return torch.zeros(size)
