"""Walks the package: what is public is documented and annotated, and every algorithm and exchange keeps the contract.

A new algorithm fails here until its test file has `CASES`, see `support/algorithm_cases.py`, and a new exchange until
it is in `EXCHANGES`; robust rules are those of `tests/federation/exchanges/test_robust.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import linecache
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from federation.exchanges.test_robust import MAKERS
from support.algorithm_cases import CLIENTS, SIZES, every_case, pool
from support.oracles.closed_forms import (
    NUMBERS,
    ROUNDING,
    client_tensors,
    copy_of,
    distance,
    linear_clients,
    same_bits,
)
from support.small_federations import trainer

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.data import ClientData
from fedtorch.federation.exchanges import graph, rows, star
from fedtorch.federation.exchanges.exchange import Exchange, Mean, Sum, client_count, sum_over
from fedtorch.federation.exchanges.robust.exchange import star as robust_star
from fedtorch.federation.runs import run as running
from fedtorch.programs import choice
from fedtorch.tree import Tree

ROUNDS = 3
REORDERED = 1e-8  # relative: sums in another order, through systems with condition numbers of up to 10⁶
CASES = every_case()
ALGORITHMS = {name: case.make for name, case in CASES.items()}
STARTS = {name: case.start for name, case in CASES.items() if case.start is not None}
POOLED = {name for name, case in CASES.items() if case.rows is pool}  # one client with all rows
ROBUST_RULES = {
    name: next(rule for rule in (make(1), make(0)) if rule.least <= CLIENTS) for name, make in MAKERS.items()
}  # against one wrong message, where six are enough
EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "graph": lambda: ft.graph(ft.Network.ring(CLIENTS)),
    "private_rows": ft.private_rows,
    "star": ft.star,
    **{f"robust star {name}": partial(robust_star, rule) for name, rule in ROBUST_RULES.items()},
}


def modules() -> Iterator[ModuleType]:
    yield ft
    for found in pkgutil.walk_packages(ft.__path__, "fedtorch."):
        of_triton = ("fedtorch.programs.triton.", "fedtorch.programs.triton.philox")
        needs_triton = found.name.startswith(of_triton) and not importlib.util.find_spec("triton")
        if not found.name.endswith("__main__") and not needs_triton:
            yield importlib.import_module(found.name)


def own_names(module: ModuleType) -> list[str]:
    """The names that a module defines without an underscore."""
    public = [name for name in vars(module) if not name.startswith("_")]
    return [name for name in public if getattr(getattr(module, name), "__module__", None) == module.__name__]


def public() -> dict[str, Any]:
    """Everything public by its full name: what modules offer, and what `fedtorch` shows."""
    offered = {
        f"{getattr(value, '__module__', None) or module.__name__}.{name}": value
        for module in modules()
        for name in own_names(module)
        for value in [getattr(module, name)]
    }
    shown = {f"fedtorch.{name}": value for name, value in vars(ft).items() if not name.startswith("_")}
    return {**offered, **{name: value for name, value in shown.items() if not isinstance(value, ModuleType)}}


def functions(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A public function, or a class's own public methods and its constructor."""
    if inspect.isfunction(value):
        yield name, value
    elif inspect.isclass(value):
        for method, raw in vars(value).items():
            written = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
            written = written.fget if isinstance(written, property) else written
            made_up = dataclasses.is_dataclass(value) or hasattr(value, "_fields") or is_protocol(value)
            if inspect.isfunction(written) and (not method.startswith("_") or (method == "__init__" and not made_up)):
                yield f"{name}.{method}", written


def is_protocol(value: Any) -> bool:
    return bool(getattr(value, "_is_protocol", False))


def documented(value: Any) -> bool:
    text = inspect.getdoc(value) or ""
    made_up = inspect.isclass(value) and text.startswith(f"{value.__name__}(")  # by dataclass and NamedTuple
    return bool(text.strip()) and not made_up


