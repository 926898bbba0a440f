"""A server that knows by which key clients draw reads rows out of sums; a site that counts rows has keys of its own.

A site is one client of a hundred people, each with a secret that is a fair coin; the server knows in which order they
stand. What the site answers is a sum over the rows of a batch, or over responses drawn anew. By the server's keys such
sums are equations in the rows. By keys of the site's secret who solves them has as many right as a coin.
"""

from __future__ import annotations

import pandas
import pytest
import torch
from scipy.stats import binom
from support.loopback import Clock, Loopback
from support.sites import offers, servers_keys
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.runs.cohorts import RoundKeys
from fedtorch.federation.solvers.batches import PERMUTATIONS
from fedtorch.federation.turn import Turn
from fedtorch.inference.checks import MEANS
from fedtorch.models.hierarchical import generalised, normal
from fedtorch.models.hierarchical.families import LOGISTIC
from fedtorch.random.named import numbers
from fedtorch.sites import Policy, Remote, SiteConfiguration
from fedtorch.sites.rounds import frames, sites as meeting
from fedtorch.sites.rounds._pseudonyms import Pseudonyms
from fedtorch.sites.rounds.session import SiteSession
from fedtorch.sites.rounds.site import Site

ROWS, BATCH = 100, 20
TEN = Policy(after_fit=("checks",))
SECRETS = (torch.rand(ROWS, generator=torch.Generator().manual_seed(0)) < 0.5).double()


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, same_secret: None) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def chance(right: int, trials: int = ROWS) -> bool:
    """Whether a coin is right as often, but for once in ten thousand times."""
    low, high = binom.interval(0.9999, trials, 0.5)
    return bool(low <= right <= high)


def right(guess: Tensor) -> int:
    return int((guess == SECRETS.bool()).sum())


# -- minibatches -------------------------------------------------------------------------------------------------------


def averaged(batch_size: int = BATCH, steps: int = 1) -> ft.Algorithm:
    """A step is minus the mean of a batch's secrets, where the start is zero and all responses are -1/2."""
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    module, loss = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64), torch.nn.functional.mse_loss
    limits = {"steps": steps, "batch_size": batch_size}
    return ft.fedavg(ft.gradient_descent(module, loss=loss, optimizer=sgd, **limits))  # type: ignore[arg-type]


class Asked:
    """A site that a server asks for rounds with keys and starts of its choice."""

    def __init__(self, policy: Policy = TEN, clients: int = 1) -> None:
        x = SECRETS[:, None]
        rows = (x, torch.full_like(x, -0.5))
        self.data = ft.data.from_tensors([rows] * clients, names=[f"ward {k}" for k in range(clients)])
        make = lambda batch_size, steps: averaged(batch_size, steps)
        self.host = Loopback(offers(self.data, make, sites=1, policy=policy), None)

    def run(self, batch_size: int = BATCH, steps: int = 1) -> ft.Run:
        settings = {"batch_size": batch_size, "steps": steps}
        remote = Remote(self.host, ["a"], "it", settings, rows=self.data.rows, quorum=1.0, seconds=0.05)
        return ft.Run(averaged(batch_size, steps), remote, {"weight": torch.zeros(1, 1).double()})

    def sums(self, rounds: int, batch_size: int = BATCH, start: float = 0.0) -> Tensor:
        """Return how many rows of each round's batch have the secret, as the site's answers tell it `(rounds,)`."""
        run, told = self.run(batch_size), []
        for _ in range(rounds):
            run.server = {"weight": torch.full((1, 1), start, dtype=torch.float64)}
            run.step()
            told.append((start - run.server["weight"]) / (2 * start + 1) * batch_size)
        return torch.cat(told)[:, 0]

    def order(self, number: int) -> Tensor:
        """Return the order of the rows in a round's batches, as a server computes it `(100,)`."""
        drawn = Turn(RoundKeys(0)(number).client, number, names=numbers(self.data.names)).keys(torch.tensor([0]))
        permutations = random.fold_in(random.fold_in(drawn, PERMUTATIONS), 0)
        return random.permutation(permutations[:, None], ROWS, torch.tensor([ROWS])).flatten()


