"""Least squares in closed form against linear solves, autograd and `lstsq`, and the data that do not fit."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import (
    ROUNDING,
    clock_clients,
    copy_of,
    distance,
    joined,
    linear,
    linear_clients,
    moments,
    same_bits,
    sgd,
)
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.federation.algorithm import Local
from fedtorch.tree import Tree

SIZES = [9, 2, 30, 5]
KEYS = random.fold_in(random.key(0), torch.arange(len(SIZES)))
TURN = ft.Turn(KEYS, 0)


def pull(parameters: Tree, seed: int = 0) -> ft.Quadratic:
    """A quadratic of its own for every client."""
    generator = torch.Generator().manual_seed(seed)
    count = len(parameters["weight"])
    shift = tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype), parameters)
    return ft.Quadratic(torch.rand(count, generator=generator, dtype=torch.float64) + 0.2, shift)


def solve(
    module: nn.Linear, data: ft.data.FederatedData, quadratic: bool = False
) -> tuple[Local, Tree, ft.Quadratic | None]:
    local = ft.least_squares(module)
    block = data.stack(range(len(data)))
    start = tree.expand(local.parameters, len(data))
    added = pull(start) if quadratic else None
    state = tree.expand(local.init(local.parameters), len(data))
    return local.solve(start, state, local.prepare(block), added, TURN), start, added


@pytest.mark.parametrize("outputs", [0, 1, 2])
def test_solves_the_normal_equations_with_a_quadratic(outputs: int) -> None:
    data = linear_clients(SIZES, outputs=outputs)
    found, start, added = solve(linear(outputs=max(outputs, 1)), data, quadratic=True)
    for k, (x, y) in enumerate(data):
        matrix, vector = moments(x, y)
        matrix = matrix + added.precision[k] * torch.eye(4, dtype=torch.float64)
        expected = torch.linalg.solve(matrix, vector + joined(added.shift)[k])
        assert distance(joined(found.parameters)[k], expected) < ROUNDING
        output = x @ found.parameters["weight"][k].T + found.parameters["bias"][k]
        loss = nn.functional.mse_loss(output, y.reshape(output.shape))
        assert float(found.info["loss"][k]) == pytest.approx(float(loss), rel=ROUNDING)
    assert list(found.parameters) == list(start)
    assert found.lr_sum.tolist() == [0.0] * len(SIZES)


def test_the_gradient_vanishes_at_the_solution() -> None:
    module, data = linear(outputs=2), linear_clients([9, 6, 30], outputs=2)
    found, _, added = solve(module, data, quadratic=True)
    for k, (x, y) in enumerate(data):
        own = {name: leaf[k].clone().requires_grad_() for name, leaf in found.parameters.items()}
        loss = nn.functional.mse_loss(torch.func.functional_call(module, own, (x,)), y)
        for name, leaf in own.items():
            loss = loss + added.precision[k] / 2 * leaf.square().sum() - (added.shift[name][k] * leaf).sum()
        for gradient in torch.autograd.grad(loss, list(own.values())):
            assert float(gradient.abs().max()) < ROUNDING


def test_without_a_bias() -> None:
    data = linear_clients([9, 6, 30])
    found, _, _ = solve(linear(bias=False), data)
    for k, (x, y) in enumerate(data):
        expected = torch.linalg.lstsq(x, y[:, None]).solution.T
        assert distance(found.parameters["weight"][k], expected) < ROUNDING


def nearest(x: Tensor, y: Tensor, start: Tensor) -> Tensor:
    """The minimiser nearest to the start, `(p, o)`, by the singular values of X itself."""
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    return start + torch.linalg.pinv(design, rtol=1e-7) @ (y[:, None] - design @ start)


def test_of_many_minimisers_the_nearest_to_the_start() -> None:
    data = linear_clients([2, 1, 3, 2])
    found, start, _ = solve(linear(), data)
    for k, (x, y) in enumerate(data):
        # The Gram matrix squares X's condition number, here below 1e3.
        assert distance(joined(found.parameters)[k], nearest(x, y, joined(start)[k])) < 1e3 * ROUNDING
    assert bool((found.info["loss"] >= 0).all())


def test_which_is_where_gradient_descent_goes() -> None:
    data = linear_clients([2, 3, 9])
    found, start, _ = solve(linear(), data)
    descent = sgd(0.1, steps=900)
    reached = descent.solve(
        start, tree.expand(descent.init(start), 3), data.stack(range(3)), None, ft.Turn(KEYS[:3], 0)
    )
    assert distance(reached.parameters, found.parameters) < 10 * ROUNDING  # (1 − 0.1·0.34)^900 is 3e-14


@pytest.mark.parametrize("rows", [5, 50, 5000])
def test_dependent_features_are_not_taken_for_signal(rows: int) -> None:
    """A column that is a sum of others leaves an eigenvalue of pure rounding, which must not be inverted."""
    data = linear_clients([rows] * 20, features=3)
    mix = torch.tensor([0.3, 0.7], dtype=torch.float64)
    data = data.map(lambda batch: (torch.cat([batch[0][:, :2] + 3, (batch[0][:, :2] + 3) @ mix[:, None]], 1), batch[1]))
    with pytest.warns(UserWarning, match=r"got rank 3 in data set 0 of 20 \(20 have dependent columns\)"):
        found, start, _ = solve(linear(), data)
    for k, (x, y) in enumerate(data):
        assert distance(joined(found.parameters)[k], nearest(x, y, joined(start)[k])) < 1e-8  # cond(X)² eps


def test_float32_data_are_solved_in_float64() -> None:
    data = linear_clients([30, 4], features=3)
    shifted = data.map(lambda batch: (batch[0] + 100.0, batch[1])).to(dtype=torch.float32)  # cond(X'X) about 1e8
    module = linear().float()
    found, _, _ = solve(module, shifted)
    assert {leaf.dtype for leaf in tree.leaves(found.parameters)} == {torch.float32}
    exact, _, _ = solve(linear(), shifted.to(dtype=torch.float64))
    for name, leaf in found.parameters.items():
        torch.testing.assert_close(leaf.double(), exact.parameters[name], rtol=1e-5, atol=1e-5)


def test_a_client_without_rows_stays_at_the_start() -> None:
    rows = linear_clients([4]).rows
    data = ft.data.FederatedData(rows, torch.tensor([0, 4]), allow_empty=True)
    found, start, _ = solve(linear(), data)
    assert same_bits(tree.map(lambda leaf: leaf[0], found.parameters), tree.map(lambda leaf: leaf[0], start))
    assert float(found.info["loss"][0]) == 0


def test_no_clients_and_blocks_of_one() -> None:
    local, data = ft.least_squares(linear()), linear_clients(SIZES)
    prepared = local.prepare(data.stack(range(len(SIZES))))
    start = tree.expand(local.parameters, len(SIZES))
    quadratic = pull(start)
    before = copy_of((prepared, start, quadratic))

    def part(rows: slice) -> Local:
        mine = tree.take((start, prepared, quadratic, KEYS), rows)
        return local.solve(mine[0], local.init(start), mine[1], mine[2], ft.Turn(mine[3], 0))

    whole = part(slice(0, len(SIZES)))
    alone = [part(slice(k, k + 1)) for k in range(len(SIZES))]
    assert distance(tree.concatenate([one.parameters for one in alone]), whole.parameters) < ROUNDING
    assert distance(tree.concatenate([one.info for one in alone]), whole.info) < ROUNDING
    nobody = part(slice(2, 2))
    assert nobody.parameters["weight"].shape == (0, 1, 3)
    assert nobody.info["loss"].shape == nobody.lr_sum.shape == (0,)
    assert local.prepare(data.stack([])).vectors.shape == (0, 4, 4)
    assert same_bits((prepared, start, quadratic), before)


def test_integer_targets_are_numbers() -> None:
    data = linear_clients([9, 6])
    whole = data.map(lambda batch: (batch[0], batch[1].round()))
    found, _, _ = solve(linear(), whole.map(lambda batch: (batch[0], batch[1].long())))
    expected, _, _ = solve(linear(), whole)
    assert same_bits(found.parameters, expected.parameters)


def test_the_module_is_copied() -> None:
    module = linear()
    local = ft.least_squares(module)
    before = copy_of(local.parameters)
    with torch.no_grad():
        module.weight.zero_()
    assert same_bits(local.parameters, before)
    assert torch.equal(local.module.weight, before["weight"])


def test_predictions() -> None:
    local, x = ft.least_squares(linear()), linear_clients(SIZES).stack([0, 1]).batch[0]
    tensors = tree.map(
        lambda leaf: leaf * torch.tensor([1.0, 2.0]).double()[(...,) + (None,) * (leaf.ndim - 1)],
        tree.expand(local.parameters, 2),
    )
    outputs = local.predict(tensors, x)
    assert torch.allclose(outputs[1], 2 * local.module(x[1]), rtol=ROUNDING)
    assert local.predict(tree.take(tensors, slice(0, 0)), x[:0]).shape == (0, 9, 1)


def test_what_cannot_be_solved_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Expected an nn\.Linear or a LinearHead, but got Sequential; use ft"):
        ft.least_squares(nn.Sequential(nn.Linear(2, 1)))
    frozen = linear()
    frozen.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="Expected trainable parameters, but got frozen bias"):
        ft.least_squares(frozen)


@pytest.mark.parametrize(("features", "outputs"), [(4, 0), (3, 2)])
def test_data_that_do_not_fit_are_refused_when_bound(features: int, outputs: int) -> None:
    population = ft.InProcess(linear_clients(SIZES, features, outputs=outputs))
    with pytest.raises(ValueError, match=r"Expected (inputs of shape \(3,\)|targets of shape \(1,\)), but got"):
        ft.Run(ft.fedavg(ft.least_squares(linear())), population).step()


@pytest.mark.parametrize("steps", [1, 2, 7, 20])
@pytest.mark.parametrize("outputs", [0, 2])
@pytest.mark.parametrize("quadratic", [False, True])
def test_gradient_steps_in_closed_form_are_those_of_the_loop(steps: int, outputs: int, quadratic: bool) -> None:
    data = linear_clients(SIZES, outputs=outputs)
    module = linear(outputs=max(outputs, 1))
    start = tree.map(lambda leaf: leaf + 1, tree.expand(ft.least_squares(module).parameters, len(SIZES)))
    added = pull(start) if quadratic else None
    block, ends = data.stack(range(len(SIZES))), []
    for local in (ft.least_squares(module, steps=steps, lr=0.07), sgd(0.07, module, steps=steps)):
        state = tree.expand(local.init(local.parameters), len(SIZES))
        ends.append(local.solve(start, state, local.prepare(block), added, TURN))
    assert distance(ends[0].parameters, ends[1].parameters) < ROUNDING
    assert distance(ends[0].lr_sum, ends[1].lr_sum) < ROUNDING


def test_many_gradient_steps_end_at_the_minimiser_and_too_long_ones_diverge_as_the_loop_does() -> None:
    data = linear_clients([30, 40])
    block = data.stack(range(2))
    start = tree.expand(ft.least_squares(linear()).parameters, 2)

    def end(local: ft.LocalSolver) -> Tree:
        return local.solve(
            start, tree.expand(local.init(local.parameters), 2), local.prepare(block), None, ft.Turn(KEYS[:2], 0)
        )

    exact, close = end(ft.least_squares(linear())), end(ft.least_squares(linear(), steps=10_000, lr=0.1))
    assert distance(close.parameters, exact.parameters) < ROUNDING
    wild = [end(local).parameters for local in (ft.least_squares(linear(), steps=9, lr=3.0), sgd(3.0, steps=9))]
    assert float(wild[0]["weight"].abs().max()) > 1e3
    assert distance(*wild) < ROUNDING * float(wild[1]["weight"].abs().max())


def test_gradient_steps_of_no_clients_and_from_numbers_that_are_not() -> None:
    """A client does not see the others."""
    local, block = ft.least_squares(linear(), steps=3), linear_clients([5, 6, 7]).stack(range(3))
    start, prepared = tree.expand(local.parameters, 3), local.prepare(block)
    wanted = local.solve(start, None, prepared, None, TURN)
    start = tree.map(torch.clone, start)
    start["weight"][1] = torch.nan
    found = local.solve(start, None, prepared, None, TURN)
    assert found.parameters["weight"].isnan().flatten(1).all(1).tolist() == [False, True, False]
    assert found.info["loss"].isnan().tolist() == [False, True, False]
    assert distance(*(tree.take(each.parameters, torch.tensor([0, 2])) for each in (found, wanted))) < ROUNDING
    nobody = tree.take((start, prepared), slice(0, 0))
    assert local.solve(nobody[0], None, nobody[1], None, TURN).parameters["weight"].shape == (0, 1, 3)


def test_scaffold_runs_on_gradient_steps_in_closed_form() -> None:
    population = ft.InProcess(linear_clients(SIZES))
    ends = [
        list(ft.Run(ft.scaffold(local), population).rounds(5))[-1].server.parameters
        for local in (ft.least_squares(linear(), steps=4, lr=0.05), sgd(0.05, steps=4))
    ]
    assert distance(*ends) < ROUNDING


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.1}, "Expected steps with lr, but got lr alone"),
        ({"steps": 0, "lr": 0.1}, "Expected steps to be a whole number of at least 1, or None, but got 0"),
        ({"steps": 2, "lr": float("nan")}, "Expected a positive lr, but got nan"),
    ],
)
def test_steps_that_cannot_be_taken_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ft.least_squares(linear(), **arguments)


@pytest.mark.parametrize("steps", [None, 3])
def test_a_linear_head_is_a_linear_layer_of_its_features(steps: int | None) -> None:
    data = linear_clients(SIZES)
    head = ft.LinearHead(3, dtype=torch.float64)
    start = tree.map(lambda leaf: leaf + 1, tree.expand(ft.least_squares(linear()).parameters, len(SIZES)))
    added = pull(start)
    one = ft.least_squares(linear(), steps=steps)
    state = tree.expand(one.init(one.parameters), len(SIZES))
    expected = one.solve(start, state, one.prepare(data.stack(range(len(SIZES)))), added, TURN)
    two = ft.least_squares(head, steps=steps)
    mine = ft.Quadratic(added.precision, {"coefficients": joined(added.shift)[..., 0]})
    prepared = two.prepare(data.stack(range(len(SIZES))))
    found = two.solve({"coefficients": joined(start)[..., 0]}, state, prepared, mine, TURN)
    assert distance(found.parameters["coefficients"], joined(expected.parameters)[..., 0]) < ROUNDING
    assert distance((found.lr_sum, found.info), (expected.lr_sum, expected.info)) < ROUNDING
    squares = ft.least_squares(ft.LinearHead(6, lambda x: torch.cat([x, x.square()], -1), dtype=torch.float64))
    theta = squares.solve(
        tree.expand(squares.parameters, 1), state, squares.prepare(data.stack([2])), None, KEYS[:1]
    ).parameters
    x, y = data[2]
    design = torch.cat([x, x.square(), torch.ones_like(x[:, :1])], 1)
    assert distance(theta["coefficients"][0], torch.linalg.lstsq(design, y[:, None]).solution[:, 0]) < 100 * ROUNDING


def body(trained: bool = False) -> nn.Sequential:
    """The convolutional body of a network, whose dropout would make features random; no generator of everybody's."""
    net = nn.Sequential(nn.Unflatten(-1, (1, 3)), nn.Conv1d(1, 4, 2), nn.Tanh(), nn.Dropout(0.5), nn.Flatten())
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.arange(1.0 + number, parameter.numel() + 1 + number).sin().reshape(parameter.shape))
    return net.double().requires_grad_(trained)


