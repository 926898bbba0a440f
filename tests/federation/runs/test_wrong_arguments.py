"""What a new user gets wrong: every mistake is named where it is made, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fedtorch as ft
from fedtorch.federation.runs.cohorts import uniform_cohort
from fedtorch.federation.solvers.unlabelled import unlabelled
from fedtorch.vfl.model import likelihoods

INF = float("inf")
ROWS = [(torch.randn(6 + k, 3), torch.randint(0, 2, (6 + k,))) for k in range(4)]
DATA = ft.data.from_tensors(ROWS, names="abcd")
HERE = ft.InProcess(DATA)
NETWORK = ft.Network.ring(4)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def stacked(module: nn.Module | None = None, **options: Any) -> ft.LocalSolver:
    chosen = {"epochs": 1, "batch_size": 4, "loss": F.cross_entropy, "optimizer": sgd, **options}
    return ft.gradient_descent(module or nn.Linear(3, 2), **chosen)


class Classifier(L.LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def training_step(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.linear(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def fitted(module: L.LightningModule) -> ft.LocalSolver:
    return ft.lightning_fit(module, max_epochs=1)


ALGORITHMS: dict[str, Callable[[Any], ft.Algorithm]] = {
    "fedavg": ft.fedavg,
    "fedprox": lambda local: ft.fedprox(local, 0.1),
    "scaffold": ft.scaffold,
    "feddyn": lambda local: ft.feddyn(local, 0.1),
    "ditto": lambda local: ft.ditto(local, 0.1),
    "fedbn": ft.fedbn,
    "fedopt": lambda local: ft.fedopt(local, sgd),
    "personal_layers": lambda local: ft.personal_layers(local, "weight"),
    "separate": ft.separate,
    "pooled": ft.pooled,
    "gtv": lambda local: ft.gtv(local, NETWORK, 0.1),
    "matrix_normal": ft.matrix_normal,
    "unlabelled": unlabelled,  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("instead", [nn.Linear(3, 2), Classifier(), ft.gradient_descent])
def test_an_algorithm_of_a_module_says_how_to_make_a_solver(name: str, instead: Any) -> None:
    with pytest.raises(TypeError, match=r"Expected a local solver, but got .*; make one of a module: ft.gradient_desc"):
        ALGORITHMS[name](instead)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ft.gtv(stacked(), 4, 0.1), "Expected a network, but got int; make one with ft.Network"),  # type: ignore[arg-type]
        (lambda: ft.without_server(nn.Linear(1, 1), NETWORK), "Expected an algorithm, but got Linear"),  # type: ignore[arg-type]
        (lambda: ft.gibbs(nn.Linear(1, 1), nn.Linear(1, 1)), "Expected the clients' half of a sampler, but got Linear"),  # type: ignore[arg-type]
        (lambda: ft.ep(nn.Linear(1, 1)), "Expected a hierarchical model, but got Linear"),  # type: ignore[arg-type]
        (
            lambda: stacked(optimizer=sgd([torch.zeros(1)])),
            "Expected a function of parameters .*, but got SGD; pass opt",
        ),
        (lambda: stacked(optimizer="sgd"), "Expected a function of parameters .*, but got str; pass optimizer=lambda"),
        (lambda: ft.fedopt(stacked(), sgd([torch.zeros(1)])), "Expected a function of parameters .*, but got SGD"),  # type: ignore[arg-type]
        (lambda: stacked(loss="mse"), "Expected loss= as a function of .*, but got str; such as torch.nn.functional"),
        (lambda: uniform_cohort(2.0, 10), "Expected a cohort of a whole number of clients, but got 2.0"),  # type: ignore[arg-type]
        (lambda: ft.fedprox(stacked(), "0.1"), "Expected mu as a number, but got '0.1'"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_kind(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("begin", [ft.Run, ft.Federation])
@pytest.mark.parametrize(
    ("algorithm", "population", "message"),
    [
        (None, DATA, r"Expected a population, but got FederatedData; .*ft.InProcess\(data\)"),
        (None, ROWS, r"Expected a population, but got list; .*ft.InProcess\(ft.data.from_tensors"),
        (nn.Linear(3, 2), HERE, r"Expected an algorithm, but got Linear; make one with ft.fedavg\(ft.gradient_descent"),
        (stacked(), HERE, "Expected an algorithm, but got LocalSolver"),
        (HERE, None, "Expected an algorithm, but got InProcess"),
    ],
)
def test_what_a_run_is_begun_with(begin: Any, algorithm: Any, population: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        begin(algorithm or ft.fedavg(stacked()), population)


@pytest.mark.parametrize("cohort", [0.4, 2.0, "all", True, torch.tensor([0, 1])])
def test_cohorts_of_another_kind(cohort: Any) -> None:
    with pytest.raises(TypeError, match=r"Expected cohort= as a whole number of clients, .* but got .*poisson_cohort"):
        ft.Run(ft.fedavg(stacked()), HERE, cohort=cohort)


def test_empty_cohorts_and_those_that_are_no_tensors() -> None:
    with pytest.raises(ValueError, match="Expected at least one client in a cohort, but got none"):
        ft.Run(ft.fedavg(stacked()), HERE, cohort=[])
    with pytest.raises(TypeError, match=r"Expected a cohort of int64 ids .*, but got list; return a tensor"):
        ft.Run(ft.fedavg(stacked()), HERE, cohort=lambda key, round: [0, 1]).step()  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ft.fedprox(stacked(), INF),
        lambda: ft.fedavg(stacked(), lr=INF),
        lambda: ft.scaffold(stacked(), lr=INF),
        lambda: ft.feddyn(stacked(), INF),
        lambda: ft.ditto(stacked(), INF),
        lambda: ft.personal_layers(stacked(), "weight", mu=INF),
        lambda: ft.gtv(stacked(), NETWORK, INF),
        lambda: ft.fedadam(stacked(), lr=INF),
        lambda: ft.fedyogi(stacked(), lr=INF),
        lambda: ft.fedsgd(nn.Linear(3, 2), lr=INF, loss=F.cross_entropy),
        lambda: ft.least_squares(nn.Linear(3, 1), steps=2, lr=INF),
        lambda: stacked(clip=INF),
    ],
)
def test_infinite_strengths_and_rates(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected a finite (mu|lr|alpha|strength|clip), but got inf"):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p * torch.nan, "Expected finite parameters, but got NaN or Inf in 'weight'"),
        (lambda p: p * INF, "Expected finite parameters, but got NaN or Inf in 'weight'"),
        (lambda p: p[:1], r"Expected parameter 'weight' to be of shape \(2, 3\), but got it of shape \(1, 3\); pass a"),
    ],
)
def test_parameters_to_start_from(change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    algorithm = ft.fedavg(stacked())
    with pytest.raises(ValueError, match=message):
        ft.Run(algorithm, HERE, {name: change(leaf) for name, leaf in algorithm.start.items()})
    with pytest.raises(ValueError, match=r"Expected parameter 'weight' to be .*, but got it absent; pass a tree"):
        ft.Run(algorithm, HERE, {"w": torch.zeros(3)})
    double = {name: leaf.double() for name, leaf in algorithm.start.items()}
    assert ft.run(algorithm, HERE, double, rounds=1).server["weight"].dtype == torch.float32


def labelled(label: int) -> ft.data.FederatedData:
    rows = [(x.clone(), y.clone()) for x, y in ROWS]
    rows[2][1][3] = label
    return ft.data.from_tensors(rows, names="abcd")


def typed(x: Any = None, y: Any = None) -> ft.data.FederatedData:
    keep = lambda leaf: leaf
    return ft.data.from_tensors([((x or keep)(a), (y or keep)(b)) for a, b in ROWS], names="abcd")


SOLVERS: dict[str, Callable[..., ft.LocalSolver]] = {
    "stacked": lambda width=3: stacked(nn.Linear(width, 2)),
    "one by one": lambda width=3: stacked(nn.Linear(width, 2), batched=False),
    "Lightning, stacked": lambda width=3: ft.gradient_descent(Classifier(width), epochs=1),
    "Lightning": lambda width=3: fitted(Classifier(width)),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_rows_that_a_module_cannot_take_are_refused_before_the_first_round(name: str) -> None:
    local, other = SOLVERS[name](), SOLVERS[name](5)
    cases = [
        (
            other,
            DATA,
            r"'a': Expected rows that \w+ can train on, but got 0: float32 \(3,\), 1: int64 \(\): .*mat1 and",
        ),
        (local, typed(torch.Tensor.double), r"'a': .* but got 0: float64 .*data.to\(dtype=torch.float32\)"),
        (local, typed(lambda x: x + 0j), r"'a': .* but got 0: complex64 .*data.to\(dtype=torch.float32\)"),
        (local, typed(None, lambda y: y[:, None]), "'a': .* but got 0: float32 .*, 1: int64 .*change the rows"),
        (local, labelled(7), "'c': .* but got .*Target 7 is out of bounds.*classes and tokens are numbered from 0"),
        (local, labelled(-5), "'c': .* but got .*Target -5 is out of bounds"),
    ]
    ft.Run(ft.fedavg(local), HERE)  # a solver looks at other data anew
    for solver, data, message in cases:
        with pytest.raises(ValueError, match=f"Client {message}"):
            ft.Run(ft.fedavg(solver), ft.InProcess(data))
    with pytest.raises(ValueError, match=r"Client 'c': .*Target 7"):  # whatever the blocks
        ft.Run(ft.fedavg(local), ft.InProcess(labelled(7).select([1, 2]), chunk=1))


@pytest.mark.parametrize("batched", [True, False])
def test_tokens_beyond_the_vocabulary(batched: bool) -> None:
    tokens = [torch.randint(0, 5, (6, 4)) for _ in range(4)]
    tokens[3][2, 1] = 9
    data = ft.data.from_tensors([(x, torch.zeros(6, dtype=torch.int64)) for x in tokens], names="abcd")
    module = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"Client 'd': .*index out of range"):
        ft.Run(ft.fedavg(stacked(module, batched=batched)), ft.InProcess(data))


def test_rows_of_another_structure() -> None:
    named = ft.data.from_tensors([{"x": x, "y": y} for x, y in ROWS])
    alone = ft.data.from_tensors([x for x, _ in ROWS])
    for data, got in ((named, "x: float32"), (alone, "float32")):
        with pytest.raises(ValueError, match=rf"Expected rows \(input, target\) for loss=, but got {got}"):
            ft.Run(ft.fedavg(stacked()), ft.InProcess(data))
        with pytest.raises(ValueError, match=rf"Expected rows \(x, y\) of real x, but got {got}"):
            ft.Run(ft.fedavg(ft.least_squares(nn.Linear(3, 1))), ft.InProcess(data))


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_rows(layout: str) -> None:
    with pytest.raises(TypeError, match=r"Expected dense numbers in field '0' of client 'a', but got torch.sparse"):
        ft.data.from_tensors([(getattr(x, layout)(), y) for x, y in ROWS], names="abcd")
    x, y = ROWS[0]
    with pytest.raises(TypeError, match=r"Expected dense numbers in field '0', but got torch.sparse"):
        ft.data.FederatedData((getattr(x, layout)(), y), torch.tensor([6]))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing_is_refused(reentrant: bool, batched: bool, first: bool) -> None:
    """Not refused, `batched=False` would find its gradients at the parameters of the start."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if first:  # nothing before it has a gradient
                return self.last(checkpoint(self.first, x, use_reentrant=reentrant))
            return checkpoint(self.last, self.first(x), use_reentrant=reentrant)

    with pytest.raises(RuntimeError, match=r"Expected a module without activation checkpointing.*ft.lightning_fit"):
        ft.Run(ft.fedavg(stacked(Checkpointed(), batched=batched)), HERE)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            lambda k: ft.Mean(torch.ones(k, 2), torch.ones(k, 1)),
            r"weights \(K,\) of K = 4 .* shape \(4, 1\)",
        ),
        (lambda k: ft.Mean(torch.ones(2), torch.ones(k)), r"values \(K, ...\) of K = 4 .* shape \(2,\) in 'value'"),
        (lambda k: ft.Sum({"a": torch.ones(())}), r"values \(K, ...\) of K = 4 .* shape \(\) in 'value.a' of a Sum"),
    ],
)
def test_messages_of_another_shape(message: Callable[[int], Any], expected: str) -> None:
    algorithm = ft.Algorithm(
        init=lambda parameters, clients: (parameters, {}),
        outbox=lambda server: server,
        client=lambda inbox, state, data, turn: ft.Reply(message(len(data.count)), state, {}),
        server=lambda server, aggregate, key: server,
        model=lambda inbox, state: inbox,
    )
    alike = ft.data.from_tensors([torch.ones(3, 1) for _ in range(4)])
    with pytest.raises(ValueError, match=f"Expected messages with {expected}"):
        ft.Run(algorithm, ft.InProcess(alike), torch.zeros(2)).step()


