"""Every field of every frame that a site sends stands in the run's disclosure, with its shape and of whom it is."""

from __future__ import annotations

import fnmatch
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas
import pytest
import torch
from support.certified import certified
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import linear, linear_clients, mean_squared_error, sgd
from support.sites import Carried, carry_of, offers, parts
from test_conformance import ALGORITHMS, POOLED, STARTS, population

import fedtorch as ft
from fedtorch import tree, trust
from fedtorch.federation.algorithms.ep import settled
from fedtorch.learns import Field
from fedtorch.models import hierarchical
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree, masked, sealed
from fedtorch.sites.rounds import frames, sites as meeting
from fedtorch.sites.rounds.disclosed import NUMBERS
from fedtorch.trust import privacy

DATA = linear_clients([5, 2, 9, 4, 17, 6])
RING = ft.Network.ring(6)
EVERYTHING = ("effects", "densities", "margins", "checks")
Leaving = list[tuple[str, str, tuple[int, ...] | None]]  # message, field, shape of a tensor


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


class Listener:
    """Take down what sites say, by what they were asked."""

    def __init__(self, host: Loopback) -> None:
        self.said: Leaving = []
        self._asked: dict[tuple[str, int], frames.Frame] = {}
        for name, payload in host.frames:
            self._hello(name, payload)
        host.before, host.after = self._hear, self._say

    def _hear(self, name: str, payload: bytes) -> bool:
        frame = frames.read(payload, "server")
        if "sequence" in frame.about:
            self._asked[name, frame.integer("sequence")] = frame
        return True

    def _say(self, name: str, payload: bytes) -> bytes:
        frame = frames.read(payload, name)
        if frame.kind in ("hello", "refusal"):
            self._hello(name, payload)
            return payload
        request = self._asked[name, frame.integer("sequence")]
        message = f"ask {request.text('question')}" if request.kind == "ask" else request.kind
        self._note(message, frame)
        return payload

    def _hello(self, name: str, payload: bytes) -> None:
        frame = frames.read(payload, name)
        self._note(frame.kind, frame)

    def _note(self, message: str, frame: frames.Frame) -> None:
        self.said += [(message, name, None) for name in _texts(frame.about) if name != "kind"]
        self.said += [(message, name, tuple(shape)) for name, shape in _tensors(frame.payload)]


def _texts(about: Mapping[str, Any]) -> Iterator[str]:
    for name, value in about.items():
        if name in ("sizes", "refused"):
            yield from (f"{name}.{inner}" for inner in value)
        elif name == "answer":  # of columns
            for inner, each in value.items():
                yield from ([f"{inner}.{column}" for column in each] if isinstance(each, dict) else [inner])
        else:
            yield name


def _tensors(payload: bytes) -> Iterator[tuple[str, list[int]]]:
    size = struct.unpack("<Q", payload[:8])[0]
    header = json.loads(payload[8 : 8 + size])
    for name, entry in header.items():
        if not name.startswith("__"):  # of metadata, and numbers of frames
            yield name, entry["shape"]


def uncovered(said: Leaving, fields: list[Field]) -> set[tuple[str, str]]:
    """What no field of the disclosure stands for, or one of another shape."""
    out = set()
    for message, name, shape in said:
        path = name.removeprefix("partial.").replace("told.message.", "told.").removeprefix("message.")
        if any(fnmatch.fnmatch(path, number) for number in NUMBERS):
            continue
        found = [f for f in fields if f.message == message and fnmatch.fnmatch(path, f.field)]
        if not found or not all(_fits(field, path, shape) for field in found):
            out.add((message, name))
    return out


def _fits(field: Field, path: str, shape: tuple[int, ...] | None) -> bool:
    """Whether a tensor is one client's after another, or their sum, as the field says; patterns have no shape."""
    if shape is None or field.field != path or path.endswith("ids"):
        return True
    return shape == field.shape if field.of.endswith("sum") else shape[1:] == field.shape


def listened(
    make: Any, data: ft.data.FederatedData, start: Any, sites: int = 3, **more: Any
) -> tuple[ft.Run, Listener]:
    """A run over sites in this thread, and what they have said."""
    known = certified("abc") if carry_of(make).masks is not None or carry_of(make).network is not None else None
    policy = Policy(after_fit=("effects", "densities", "margins", "checks"), minimum=1)
    brought = offers(data, make, start, sites=sites, policy=policy, **more)
    host = Loopback(brought, None, None if known is None else known.identities)
    listener = Listener(host)
    roster = {} if known is None else {"roster": known.roster}
    remote = Remote(host, list(brought), "it", rows=data.rows, carry=carry_of(make), **roster)  # type: ignore[arg-type]
    algorithm = make()
    run = ft.Run(algorithm, remote, start if algorithm.start is None else None)
    return run, listener


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_that_an_algorithm_says_is_disclosed(name: str) -> None:
    here = population(name)
    run, listener = listened(ALGORITHMS[name], here.data, STARTS.get(name), sites=1 if name in POOLED else 3)
    for _ in run.rounds(2):
        pass
    if run.algorithm.told is not None:
        run.clients.total()
    assert {message for message, _, _ in listener.said} >= {"hello", "round"}
    assert uncovered(listener.said, disclosed(run)) == set()