def unannotated(function: Any) -> list[str]:
    signature = inspect.signature(function)
    bare = [
        name
        for i, (name, parameter) in enumerate(signature.parameters.items())
        if parameter.annotation is inspect.Parameter.empty and not (i == 0 and name in ("self", "cls"))
    ]
    return bare + ["return"] * (signature.return_annotation is inspect.Signature.empty)


def test_every_module_has_a_docstring() -> None:
    silent = [module.__name__ for module in modules() if not (module.__doc__ or "").strip()]
    assert silent == []


def test_everything_public_has_a_docstring() -> None:
    described = {name: value for name, value in public().items() if inspect.isfunction(value) or inspect.isclass(value)}
    silent = [name for name, value in described.items() if not documented(value)]
    methods = [pair for name, value in described.items() for pair in functions(name, value)]
    silent += [name for name, method in methods if not name.endswith("__init__") and not inherits(name, method)]
    assert sorted(set(silent)) == []


def inherits(name: str, method: Any) -> bool:
    """Whether a method has a docstring, its own or that of the class which it overrides a method of."""
    if documented(method):
        return True
    owner = public().get(name.rpartition(".")[0])
    bases = inspect.getmro(owner)[1:] if inspect.isclass(owner) else ()
    return any(documented(getattr(base, method.__name__, None)) for base in bases if hasattr(base, method.__name__))


def test_everything_public_is_annotated() -> None:
    found = [pair for name, value in public().items() for pair in functions(name, value)]
    bare = {name: missing for name, function in found if (missing := unannotated(function))}
    assert bare == {}


def makers() -> dict[str, Any]:
    """The functions of `fedtorch.federation.algorithms` that return an algorithm."""
    found = {}
    for module in modules():
        if module.__name__.startswith("fedtorch.federation.algorithms."):
            for name, value in vars(module).items():
                made_here = inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
                if made_here and inspect.signature(value).return_annotation in (ft.Algorithm, "Algorithm"):
                    found[name] = value
    return found


def test_every_algorithm_has_a_case() -> None:
    assert sorted(makers()) == sorted(ALGORITHMS), "say it in CASES of tests/federation/algorithms/test_<name>.py"


def test_every_algorithm_is_shown_at_the_top() -> None:
    assert [name for name, value in makers().items() if getattr(ft, name, None) is not value] == []


def test_every_exchange_has_a_case() -> None:
    def returns(module: ModuleType, name: str) -> Any:
        value = getattr(module, name)
        return inspect.signature(value).return_annotation if inspect.isfunction(value) else None

    kinds = (star, rows, graph)
    found = [n for kind in kinds for n in own_names(kind) if returns(kind, n) in (Exchange, "Exchange")]
    assert sorted(found) == [name for name in sorted(EXCHANGES) if not name.startswith("robust")]


every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def start(name: str, algorithm: ft.Algorithm) -> Tree:
    """Parameters that are not what the local solver would start from."""
    if algorithm.start is None:
        return tree.map(lambda leaf: leaf.to(NUMBERS.get()) if leaf.dtype == torch.float64 else leaf, STARTS[name])
    return tree.map(lambda leaf: leaf + 0.5, algorithm.start)


def population(name: str, chunk: int | None = None) -> ft.InProcess:
    return ft.InProcess(CASES[name].rows(linear_clients(SIZES)), chunk)