def test_validation_and_metrics_of_another_kind() -> None:
    algorithm, accuracy = ft.fedavg(stacked()), ft.metrics.accuracy()
    with pytest.raises(TypeError, match="Expected validation= as FederatedData, but got list"):
        ft.Federation(algorithm, HERE, validation=ROWS, metrics={"accuracy": accuracy})  # type: ignore[arg-type]
    for metrics in (accuracy, [accuracy]):
        with pytest.raises(TypeError, match="Expected metrics by name, but got"):
            ft.Federation(algorithm, HERE, validation=DATA, metrics=metrics)  # type: ignore[arg-type]
    narrow = ft.data.from_tensors([(x[:, :2], y) for x, y in ROWS], names="abcd")
    with pytest.raises(ValueError, match=r"Expected inputs that the clients' models take, but got float32 \(2,\)"):
        ft.Run(algorithm, HERE).evaluate(narrow, {"accuracy": accuracy})


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        (
            ValueError,
            {"response": torch.tensor([0.0, torch.nan, 1.0])},
            "Expected a response of .* NaN in row 1",
        ),
        (ValueError, {"weight": torch.tensor([1.0, -1.0, 1.0])}, "Expected a finite offset and weights from 0 on"),
        (ValueError, {"present": torch.ones(3, 2, dtype=torch.bool)}, r"Expected present of shape \(3, 1\), but got"),
        (ValueError, {"offset": torch.tensor([1.0, torch.nan, 1.0])}, "Expected a finite offset"),
        (TypeError, {"features": ([[1.0]] * 3,)}, "Expected features of party 0 as a tensor, but got list"),
        (TypeError, {"features": (torch.ones(3, 1), torch.ones(3, 1) + 0j)}, "Expected real features of party 1"),
        (TypeError, {"features": (torch.ones(3, 1).to_sparse(),)}, "Expected dense numbers in features of party 0"),
    ],
)
def test_vertical_rows(error: type[Exception], change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"features": (torch.ones(3, 1),), "response": torch.zeros(3)}
    ft.vfl.VerticalData(**good)
    ft.vfl.VerticalData(**{**good, "response": torch.full((3,), torch.nan)})  # at a party that does not know it
    with pytest.raises(error, match=message):
        ft.vfl.VerticalData(**{**good, **change})