@pytest.mark.parametrize("steps", [None, 3])
def test_the_frozen_body_of_a_network_is_a_feature_map(steps: int | None) -> None:
    """Evaluated as in `eval()`, on rows as a network wants them; the same as its features computed before."""
    data, eyes = linear_clients(SIZES), body().eval()
    with torch.no_grad():
        seen = ft.data.from_tensors([(eyes(x), y) for x, y in data])
    runs = [
        ft.run(ft.fedavg(ft.least_squares(module, steps=steps)), ft.InProcess(rows, 3), rounds=2)
        for module, rows in ((ft.LinearHead(8, body(), dtype=torch.float64), data), (ft.LinearHead(8).double(), seen))
    ]
    found, expected = (run.server["coefficients"] for run in runs)
    assert list(runs[0].server) == ["coefficients"]
    assert distance(found, expected) < 1e-9
    x, _ = data[2]
    with torch.no_grad():
        for module in (runs[0].global_module(), runs[0].client_module(2)):
            assert distance(module(x), eyes(x) @ found[:-1] + found[-1]) < 1e-9
    scores = [run.evaluate(rows, {"error": nn.functional.mse_loss})["error"] for run, rows in zip(runs, (data, seen))]
    assert scores[0].overall == pytest.approx(scores[1].overall, rel=1e-9)