@every_algorithm
@pytest.mark.parametrize("cohort", [None, 3])
def test_the_same_in_one_block_and_in_chunks(name: str, cohort: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block, blocks by size, and either in chunks; those by size hold at most three clients."""
    runs = []
    for small, chunk in ((16_384, None), (16_384, 3), (0, None), (0, 1)):
        monkeypatch.setattr("fedtorch.federation.populations.in_process.SMALL_BLOCK", small)
        algorithm, clients = ALGORITHMS[name](), population(name, chunk)
        size = None if cohort is None or name in POOLED else cohort
        rounds = ft.Run(algorithm, clients, start(name, algorithm), cohort=size, seed=2).rounds(ROUNDS)
        trace = []
        for round in rounds:
            order = round.ids.argsort()
            info = {key: value[order] for key, value in round.info.items()}
            outbox = algorithm.outbox(round.server)
            models = [client_tensors(round.clients, outbox, k) for k in range(len(clients.data))]
            traffic = torch.tensor([round.bytes_up, round.bytes_down])
            trace.append((round.server, info, tree.stack(models), round.clients.state_dict(), traffic))
        runs.append(trace)
    for other in runs[1:]:
        assert all(distance(one, two) < ROUNDING for one, two in zip(runs[0], other))


@every_algorithm
def test_resumed_run_has_the_same_bits(name: str) -> None:
    begun = lambda: ft.Run((algorithm := ALGORITHMS[name]()), population(name), start(name, algorithm), seed=2)
    whole, first, again = begun(), begun(), begun()
    list(whole.rounds(2))
    list(first.rounds(1))
    again.load_state_dict(first.state_dict())
    list(again.rounds(2))
    assert distance(again.server, whole.server) == 0
    assert distance(again.tensors(), whole.tensors()) == 0


@every_algorithm
def test_under_a_trainer_it_is_the_same_run_also_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    algorithm = ALGORITHMS[name]
    whole = ft.Run((own := algorithm()), population(name), start(name, own), seed=2)
    list(whole.rounds(2))
    begun = lambda: ft.Federation((own := algorithm()), population(name), start(name, own), seed=2)
    (first := trainer(max_epochs=1)).fit(begun())
    first.save_checkpoint(tmp_path / "round.ckpt")
    trainer(max_epochs=2).fit(again := begun(), ckpt_path=tmp_path / "round.ckpt")
    assert again.round == 2
    assert distance(again.server, whole.server) == 0
    assert distance(again.run.tensors(), whole.tensors()) == 0


def models_of(name: str, device: str) -> Tree:
    """What all clients predict with after some rounds on a device, on the CPU."""
    algorithm, clients = ALGORITHMS[name](), ft.InProcess(population(name).data, device=device)
    run = ft.run(algorithm, clients, start(name, algorithm), rounds=ROUNDS, seed=2)
    return tree.to(run.tensors(), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_algorithm
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_a_device_gives_the_numbers_of_the_cpu(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, kernels)
    assert distance(models_of(name, "cuda"), models_of(name, "cpu")) < REORDERED


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() or not choice.installed(), reason="interprets Triton programs on the CPU")
@every_algorithm
def test_programs_give_the_numbers_of_their_references(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "off")
    wanted = models_of(name, "cpu")
    monkeypatch.setenv(choice.VARIABLE, "interpret")
    assert distance(models_of(name, "cpu"), wanted) < REORDERED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_algorithm
def test_a_device_is_seldom_waited_for(name: str) -> None:
    """What CUDA itself says of a round's waits, but for numbers that go to the device."""
    algorithm, clients = ALGORITHMS[name](), ft.InProcess(population(name).data, device="cuda")
    run = ft.Run(algorithm, clients, start(name, algorithm), seed=2)
    run.step(), run.step()
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            run.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [linecache.getline(one.filename, one.lineno).strip() for one in said if "synchroniz" in str(one.message)]
    waits = [line for line in lines if not any(going in line for going in (".to(", "tensor(", "copy_("))]
    assert len(waits) <= CASES[name].waits, waits


@every_algorithm
def test_a_block_of_no_clients(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    progress = ft.Run(algorithm, population(name), start(name, algorithm))
    outbox, clients = algorithm.outbox(progress.server), progress.clients
    nobody = clients.reply(clients.empty_block(), outbox, ft.Turn(random.key(0), 0))
    assert all(len(leaf) == 0 for leaf in tree.leaves(nobody))
    block = next(iter(clients.blocks(None)))
    somebody = clients.reply(block, outbox, ft.Turn(random.key(0), 0))
    for empty, full in zip(nobody[:2], somebody[:2]):
        shapes = [[(path, leaf.shape[1:], leaf.dtype) for path, leaf in tree.items(part)] for part in (empty, full)]
        assert shapes[0] == shapes[1]
    partials = [
        algorithm.exchange.gather(nobody.message, slice(0, 0)),
        algorithm.exchange.gather(somebody.message, block[0]),
    ]
    alone = algorithm.exchange.finish(algorithm.exchange.merge(partials[1:]))
    assert distance(algorithm.exchange.finish(algorithm.exchange.merge(partials)), alone) < ROUNDING
    ids = torch.zeros(0, dtype=torch.int64)
    inbox, state = algorithm.exchange.scatter(outbox, ids), clients.table.read(ids)
    assert all(len(leaf) == 0 for leaf in tree.leaves(algorithm.model(inbox, state)))


@every_algorithm
@pytest.mark.parametrize("chunk", [None, 3])
def test_inputs_are_not_changed(name: str, chunk: int | None) -> None:
    algorithm, clients = ALGORITHMS[name](), population(name, chunk)
    parameters = start(name, algorithm)
    watched = copy_of((parameters, clients.data.rows))
    one = ft.Run(algorithm, clients, parameters).step()
    outbox = algorithm.outbox(one.server)
    for block in one.clients.blocks(None):
        inbox = algorithm.exchange.scatter(outbox, block[0])
        state, keys = (
            one.clients.table.read(block[0]),
            random.fold_in(random.key(0), torch.arange(client_count(block[0]))),
        )
        given = (one.server, inbox, state, block[1], keys)
        before = copy_of(given)
        reply = algorithm.client(inbox, state, block[1], ft.Turn(keys, 0))
        algorithm.model(inbox, state)
        message = copy_of(reply.message)
        aggregate = algorithm.exchange.finish(algorithm.exchange.gather(reply.message, block[0]))
        algorithm.server(one.server, aggregate, random.key(1))
        assert same_bits(given, before)
        assert same_bits(reply.message, message)
    assert same_bits((parameters, clients.data.rows), watched)


@every_algorithm
def test_a_lost_message_leaves_no_trace(name: str) -> None:
    algorithm, clients = ALGORITHMS[name](), population(name)
    lost = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 0.5))
    run = ft.Run(algorithm, clients, start(name, algorithm), faults=lost)
    everybody = slice(0, len(clients.data))
    before = copy_of(run.clients.table.read(everybody))
    for round in run.rounds(5):
        after = copy_of(round.clients.table.read(everybody))
        silent = (~torch.isin(torch.arange(len(clients.data)), round.ids)).nonzero()[:, 0]
        assert same_bits(tree.take(before, silent), tree.take(after, silent))
        before = after


