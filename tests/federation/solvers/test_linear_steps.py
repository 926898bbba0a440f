"""Steps of linear heads by a program or a loop of few products: what stacked steps give, up to rounding."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import tree
from fedtorch.federation.solvers import batches
from fedtorch.federation.solvers.batches import Batches
from fedtorch.federation.solvers.linear_steps import LinearSteps
from fedtorch.programs import choice, engine, glm_loop as loop, glm_loop as program
from fedtorch.programs.glm_loop import exponential, glm_loop
from fedtorch.programs.glm_steps import BERNOULLI, CATEGORICAL, GAUSSIAN, POISSON
from fedtorch.programs.optimiser_rules import Adam, Momentum

pytest.importorskip("numba")
LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "gaussian": (F.mse_loss, lambda: ft.LinearHead(3), lambda eta: eta + 0.5),
    "bernoulli": (F.binary_cross_entropy_with_logits, lambda: ft.LinearHead(3), lambda eta: (eta > 0).double()),
    "poisson": (F.poisson_nll_loss, lambda: ft.LinearHead(3), lambda eta: eta.abs().round()),
    "categorical": (F.cross_entropy, lambda: nn.Linear(3, 4), lambda eta: (eta.abs() * 2).long().clamp(max=3)),
}


RULES = [None, Momentum(0.9, 0.1), Adam((0.9, 0.99), 1e-3, 0.1)]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
}

FEDERATIONS: list[tuple[list[int], Callable[[Any], ft.Algorithm]]] = [
    ([6, 6, 6], ft.fedavg),
    ([2, 9, 5], lambda local: ft.fedprox(local, 0.7)),
]


def trained(
    name: str,
    sizes: list[int],
    wrap: Callable[[Any], ft.Algorithm],
    batch_size: int | None,
    optimizer: str = "sgd",
) -> ft.Run:
    loss, module, response = LOSSES[name]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in sizes]
    data = ft.data.from_tensors([(x, response(x.sum(1))) for x in rows])
    torch.manual_seed(0)
    settings: dict[str, Any] = {"batch_size": batch_size, "loss": loss, "optimizer": OPTIMIZERS[optimizer]}
    local = ft.gradient_descent(module().double(), epochs=3, **settings)
    return ft.run(wrap(local), ft.InProcess(data), rounds=2, faults=ft.partial_work(0.5))


@pytest.fixture(params=["off", "on"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the program takes the steps, or the loop."""
    monkeypatch.setenv(choice.VARIABLE, request.param)
    return str(request.param)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("sizes", "wrap"), FEDERATIONS, ids=["alike", "ragged"])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_the_same_as_stacked_steps(
    name: str, sizes: list[int], batch_size: int | None, wrap: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[str] = set()
    run, looped = program.run, loop._looped
    monkeypatch.setattr(program, "run", lambda *a: taken.add("run") or run(*a))
    monkeypatch.setattr(loop, "_looped", lambda *a: taken.add("_looped") or looped(*a))
    ours = trained(name, sizes, wrap, batch_size)
    assert taken == {"run" if mode == "on" else "_looped"}
    monkeypatch.setattr(LinearSteps, "family", lambda *a: None)
    theirs = trained(name, sizes, wrap, batch_size)
    for one, other in zip(tree.leaves(ours.server), tree.leaves(theirs.server), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    losses = (torch.tensor(list(run.history["train_loss"])) for run in (ours, theirs))
    torch.testing.assert_close(*losses, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["gaussian", "categorical"])
@pytest.mark.parametrize(("sizes", "wrap"), FEDERATIONS, ids=["alike", "ragged"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS)[1:])
def test_optimisers(
    name: str, sizes: list[int], optimizer: str, wrap: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch's optimisers give on stacked parameters."""
    family = LinearSteps.family
    asked: list[Any] = []
    monkeypatch.setattr(LinearSteps, "family", lambda *a: asked.append(family(*a)) or asked[-1])
    ours = trained(name, sizes, wrap, 4, optimizer)
    assert asked
    assert all(asked)
    monkeypatch.setattr(LinearSteps, "family", lambda *a: None)
    theirs = trained(name, sizes, wrap, 4, optimizer)
    for one, other in zip(tree.leaves(ours.server), tree.leaves(theirs.server), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("reset", "known"), [("round", True), ("never", False)])
def test_moments_that_are_kept_stay_with_torch(reset: Any, known: bool) -> None:
    local = ft.gradient_descent(
        nn.Linear(3, 1), steps=1, loss=F.mse_loss, optimizer=lambda p: torch.optim.Adam(p, lr=0.1), reset=reset
    )
    assert (local.solve.__self__.linear is not None) == known  # type: ignore[attr-defined]


def test_labels_that_are_left_out(mode: str) -> None:
    x, y = torch.randn(1, 5, 3, dtype=torch.float64), torch.tensor([[0, -100, 2, 1, -100]])
    start, whole = torch.zeros(1, 3, 4, dtype=torch.float64), [(None, torch.full((3, 1), 5))]
    one, _ = glm_loop(CATEGORICAL, x, y, start, lambda _: whole, lr=0.5, total=torch.tensor([3]))
    kept = y[0] >= 0
    some = [(None, torch.full((1, 1), 3))] * 3
    other, _ = glm_loop(CATEGORICAL, x[:, kept], y[:, kept], start, lambda _: some, lr=0.5, total=torch.tensor([3]))
    torch.testing.assert_close(one, other)
    assert not torch.equal(one, start)


def problem(
    family: Any, clients: int, size: int, classes: int, dtype: torch.dtype, features: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, size, features, generator=generator, dtype=dtype)
    if family is CATEGORICAL:
        y = torch.randint(0, classes, (clients, size), generator=generator)
    else:
        y = torch.randn(clients, size, generator=generator, dtype=dtype).abs().round()
        y = y.clamp(max=1) if family is BERNOULLI else y
    return x, y, torch.zeros(clients, features + 1, *[classes] * (family is CATEGORICAL), dtype=dtype)


@pytest.mark.parametrize("family", [GAUSSIAN, BERNOULLI, POISSON, CATEGORICAL])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("features", [5, 16, 40])
@pytest.mark.parametrize(
    "rule", [None, Momentum(0.9, 0.1), Adam((0.9, 0.99), 1e-3, 0.1)], ids=["sgd", "momentum", "adam"]
)
def test_program_equals_the_loop(
    family: Any, dtype: torch.dtype, features: int, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a tile has, by columns and by rows, with an intercept, for any number of threads."""
    x, y, start = problem(family, 3, 150, 4, dtype, features)
    total = torch.tensor([4, 2, 4])
    runs = lambda _: [(None, torch.tensor([[150, 131, 67]]).expand(2, 3))] * 2
    pull: Any = {"precision": torch.tensor([0.0, 0.5, 2.0], dtype=dtype), "shift": torch.ones_like(start)}
    got = {}
    before = torch.get_num_threads()
    for way, threads in (("off", before), ("on", 1), ("on", 3)):
        monkeypatch.setenv(choice.VARIABLE, way)
        torch.set_num_threads(threads)
        got[way, threads] = glm_loop(family, x, y, start, runs, lr=0.02, total=total, rule=rule, **pull)
    torch.set_num_threads(before)
    for one, other in zip(got["off", before], got["on", 1], strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-11 if dtype == torch.float64 else 1e-4, atol=1e-5 * (x.itemsize < 8)
        )
    assert all(torch.equal(one, other) for one, other in zip(got["on", 1], got["on", 3], strict=True))


@pytest.mark.parametrize("features", [5, 40])
def test_batches_of_chosen_rows(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are chosen anew in every step, of which the last are left out."""
    x, y, start = problem(CATEGORICAL, 2, 150, 4, torch.float64, features)
    y[:, ::7] = -100
    place = torch.stack([torch.randperm(150, generator=torch.Generator().manual_seed(k)) for k in range(6)])
    place = place.reshape(3, 2, 150)[:, :, :100]
    runs = lambda _: [(place, torch.tensor([[100, 71], [3, 64], [1, 65]]))]
    got = []
    for way in ("off", "on"):
        monkeypatch.setenv(choice.VARIABLE, way)
        got.append(glm_loop(CATEGORICAL, x, y, start, runs, lr=0.1, total=torch.tensor([3, 3])))
    for one, other in zip(*got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=0, equal_nan=True)


@pytest.mark.parametrize("held", [2**20, 0])
def test_rows_that_are_held_in_columns_or_are_too_many(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many, too, that the product of Bernoulli factors is no number."""
    monkeypatch.setattr(program, "_HELD", held)
    x, y, start = problem(BERNOULLI, 2, 70_000, 1, torch.float64, 1)
    runs = lambda _: [(None, torch.tensor([[70_000, 100]]).expand(2, 2))]
    compared(BERNOULLI, (x, y, start), runs, torch.tensor([2, 2]), monkeypatch)


def compared(
    family: Any, rows: tuple[Tensor, Tensor, Tensor], runs: Any, total: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """What the program gives, which is what the loop gives."""
    got = []
    for way in ("off", "on"):
        monkeypatch.setenv(choice.VARIABLE, way)
        got.append(glm_loop(family, *rows, runs, lr=0.02, total=total))
    close = {"rtol": 1e-11, "atol": 1e-13} if rows[0].dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(*got, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, **close)
    return got[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", [GAUSSIAN, BERNOULLI, POISSON, CATEGORICAL])
def test_sizes_at_the_edges(family: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows about tiles and lanes, widths about what is summed in lanes, strided.

    Each pair of them has one way of choosing rows, with an intercept or without, in turns: every width meets all ways.
    """
    turns = itertools.count()
    for size in (1, 3, 15, 16, 17, 63, 64, 65, 130):
        for features, classes in ((1, 2), (3, 5), (4, 1), (9, 3), (32, 2), (33, 3), (8, 130)):
            turn = next(turns)
            x, y, start = problem(family, 2, size, classes, dtype, features)
            every, first = torch.full((2, 2), size), torch.tensor([[size, 1]]).expand(2, 2)
            order = torch.arange(size).flip(0).expand(2, 2, size)
            rows = x.mT.contiguous().mT, y, start if turn // 4 % 2 else start[:, :-1]
            part = order[..., : size // 2 + 1]
            place, sizes = ((None, every), (None, first), (order, first), (part, every))[turn % 4]
            counts = sizes if place is None else sizes.clamp(max=place.shape[2])
            runs = lambda _, place=place, counts=counts: [(place, counts)]
            compared(family, rows, runs, torch.tensor([2, 2]), monkeypatch)


def test_exponentials_are_exact_but_for_the_last_place() -> None:
    @engine.program("void(float64[::1], float64[::1])")
    def write_exponentials(x, out):
        for i in range(len(x)):
            out[i] = exponential(x[i])

    x = torch.cat([torch.linspace(-745, 709.7, 10_001), torch.linspace(-1, 1, 1001)]).double()
    out = torch.empty_like(x)
    write_exponentials(x.numpy(), out.numpy())
    wanted = x.exp()
    assert float(((out - wanted).abs() / wanted.clamp(min=2.0**-1022)).max()) < 2.0**-51
    special = torch.tensor([0.0, -0.0, -800.0, 800.0, torch.inf, -torch.inf, torch.nan]).double()
    out = torch.empty_like(special)
    write_exponentials(special.numpy(), out.numpy())
    torch.testing.assert_close(out, special.exp(), rtol=0, atol=0, equal_nan=True)


def test_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that another one has begun, which has compiled the program."""
    monkeypatch.setenv(choice.VARIABLE, "on")
    x, y, start = problem(POISSON, 3, 20, 1, torch.float64)
    take = lambda: glm_loop(
        POISSON, x, y, start, lambda _: [(None, torch.full((4, 3), 20))], lr=0.02, total=torch.full((3,), 4)
    )
    before = take()[0].tolist()
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    process = context.Process(target=lambda: out.put(take()[0].tolist()))
    process.start()
    assert out.get(timeout=60) == before
    process.join()


def test_a_label_without_a_class_is_an_error_of_torch(mode: str) -> None:
    x, y, start = problem(CATEGORICAL, 1, 5, 3, torch.float64)
    y[0, 2] = 7
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        glm_loop(CATEGORICAL, x, y, start, lambda _: [(None, torch.tensor([[5]]))], lr=0.1, total=torch.tensor([1]))


def test_wholes_and_pulls_of_another_dtype(mode: str) -> None:
    """What the program reads by address is in the dtype that it knows."""
    x, y, start = problem(GAUSSIAN, 2, 5, 1, torch.float32)
    small, pull = torch.int32, (torch.full((2,), 0.5).double(), torch.ones_like(start).double())
    got = [
        glm_loop(
            GAUSSIAN,
            x,
            y,
            start,
            lambda _, to=to: [(None, torch.full((2, 2), 5, dtype=to))],
            lr=0.1,
            total=torch.tensor([2, 1], dtype=to),
            precision=pull[0].to(real),
            shift=pull[1].to(real),
        )
        for to, real in ((torch.int64, torch.float32), (small, torch.float64))
    ]
    torch.testing.assert_close(*(theta for theta, _ in got))
    torch.testing.assert_close(*(loss for _, loss in got))


def test_a_gradient_is_not_lost_in_silence(mode: str) -> None:
    x, y, start = problem(GAUSSIAN, 1, 5, 1, torch.float64)
    theta, _ = glm_loop(
        GAUSSIAN,
        x.requires_grad_(),
        y,
        start,
        lambda _: [(None, torch.full((2, 1), 5))],
        lr=0.1,
        total=torch.tensor([2]),
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        theta.sum().backward()


def test_not_a_number_stays_one(mode: str) -> None:
    x, y, start = problem(CATEGORICAL, 2, 5, 3, torch.float64)
    x[0, 0, 0] = torch.nan
    runs = lambda _: [(None, torch.full((1, 2), 5))]
    theta, loss = glm_loop(CATEGORICAL, x, y, start, runs, lr=0.1, total=torch.tensor([1, 1]))
    assert loss.isnan().tolist() == [True, False]
    assert theta.isnan().flatten(1).any(1).tolist() == [True, False]


def test_the_loop_is_for_a_cpu() -> None:
    """On another device without programs steps stay stacked."""
    linear = ft.gradient_descent(
        nn.Linear(3, 4), steps=1, loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    ).solve.__self__.linear  # type: ignore[attr-defined]
    sizes = {"weight": (2, 4, 3), "bias": (2, 4)}
    for device, known in (("cpu", True), ("meta", False)):
        start = {name: torch.zeros(size, device=device) for name, size in sizes.items()}
        rows = torch.zeros(2, 5, 3, device=device), torch.zeros(2, 5, dtype=torch.int64, device=device)
        assert (linear.family(start, rows, None) is not None) == known


@pytest.mark.parametrize("sizes", [[12, 12, 12], [10, 10, 10], [2, 9, 5]], ids=["whole", "alike", "ragged"])
@pytest.mark.parametrize("numbers", [1, 25, 1000])
def test_runs_hold_the_batches_of_their_steps(sizes: list[int], numbers: int) -> None:
    x = torch.arange(36.0).reshape(3, 12, 1)[:, : max(sizes)]
    keys = ft.random.fold_in(ft.random.key(0), torch.arange(3))
    one, other = (Batches(x, torch.tensor(sizes), 4, 3, None, keys) for _ in range(2))
    step = 0
    for places, counts in one.runs(numbers):
        assert places is not None
        assert len(counts) == 1 or len(counts) * 3 * 4 <= numbers
        assert not any(step < end < step + len(counts) for end in one.total.tolist())
        for place, count in zip(places, counts, strict=True):
            batch = other[step]
            active = (step < other.total).nonzero()[:, 0].tolist()
            for k, client in enumerate(active):
                assert x[client, place[client, : count[client]]].tolist() == batch.alone(k).tolist()
            step += 1
    assert step == one.longest


@pytest.mark.parametrize("sizes", [[12, 12, 12], [2, 9, 5]], ids=["alike", "ragged"])
def test_steps_whose_permutations_are_drawn_some_epochs_at_a_time(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(36.0).reshape(3, 12, 1)[:, : max(sizes)]
    keys = ft.random.fold_in(ft.random.key(0), torch.arange(3))
    make = lambda: Batches(x, torch.tensor(sizes), 4, 7, None, keys)
    whole = [batch.alone(k).tolist() for batch in make() for k in range(len(batch.size))]
    monkeypatch.setattr(batches, "_DRAWN", 3 * max(sizes) * 2)
    some = make()
    assert [batch.alone(k).tolist() for batch in some for k in range(len(batch.size))] == whole
    lengths = [len(counts) for _, counts in make().runs(None)]
    assert sum(lengths) == some.longest
    assert len(lengths) < some.longest