def solved(rounds: int) -> int:
    """How many secrets are right that solve the sums over so many batches."""
    site = Asked()
    rows = torch.zeros(rounds, ROWS).double()
    for number in range(rounds):
        rows[number, site.order(number)[:BATCH]] = 1.0
    told = site.sums(rounds)[:, None]
    return right(torch.linalg.lstsq(rows, told, driver="gelsd").solution[:, 0] > 0.5)


def test_sums_over_batches_that_a_server_knows_are_equations_in_the_rows() -> None:
    with servers_keys():
        assert solved(120) == ROWS
    assert chance(solved(120))


def of_one_row() -> int:
    """How often batches of 20 and 21 rows by the same keys differ by nought or one, as they do by one row's secret."""
    site = Asked()
    told = (site.sums(ROWS, 21) - site.sums(ROWS, 20)).round()
    return int((told == told.clamp(0, 1)).sum())


def test_batches_of_other_settings_are_no_larger_ones_of_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_one_row() < ROWS / 2
    monkeypatch.setattr(SiteSession, "_settings", {})
    assert of_one_row() == ROWS


def test_another_start_has_other_batches() -> None:
    """The same rows at many starts would be a client of these few rows."""
    site = Asked()
    assert torch.equal(site.sums(20).round(), site.sums(20).round())
    assert (site.sums(20).round() != site.sums(20, start=1.0).round()).sum() > 5
    with servers_keys():
        assert torch.equal(site.sums(20).round(), site.sums(20, start=1.0).round())


def test_a_message_of_fewer_rows_than_the_minimum_does_not_leave() -> None:
    few = "the site answers with numbers of at least 10 rows, and a round's batches have as few as {} of a client"
    for batch_size, steps, fits in ((1, 1, False), (9, 1, False), (3, 3, False), (10, 1, True), (1, 10, True)):
        run = Asked().run(batch_size, steps)
        if fits:
            run.step()
            continue
        with pytest.raises(RuntimeError, match=few.format(batch_size * steps)):
            run.step()
    Asked(clients=2).run(5).step()  # ten rows of two clients, of whom a sum leaves
    Asked(Policy(minimum=1)).run(1).step()


# -- responses drawn anew ----------------------------------------------------------------------------------------------


def replicated(policy: Policy, draws: int = 800) -> int:
    """How many secrets are right by one question's sums of responses drawn anew, at draws that are all the same.

    A row's response is yes with probability 1/2, or with another where it has the secret.
    """
    x = torch.stack([torch.ones(ROWS).double(), SECRETS], 1)
    data = ft.data.from_tensors([(x, (torch.arange(ROWS) % 2).double())], names=["ward"])
    make = lambda: ft.ep(generalised.logistic(normal(2, random=[], names=["Intercept", "secret"])))
    host = Loopback(offers(data, make, sites=1, policy=policy), None)
    run = ft.Run(make(), Remote(host, ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05))
    run.step()
    phi, key = torch.tensor([0.0, 2.0]).double().expand(draws, 2).clone(), ft.random.key(7)
    told = run.clients.ask(run.outbox, MEANS, {"phi": phi, "key": key}, {})["replicated"][0]
    of_rows = random.split(random.fold_in(key, numbers(data.names)), 2)[1]
    uniform = random.uniform(random.fold_in(of_rows[:, None], torch.arange(ROWS)), (draws,), torch.float64)[0].mT
    yes = lambda eta: LOGISTIC.draw(uniform, torch.full_like(uniform, eta), torch.ones_like(uniform))
    without, more = yes(0.0).sum(1), yes(2.0) - yes(0.0)
    guess = torch.linalg.lstsq(more, (told - without)[:, None], driver="gelsd").solution[:, 0]
    return right(guess > 0.5)


def test_sums_of_responses_drawn_anew_by_a_key_that_a_server_knows_are_equations_in_the_rows() -> None:
    assert replicated(TEN._replace(minimum=1)) == ROWS
    assert chance(replicated(TEN))