@every_algorithm
def test_the_server_s_state_keeps_its_shape(name: str) -> None:
    """Checkpoints are refused where a leaf's path, shape or dtype is not that of a federation that has just begun."""
    algorithm, clients = ALGORITHMS[name](), population(name)
    run = ft.Run(algorithm, clients, start(name, algorithm))
    states = [run.server, *(round.server for round in run.rounds(3))]
    first, *others = ([(path, leaf.shape, leaf.dtype) for path, leaf in tree.items(state)] for state in states)
    assert all(other == first for other in others)


@every_algorithm
def test_total_counts_all_clients_in_any_cohort(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never asked, silent, lost, or gone after a round: the total is what the exchange makes of all clients' `told`."""
    algorithm = ALGORITHMS[name]()
    if algorithm.told is None:
        pytest.skip(f"{name} tells nothing for good")
    everybody = slice(0, len(population(name).data))
    for others in (ft.Faults(), ft.duplicated()):
        clients = population(name, 3)
        hears = ft.Faults(before=lambda keys, ids: random.bernoulli(keys, 0.2) | (ids == 1))
        arrives = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 0.2))
        run = ft.Run(algorithm, clients, moved(start(name, algorithm), algorithm), faults=hears | arrives | others)
        assert distance(run.server.total, run.clients.total()) < ROUNDING
        for round in run.rounds(4):
            states = round.clients.state_dict()
            asked = len(states["ids"]) > 0
            told = algorithm.told.of(tree.unflatten(states, initial_state(run), "state")) if asked else None
            others = [k for k in range(everybody.stop) if k not in states["ids"].tolist()]
            initial = tree.expand(initial_state(run), len(others))
            whole = algorithm.told.of(initial) if told is None else tree.concatenate([told, algorithm.told.of(initial)])
            order = torch.cat([states["ids"], torch.tensor(others, dtype=torch.int64)]).argsort()
            expected = sum_over(algorithm.exchange, tree.take(whole, order), everybody)
            assert distance(round.server.total, expected) < ROUNDING
            assert distance(round.clients.total(), expected) < ROUNDING
        monkeypatch.setattr(running, "TOTAL_ANEW", 5)
        run.server = run.server._replace(total=tree.map(lambda leaf: leaf + 1, run.server.total))
        after = run.step()
        assert distance(after.server.total, after.clients.total()) < ROUNDING