def test_features_that_do_not_fit_a_split_network() -> None:
    from fedtorch.vfl.model.split_nn import mlp

    network = ft.vfl.SplitNetwork([mlp(3), mlp(2)], likelihoods.bernoulli())
    data = ft.vfl.VerticalData((torch.ones(5, 3), torch.ones(5, 4)), torch.zeros(5))
    with pytest.raises(ValueError, match=r"Expected features that the network of 'party 1' takes, but got .*\(5, 4\)"):
        network.losses(data, 0)


def test_a_look_at_the_rows_costs_the_same_for_any_number_of_clients_and_nothing_later() -> None:
    calls = []

    def counted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(len(output))
        return F.cross_entropy(output, target)

    found = []
    for clients in (4, 400):
        data = ft.data.from_tensors([(torch.randn(6, 3), torch.randint(0, 2, (6,))) for _ in range(clients)])
        run = ft.Run(ft.fedavg(stacked(loss=counted)), ft.InProcess(data))
        began, most = len(calls), max(calls)
        run.step()
        found.append((began, most, len(calls) - began))
        calls.clear()
    assert found[0][0] == found[1][0]
    assert max(most for _, most, _ in found) <= 16 + 2 * 2  # rows, and the extreme labels
    # Steps of a round, the check of their shape, one client's step that is taken twice, and what a step calls.
    assert found[0][2] == found[1][2] <= 2 + 2 * 3 + 2 + 3