def test_a_body_that_is_to_be_trained_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"got trainable feature_map\.1\.weight, .*feature_map\.requires_grad_\(False\)"
    ):
        ft.least_squares(ft.LinearHead(8, body(trained=True), dtype=torch.float64))
    head = ft.LinearHead(8, body(), dtype=torch.float64)
    head.coefficients.requires_grad_(False)
    with pytest.raises(ValueError, match="got frozen coefficients; use"):
        ft.least_squares(head)


def test_a_module_with_frozen_parameters_comes_out_whole() -> None:
    """Of any local solver; the frozen ones are the module's own."""
    head = ft.LinearHead(8, body(), dtype=torch.float64)
    solver = ft.gradient_descent(head, steps=1, loss=nn.functional.mse_loss, optimizer=sgd_of)
    run = ft.run(ft.fedavg(solver), ft.InProcess(linear_clients(SIZES)), rounds=1)
    whole = run.global_module()
    assert torch.equal(whole.coefficients, run.server["coefficients"])
    assert torch.equal(whole.feature_map[1].weight, head.feature_map[1].weight)


def sgd_of(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def test_the_default_step_never_increases_the_loss_and_ends_at_the_minimiser() -> None:
    data = linear_clients(SIZES)
    start = tree.expand(ft.least_squares(linear()).parameters, len(SIZES))

    def end(steps: int | None) -> Local:
        local = ft.least_squares(linear(), steps=steps)
        return local.solve(
            start, tree.expand(local.init(start), 1), local.prepare(data.stack(range(len(SIZES)))), pull(start), TURN
        )

    assert distance(end(10**7).parameters, end(None).parameters) < 1e-9  # (1 − 1/condition number)^T
    local = ft.least_squares(linear(), steps=1)
    block, now, before = data.stack(range(len(SIZES))), start, torch.full((len(SIZES),), torch.inf).double()
    for _ in range(5):
        found = local.solve(now, None, local.prepare(block), None, TURN)
        assert bool((found.info["loss"] <= before).all())
        now, before = found.parameters, found.info["loss"]


def test_a_precision_for_each_parameter() -> None:
    data = linear_clients(SIZES)
    start = tree.expand(ft.least_squares(linear()).parameters, len(SIZES))
    added = pull(start)
    each = ft.Quadratic({"weight": added.precision, "bias": 3 * added.precision}, added.shift)
    for steps in (None, 4):
        lr = None if steps is None else 0.05
        local = ft.least_squares(linear(), steps=steps, lr=lr)
        state = tree.expand(local.init(local.parameters), len(SIZES))
        found = local.solve(start, state, local.prepare(data.stack(range(len(SIZES)))), each, TURN)
        if steps is None:
            for k, (x, y) in enumerate(data):
                matrix, vector = moments(x, y)
                matrix = matrix + added.precision[k] * torch.diag(torch.tensor([1.0, 1, 1, 3]).double())
                expected = torch.linalg.solve(matrix, vector + joined(added.shift)[k])
                assert distance(joined(found.parameters)[k], expected) < ROUNDING
        else:
            loop = sgd(0.05, steps=steps)
            expected = loop.solve(start, tree.expand(loop.init(start), 1), data.stack(range(len(SIZES))), each, TURN)
            assert distance(found.parameters, expected.parameters) < ROUNDING


def test_a_clock_beside_an_indicator() -> None:
    """Alone, by FedAvg, and with the quadratics of a network, by scalars and by parameter."""
    data = clock_clients([20, 30, 25])
    module = linear(2, bias=False)  # starts a thousand million times too high
    local = ft.least_squares(module)
    expected = torch.tensor([1e-9, 3.0], dtype=torch.float64)
    server = ft.run(ft.fedavg(local), ft.InProcess(data), rounds=1).server
    assert torch.allclose(server["weight"][0], expected, rtol=1e-6, atol=0)  # changes of order one are averaged
    start = tree.expand(local.parameters, 3)
    for precision in (torch.tensor([0.1, 0.0, 7.0]).double(), {"weight": torch.tensor([0.1, 0.5, 7.0]).double()}):
        pulled = ft.Quadratic(precision, {"weight": torch.tensor([1.0, -2.0]).double().expand(3, 1, 2)})
        found = local.solve(start, None, local.prepare(data.stack(range(3))), pulled, ft.Turn(KEYS[:3], 0)).parameters[
            "weight"
        ][:, 0]
        for k, (x, y) in enumerate(data):
            size, own = x.norm(dim=0), pulled.precision_of("weight")[k]
            matrix = 2 / len(y) * x.T @ x + own * torch.eye(2, dtype=torch.float64)
            right = 2 / len(y) * x.T @ y + torch.tensor([1.0, -2.0], dtype=torch.float64)
            solution = torch.linalg.solve(matrix / size / size[:, None], right / size)
            assert distance(found[k] * size, solution) < 1e-11


def test_gradient_steps_are_in_the_units_of_the_features() -> None:
    units = torch.tensor([1e4, 1.0, 1e-4], dtype=torch.float64)
    data = linear_clients([20, 30]).map(lambda batch: (batch[0] * units, batch[1]))
    module, ends = linear(), []
    start, block = tree.expand(ft.least_squares(module).parameters, 2), data.stack(range(2))
    for local in (ft.least_squares(module, steps=20, lr=1e-9), sgd(1e-9, module, steps=20)):
        state = tree.expand(local.init(local.parameters), 2)
        ends.append(local.solve(start, state, local.prepare(block), None, ft.Turn(KEYS[:2], 0)).parameters)
    assert distance(*ends) < ROUNDING


def test_dependent_features_take_the_solution_nearest_to_the_start_in_their_units() -> None:
    x, y = clock_clients([30]).rows
    data = ft.data.from_tensors([(torch.cat([x, 1000 * x[:, :1], torch.zeros(30, 1)], 1), y)])
    local = ft.least_squares(linear(4, bias=False))
    with pytest.warns(UserWarning, match="Expected columns of rank 3, but got rank 2"):
        prepared = local.prepare(data.stack([0]))
    start = tree.map(lambda leaf: 1e-9 * leaf, tree.expand(local.parameters, 1))
    found = local.solve(start, None, prepared, None, ft.Turn(KEYS[:1], 0)).parameters["weight"][0, 0]
    first, _, third, empty = start["weight"][0, 0].tolist()
    excess = (1e-9 - first - 1000 * third) / (1 + 1000**2)  # along (1, 1000), which is orthogonal to what is open
    expected = [first + excess, 3.0, third + 1000 * excess, empty]
    assert found.tolist() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("family", ["logistic", "poisson"])
def test_reweighted_least_squares_is_the_fit_of_statsmodels(family: str) -> None:
    """Clients of different sizes alone, and the pooled rows, from a start that is not zero."""
    api = pytest.importorskip("statsmodels.api")
    generator = torch.Generator().manual_seed(3)
    x = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (40, 25)]
    draws = torch.bernoulli if family == "logistic" else torch.poisson
    mean = torch.sigmoid if family == "logistic" else torch.exp
    y = [draws(mean(0.8 * each[:, 0] - 0.3), generator=generator) for each in x]
    module = nn.Linear(2, 1, dtype=torch.float64)
    data = ft.data.from_tensors([(a, b[:, None]) for a, b in zip(x, y)])
    run = ft.run(ft.separate(ft.least_squares(module, family=family)), ft.InProcess(data), rounds=1)
    kind = api.families.Binomial() if family == "logistic" else api.families.Poisson()
    for k in (0, 1):
        found = api.GLM(y[k].numpy(), api.add_constant(x[k].numpy()), family=kind).fit(tol=1e-14)
        ours = torch.cat([run.tensors()["bias"][k], run.tensors()["weight"][k, 0]])
        assert ours.numpy() == pytest.approx(found.params, abs=1e-9)