def moved(parameters: Tree, algorithm: ft.Algorithm) -> Tree:
    """A start that is not zero."""
    parameters = algorithm.start if parameters is None else parameters
    return parameters if algorithm.start is None else tree.map(lambda leaf: leaf + 0.25, parameters)


def initial_state(run: ft.Run) -> Tree:
    clients = run.clients
    return (clients if hasattr(clients, "table") else clients.clients).table.initial


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_aggregates_alike_in_any_blocks(name: str) -> None:
    made = EXCHANGES[name]()
    generator = torch.Generator().manual_seed(0)
    value = {"w": torch.randn(CLIENTS, 2, 3, generator=generator, dtype=torch.float64)}
    messages: Tree = (Mean(value, torch.rand(CLIENTS, generator=generator) + 0.1),)
    messages += () if name.startswith("robust") else (Sum(value),)
    order = torch.randperm(CLIENTS, generator=generator)
    ways: list[list[Any]] = [
        [slice(0, CLIENTS)],
        [torch.tensor([int(k)]) for k in order],
        list(order.split([2, 0, 3, 1])),
    ]
    results = []
    for blocks in ways:
        partials = [made.gather(tree.take(messages, ids), ids) for ids in blocks]
        for merged in (made.merge(partials), made.merge([made.merge(partials[::-1])])):
            results.append(made.finish(merged))
    assert all(distance(result, results[0]) < ROUNDING for result in results)


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_counts_bytes_by_client(name: str) -> None:
    made = EXCHANGES[name]()
    message, outbox = Sum({"w": torch.zeros(CLIENTS, 3)}), {"w": torch.zeros(CLIENTS, 5)}
    one = made.traffic(outbox, tree.take(message, slice(0, 1)), slice(0, 1))
    assert made.traffic(outbox, message, slice(0, CLIENTS)) == (CLIENTS * one[0], CLIENTS * one[1])
    assert made.traffic(outbox, tree.take(message, slice(0, 0)), torch.zeros(0, dtype=torch.int64)) == (0, 0)


def test_algorithms_receive_prepared_blocks() -> None:
    """`prepare` of every algorithm accepts a `ClientData` block, also an empty one."""
    for name, make in ALGORITHMS.items():
        data = population(name).data
        for ids in (range(len(data)), []):
            block = data.stack(ids)
            assert isinstance(block, ClientData)
            assert all(len(leaf) == len(block.count) for leaf in tree.leaves(make().prepare(block)))
