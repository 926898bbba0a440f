"""GTV minimisation of regressors: linear ones against the dense solution, trees, every population, refusals."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeRegressor
from support.algorithm_cases import CLIENTS, Case
from support.oracles.closed_forms import NUMBERS, ROUNDING, copy_of, distance, same_bits
from support.oracles.gtv_problems import bare_linear_clients, weighted_network
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.algorithms.regressors import fitted, gtv_regressors

SIZES = [7, 4, 9, 5, 12]
N = len(SIZES)
ALPHA = 0.2
DATA, NETWORK = bare_linear_clients(SIZES), weighted_network(N)
INPUTS = torch.randn(10, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def lines() -> LinearRegression:
    return LinearRegression(fit_intercept=False)


def trees() -> DecisionTreeRegressor:
    return DecisionTreeRegressor(max_depth=3, random_state=0)


def dense_lines() -> Tensor:
    """The minimiser where h_i(x) = w_i'x: the differences count in the metric of the shared inputs, with α."""
    blocks = torch.block_diag(*[x.T @ x / len(x) for x, _ in DATA])
    right = torch.cat([x.T @ y / len(x) for x, y in DATA])
    metric = INPUTS.T @ INPUTS / len(INPUTS)
    matrix = blocks + ALPHA * torch.kron(NETWORK.laplacian().to_dense(), metric)
    return torch.linalg.solve(matrix, right).reshape(N, 3)


@pytest.mark.parametrize(
    ("chunk", "cohort"), [(None, None), (None, 2), (1, None), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_linear_regressors_reach_the_dense_solution(cohort: int | None, chunk: int | None) -> None:
    algorithm = gtv_regressors(lines, NETWORK, ALPHA, INPUTS)
    rounds = 60 if cohort is None else 160
    run = ft.run(algorithm, ft.InProcess(DATA, chunk), {}, cohort=cohort, rounds=rounds)
    coefficients = torch.stack([torch.as_tensor(model.coef_) for model in fitted(run)])
    assert distance(coefficients, dense_lines()) < 1e-8  # it contracts by a third a round


def test_messages_lost_and_late_on_single_edges_end_at_the_normal_equations_too() -> None:
    """Nodes that have not been heard do not count, and what is late is made good; inputs are each node's own copy."""
    algorithm = gtv_regressors(lines, NETWORK, ALPHA, INPUTS.expand(N, -1, -1))
    run = ft.run(algorithm | ft.unreliable_edges(NETWORK, loss=0.3, delay=2), ft.InProcess(DATA), {}, rounds=100)
    coefficients = torch.stack([torch.as_tensor(model.coef_) for model in fitted(run)])
    assert distance(coefficients, dense_lines()) < 1e-8


def test_trees_in_every_chunk_and_with_messages_twice() -> None:
    algorithm = gtv_regressors(trees, NETWORK, ALPHA, INPUTS)
    runs = [
        ft.run(algorithm, ft.InProcess(DATA, chunk), {}, cohort=3, faults=faults, rounds=5).last
        for chunk, faults in ((None, None), (1, None), (None, ft.duplicated()))
    ]
    for other in runs[1:]:
        assert distance(other.server, runs[0].server) < ROUNDING


def test_neighbours_draw_trees_together() -> None:
    def spread(alpha: float) -> float:
        algorithm = gtv_regressors(trees, NETWORK, alpha, INPUTS)
        found = ft.run(algorithm, ft.InProcess(DATA), {}, rounds=15).last
        predictions = found.clients.table.read(slice(0, N)).told.predictions
        return float((predictions - predictions.mean(0)).square().mean())

    assert spread(10.0) < spread(0.5) / 2 < spread(0.0) / 4


def test_sums_are_kept_and_lost_messages_leave_no_trace() -> None:
    algorithm = gtv_regressors(trees, NETWORK, ALPHA, INPUTS)
    faults = ft.lost_messages(before=0.2, after=0.3)
    before = None
    for done in ft.Run(algorithm, ft.InProcess(DATA), {}, faults=faults).rounds(6):
        states = copy_of(done.clients.table.read(slice(0, N)))
        dense = NETWORK.adjacency().to_dense()
        assert distance(done.server.total.predictions, dense @ states.told.predictions) < ROUNDING
        assert distance(done.server.total.weight, dense @ states.told.weight) < ROUNDING
        silent = torch.tensor([k for k in range(N) if k not in done.ids.tolist()], dtype=torch.int64)
        if before is not None:
            assert same_bits(ft.tree.take(before, silent), ft.tree.take(states, silent))
        before = states


def test_the_first_fit_is_alone() -> None:
    algorithm = gtv_regressors(lines, NETWORK, ALPHA, INPUTS)
    found = ft.Run(algorithm, ft.InProcess(DATA), {}).step()
    own = torch.stack([INPUTS @ torch.linalg.lstsq(x, y).solution for x, y in DATA])
    assert distance(found.clients.table.read(slice(0, N)).told.predictions, own) < 1e-10  # two solvers


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected alpha of at least 0"):
        gtv_regressors(lines, NETWORK, -1.0, INPUTS)
    with pytest.raises(ValueError, match="Expected shared inputs"):
        gtv_regressors(lines, NETWORK, 1.0, INPUTS[0])
    with pytest.raises(ValueError, match=r"Expected rows \(x, y\) of shapes \(2,\) and \(\)"):
        ft.Run(gtv_regressors(lines, NETWORK, 1.0, INPUTS[:, :2]), ft.InProcess(DATA), {}).step()
    with pytest.raises(ValueError, match="as many nodes as there are clients, 5, but got 4"):
        ft.Run(gtv_regressors(lines, weighted_network(4), 1.0, INPUTS), ft.InProcess(DATA), {}).step()
    x, y = DATA.rows
    holes = ft.data.FederatedData((x, y), torch.tensor([11, 0, 9, 5, 12]), allow_empty=True)
    with pytest.raises(ValueError, match="Client '1': expected rows to fit, but got none"):
        ft.Run(gtv_regressors(lines, NETWORK, 1.0, INPUTS), ft.InProcess(holes), {}).step()


CASES: dict[str, Case] = {
    "gtv_regressors": Case(
        lambda: ft.gtv_regressors(LinearRegression, ft.Network.ring(CLIENTS), 0.5, torch.eye(3, dtype=NUMBERS.get())),
        start={},
        waits=7,  # scikit-learn's arguments: rows x and y, what neighbours say, their weights, counts
    )
}