def disclosed(run: ft.Run) -> list[Field]:
    """What leaves in a run."""
    turn = ft.Turn(ft.random.key(0), run.number)
    return run.clients.disclosed(run.algorithm, run.population.carry, run.outbox, turn)


def scaffold() -> ft.Algorithm:
    return ft.scaffold(sgd(0.05))


@pytest.mark.parametrize("make", [Carried(scaffold, masked(dropouts=0)), Carried(ALGORITHMS["gtv"], sealed(RING))])
def test_what_is_hidden_leaves_as_words_and_losses_do_not(make: Carried) -> None:
    run, listener = listened(make, DATA, None)
    for _ in run.rounds(2):
        pass
    run.clients.total()
    assert uncovered(listener.said, disclosed(run)) == set()
    table = run.disclosure()
    assert not table["field"].str.startswith("info.").any()
    rounds = table[table["message"].eq("round") & table["field"].str.contains("value")]
    hidden = {"a sum of at least 3 sites"} if make.carry.masks else {"a client"}
    assert set(rounds["of"]) == hidden
    assert set(rounds["reader"]) == ({"the server"} if make.carry.masks else {"its neighbours, sealed"})


def test_questions_scores_and_refusals_are_disclosed() -> None:
    wards = [f"ward {k}" for k in range(6)]
    frame = pandas.DataFrame(
        {"ward": wards * 20, "sex": ["f", "m", "m"] * 40, "age": [50.0 + i % 17 for i in range(120)]}
    )
    frame["died"] = [float((7 * i) % 5 < 2) for i in range(120)]
    fit = lambda design: ft.ep(hierarchical.regression(design, "logistic"))
    policy = Policy(after_fit=EVERYTHING)
    parts = {name: frame[frame["ward"].isin(own)] for name, own in zip("ab", (wards[:3], wards[3:]))}
    host = Loopback(
        {n: SiteConfiguration.of_frame(part, "ward", {"it": fit}, policy=policy) for n, part in parts.items()}, None
    )
    listener = Listener(host)
    design = agree(host, ["a", "b"], "died ~ scale(age) + sex + bs(age, 4) + (1 | ward)", client="ward")
    run = ft.Run(fit(design), Remote(host, ["a", "b"], "it", quorum=1.0))
    for _ in run.rounds(30, until=settled()):
        pass
    ft.inference.ranef(run)
    ft.inference.loo(run)
    host.sites["a"].watch.policy = Policy()
    with pytest.raises(RuntimeError, match="policy"):
        ft.inference.ranef(run)
    messages = {message for message, _, _ in listener.said}
    assert messages >= {"hello", "agree", "round", "refusal"}
    assert any(message.startswith("ask ") for message in messages)
    assert uncovered(listener.said, disclosed(run)) == set()


def test_scores_are_disclosed() -> None:
    training, validation = DATA.split(0.7, seed=0)
    metrics = {"mse": lambda prediction, target: (prediction[..., 0] - target) ** 2}
    brought = offers(training, lambda: ft.fedavg(sgd(0.1)))
    held = parts(validation, 3)
    host = Loopback({n: replace(c, validation=v, metrics=metrics) for (n, c), v in zip(brought.items(), held)}, None)
    listener = Listener(host)
    remote = Remote(host, ["a", "b", "c"], "it", rows=DATA.rows, quorum=1.0)
    run = ft.run(ft.fedavg(sgd(0.1)), remote, rounds=1)
    run.evaluate(remote.validation, metrics)
    assert "evaluate" in {message for message, _, _ in listener.said}
    assert uncovered(listener.said, disclosed(run)) == set()


def test_a_field_that_nobody_has_declared_is_found() -> None:
    """The check itself: a frame with one more tensor, or one of another shape, is not covered."""
    run, listener = listened(scaffold, DATA, None)
    run.step()
    fields = disclosed(run)
    assert uncovered(listener.said, [f for f in fields if f.field != "info.loss"]) == {("round", "info.loss")}
    assert uncovered([("round", "partial.fresh.change.value.weight", (7, 3))], fields) != set()
    assert uncovered([("round", "partial.fresh.more", (1,))], fields) == {("round", "partial.fresh.more")}


def test_an_algorithm_of_ones_own_reads_a_clients_exact_values() -> None:
    def client(inbox: Any, state: Any, data: Any, turn: ft.Turn) -> ft.Reply:
        return ft.Reply(ft.Sum(data.count.double()), state, {})

    own = ft.Algorithm(
        init=lambda parameters, clients: (parameters, ()), outbox=lambda server: server, client=client,
        server=lambda server, aggregate, key: server, model=lambda inbox, state: inbox,
    )  # fmt: skip
    table = ft.Run(own, ft.InProcess(DATA), torch.zeros(())).disclosure()
    assert table[["field", "of", "exactness", "learns"]].values.tolist() == [
        ["value", "a client", "exact", "a client's exact values"]
    ]