def test_a_question_has_the_same_draws_again_and_another_has_others() -> None:
    """So that what two questions tell is not at the same draws of their responses."""
    x = torch.stack([torch.ones(ROWS).double(), SECRETS], 1)
    make = lambda: ft.ep(generalised.logistic(normal(2, random=[])))

    def fitted(rows: int = ROWS) -> ft.Run:
        data = ft.data.from_tensors([(x[:rows], (torch.arange(rows) % 2).double())])
        host = Loopback(offers(data, make, sites=1, policy=TEN), None)
        run = ft.Run(make(), Remote(host, ["a"], "it", rows=data.rows, quorum=1.0, seconds=0.05))
        run.step()
        return run

    whole = fitted()

    def told(intercept: float, key: int = 0, run: ft.Run = whole) -> Tensor:
        phi = torch.tensor([intercept, 0.0]).double().expand(50, 2).clone()
        answer: dict[str, Tensor] = run.clients.ask(run.outbox, MEANS, {"phi": phi, "key": ft.random.key(key)}, {})
        return answer["replicated"]

    assert torch.equal(told(0.0), told(0.0))
    assert not torch.equal(told(0.0), told(0.0, key=1))
    assert not torch.equal(told(0.0), told(1e-12))
    of_one = lambda: (told(0.0) - told(0.0, run=fitted(ROWS - 1))).unique().tolist()
    assert min(of_one()) < 0, "rows of which one is new have other draws"
    with servers_keys():
        assert torch.equal(told(0.0), told(1e-12))
        assert of_one() == [0.0, 1.0]


# -- the order of clients ----------------------------------------------------------------------------------------------


def by_rank(policy: Policy) -> int:
    """How many of a hundred patients are in the right half of the frame by where their pseudonyms stand."""
    frame = pandas.DataFrame({"patient": [f"B-{1000 + k}" for k in range(ROWS)], "age": range(ROWS)})
    site = Site(SiteConfiguration.of_frame(frame, "patient", {"it": averaged}, policy=policy))
    told = frames.read(site.hello(), "a").texts("clients")
    pseudonyms = Pseudonyms(None)
    pseudonyms._secret = site._names._secret
    place = {name: k for k, name in enumerate(pseudonyms.aliases(tuple(frame["patient"]), hidden=True))}
    return sum((place[name] < ROWS // 2) == (k < ROWS // 2) for k, name in enumerate(told))


def test_pseudonyms_stand_in_an_order_that_tells_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chance(by_rank(TEN))
    monkeypatch.setattr(Site, "_in_order", lambda site, configuration: configuration)
    assert by_rank(TEN) == ROWS


def test_all_that_a_site_has_of_each_client_is_in_one_order() -> None:
    """Rows, validation rows and names; of a frame, where names are told, too: the first may have the youngest."""
    rows, names = [(torch.full((3 + k, 1), float(k)), torch.zeros(3 + k)) for k in range(8)], tuple("hgfedcba")
    data, held_out = (ft.data.from_tensors(rows, names=names) for _ in range(2))
    site = Site(SiteConfiguration(data, {"it": averaged}, validation=held_out))
    ordered, validation = site.configuration.data, site.configuration.validation
    assert validation is not None
    told = frames.read(site.hello(), "a").texts("clients")
    assert told == sorted(told)
    assert set(ordered.names) == set(names)
    assert ordered.names == validation.names == tuple(sorted(names, key=lambda name: site._names.aliases([name], True)))
    for k, name in enumerate(ordered.names):
        assert torch.equal(ordered[k][0], data[names.index(name)][0])
        assert torch.equal(validation[k][0], data[names.index(name)][0])
    wide = SiteConfiguration(data, {"it": averaged}, Policy(minimum=3))
    assert Site(wide).configuration.data.names == names  # names that are told stand as the site has them
    frame = pandas.DataFrame({"ward": ["south", "north"] * 10, "age": range(20)})
    of_frame = SiteConfiguration.of_frame(frame, "ward", {"it": averaged})
    assert Site(of_frame).configuration.data.names == ("north", "south")