def test_separated_responses_give_finite_coefficients() -> None:
    x = torch.tensor([[-2.0], [-1.0], [1.0], [3.0]], dtype=torch.float64)
    data = ft.data.from_tensors([(x, (x[:, 0] > 0).double()), (x, torch.ones(4, dtype=torch.float64))])
    local = ft.least_squares(ft.LinearHead(1, dtype=torch.float64), family="logistic")
    found = ft.run(ft.separate(local), ft.InProcess(data), rounds=1).tensors()["coefficients"]
    assert found.isfinite().all()
    assert float(found[0, 0]) > 10
    assert float(found[1] @ torch.tensor([0.0, 1.0]).double()) > 10


def test_families_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="Expected the family 'gaussian' or 'logistic' or 'poisson', but got 'probit'"):
        ft.least_squares(nn.Linear(2, 1), family="probit")
    with pytest.raises(ValueError, match="Expected no lr with family='poisson'"):
        ft.least_squares(nn.Linear(2, 1), family="poisson", steps=3, lr=0.1)
    with pytest.raises(ValueError, match="Expected a module of one output with family='logistic', but got 2"):
        ft.least_squares(nn.Linear(2, 2), family="logistic")
    data = ft.data.from_tensors([(torch.ones(2, 2), torch.tensor([1.0, 0.5]))])
    with pytest.raises(ValueError, match=r"Expected counts, but got 0\.5 in y"):
        ft.Run(ft.fedavg(ft.least_squares(nn.Linear(2, 1), family="poisson")), ft.InProcess(data))