def sending(message: Any, info: Any = lambda data: {}) -> ft.Algorithm:
    """An algorithm whose clients send what is made of their rows, and note more beside it."""
    return ft.Algorithm(
        init=lambda parameters, clients: (parameters, ()),
        outbox=lambda server: server,
        client=lambda inbox, state, data, turn: ft.Reply(ft.Sum(message(data)), state, info(data)),
        server=lambda server, aggregate, key: server,
        model=lambda inbox, state: inbox,
        start=torch.zeros(()),
    )


@pytest.mark.parametrize(
    "message",
    [
        lambda data: data.batch[0].sum(1)[:, : 1 + int(data.count.sum()) % 2],  # as many numbers as clients differ in
        lambda data: {"even" if int(data.count.sum()) % 2 == 0 else "odd": data.count.double()},
    ],
    ids=["shapes", "fields"],
)
def test_clients_that_send_other_fields_or_shapes_than_others_are_refused(message: Any) -> None:
    """Shapes that differ would be added up side by side, and a disclosure would name those of some clients."""
    run = ft.Run(sending(message), ft.InProcess(DATA, chunk=1))
    with pytest.raises(ValueError, match="messages of the same fields and shapes of all clients"):
        run.step()


def test_what_only_some_clients_note_is_disclosed_once_they_have() -> None:
    """In one process, at the server of sites, and at the site."""
    note = lambda data: {"age": data.count.double()} if int(data.count[:1].sum()) == 9 else {}
    make = lambda: sending(lambda data: data.count.double(), note)
    noted = lambda run: set(run.disclosure()["field"]) - {"value"}
    run = ft.Run(make(), ft.InProcess(DATA, chunk=1))
    assert noted(run) == set()
    run.step()
    assert noted(run) == {"info.age"}
    there, listener = listened(make, DATA, torch.zeros(()), chunk=1)
    there.step()
    assert ("round", "info.age", (2,)) in listener.said
    assert uncovered(listener.said, disclosed(there)) == set()
    leaves = [site._session.leaves for site in there.population.plan.sites.host.sites.values()]
    assert [{field.field for field in each} for each in leaves] == [{"value"}, {"value", "info.age"}, {"value"}]


PRIVATE = {
    "client_level": lambda: (
        ft.fedavg(sgd(0.1), weight=lambda data: torch.ones_like(data.count))
        | privacy.client_level(clip=1.0, noise=4.0, delta=1e-3)
    ),
    "example_level": lambda: ft.fedavg(
        privacy.example_level(
            linear(),
            loss=mean_squared_error,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            steps=2,
            sampling_rate=0.5,
            clip=1.0,
            noise=4.0,
            delta=1e-3,
        )
    ),
    "local_level": lambda: ft.fedavg(sgd(0.1)) | privacy.local_level(clip=1.0, noise=4.0, delta=1e-3),
    "node_level": lambda: ALGORITHMS["gtv"]() | privacy.node_level(clip=1.0, noise=4.0, delta=1e-3),
    "sufficient_statistics": lambda: ft.fedavg(
        privacy.sufficient_statistics(linear(), clip_features=1.0, clip_targets=1.0, noise=4.0, delta=1e-3)
    ),
}


def test_attacks_that_are_named_are_there() -> None:
    every = {
        field.learns.attack
        for name in ALGORITHMS
        for field in disclosed(ft.Run(ALGORITHMS[name](), population(name), STARTS.get(name)))
    } - {""}
    assert every
    for attack in every:
        package, _, name = attack.partition(".")
        assert callable(getattr(getattr(trust, package), name))


@pytest.mark.parametrize("name", PRIVATE)
def test_what_reads_noised_has_noise_and_what_reads_exact_has_none(name: str) -> None:
    """Two runs of one seed differ, by noise of the system, in the fields that read noised and in no others."""
    messages, runs = [], []
    for _ in range(2):
        run = ft.Run(PRIVATE[name](), ft.InProcess(DATA))
        sent = run.clients.algorithm.exchange.gather
        kept: list[Any] = []
        run.clients.algorithm = replace(
            run.clients.algorithm,
            exchange=run.clients.algorithm.exchange._replace(
                gather=lambda m, ids, kept=kept, sent=sent: kept.append(m) or sent(m, ids)
            ),
        )
        run.step()
        messages.append(tree.flatten(kept[0]))
        runs.append(run)
    fields = {field.field: field.exactness for field in disclosed(runs[0]) if not field.field.startswith("info.")}
    assert fields.keys() == messages[0].keys()
    for field, exactness in fields.items():
        same = torch.equal(messages[0][field], messages[1][field])
        assert same == (exactness == "exact"), field
