r"""Differential privacy of whole clients: clipped messages, noise on their sum.

Every client's message is clipped to a norm of at most C; the server adds noise of z·C to the sum and divides by the
*expected* number m of clients, never by their actual number or weight:

.. math:: \bar v = \frac1m \Bigl(\sum_k v_k \min(1, C / \|v_k\|) + z\, C\, \xi\Bigr).

*Who is protected:* one client, all its rows in all rounds; two neighbouring federations differ in one client whose
messages are zeros in one of them (zero-out). *From whom:* everybody who sees the server's states, models and everything
derived from them. Not protected: messages, against the server itself; a client's own state (personal layers), and the
history's lists of answers. With a `sampling_rate`, adversaries who can compute the cohort are excluded: it is drawn
from the operating system's entropy, independently of the seed.

For an algorithm with persistent contributions (`ft.scaffold`, `ft.feddyn`), every round also releases the running
total; see `fedtorch.trust.privacy.mechanisms._totals`.

Sources: McMahan, Ramage, Talwar and Zhang (2018), "Learning differentially private recurrent language models",
Algorithm 1; zero-out: Kairouz et al. (2021), "Practical and private (deep) learning without sampling or shuffling".

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import privacy
>>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0]))] * 20)
>>> average = ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))
>>> private = average | privacy.client_level(clip=1.0, noise=1.0, sampling_rate=0.5, delta=1e-2, budget=6.0)
>>> run = ft.run(private, ft.InProcess(data), rounds=100)  # ends when the budget is spent
>>> run.number < 100, bool(run.history["epsilon"].iloc[-1] <= 6.0)
(True, True)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.exchanges.exchange import Exchange, Mean, Sent, Sum, client_count
from fedtorch.federation.turn import Turn
from fedtorch.federation.wrapper import Stage, Wrapper
from fedtorch.random.entropy import Entropy, from_system
from fedtorch.tree import Rows, Tree
from fedtorch.trust.privacy._checks import check_clip, check_no_averaged_buffers, check_noise, check_rate
from fedtorch.trust.privacy.accounting.accountant import Release
from fedtorch.trust.privacy.accounting.ledger import NO_GUARANTEE, SYSTEM, UNSEEN, Claim, Ledger
from fedtorch.trust.privacy.accounting.spending import Spending, check_delta_of, on_grid
from fedtorch.trust.privacy.clipping import AdaptiveClip, Clip, bounds_of, clip_rows
from fedtorch.trust.privacy.mechanisms._totals import check_total, noised_totals
from fedtorch.trust.privacy.noise import Mechanism, gaussian

ADJACENCY = "zero-out: one client sends zeros instead of its messages, in all rounds"
ADVERSARY = "everybody who sees the server's states and models; not the server itself, which sees every message"
LISTENERS = (
    "everybody who hears what the server sends out or sees models; not the server itself, which sees every message and "
    "keeps their total"
)
SAMPLED = f"{ADVERSARY}{UNSEEN}"


class AdaptiveState(NamedTuple):
    """The server's state with an adaptive clip."""

    inner: Tree  # state of the algorithm
    clip: Tensor  # () float64, the bound C


class _Outbox(NamedTuple):
    """Broadcast of the server with an adaptive clip, and a client's inbox."""

    parameters: Tree  # parameters of the algorithm
    clip: Tensor  # () float64, (K,) at clients


class _Told(NamedTuple):
    """A client's message with an adaptive clip."""

    message: Tree
    within: Mean  # 1 − γ where the norm was within the bound, −γ elsewhere


class _Settings(NamedTuple):
    """Arguments of `client_level`."""

    clip: Clip
    noise: float
    delta: float
    sampling_rate: float
    size: int | None
    clip_told: float | None
    mechanism: Mechanism


def client_level(
    clip: Clip,
    noise: float,
    *,
    delta: float,
    sampling_rate: float = 1.0,
    size: int | None = None,
    clip_told: float | None = None,
    mechanism: Mechanism = gaussian,
    budget: float | None = None,
    ledger: Path | str | None = None,
    entropy: Entropy | None = None,
) -> Wrapper:
    """Build the wrapper that clips and noises messages, so that no client can be told from zeros beyond (ε, δ).

    For algorithms whose clients send `Mean`s on a star, such as `ft.fedavg`, `ft.fedadam`, `ft.personal_layers`.
    Weights of messages, which depend on the clients' data, are set to one. The history has `epsilon` after every round;
    losses, which clients would send without noise, are left out unless the noise is seeded.

    Args:
        clip: the bound C on a message's norm (Euclidean, or the sum of absolute values for `laplace`); bounds by shell
            pattern of parameter names; or `AdaptiveClip()`, which spends a share of the budget.
        noise: z, in units of the sensitivity: the server adds z·C to every number of the sum, for L bounds by name
            z·√L·C_l (`laplace`: z·L·C_l).
        delta: δ of all ε, below one over the number of clients.
        sampling_rate: probability with which every round draws each client, in secret; 1 asks all.
        size: instead of a rate, a fixed number of clients in each round, uniformly; its rounds count as if all had been
            asked.
        clip_told: bound on the norm of a client's persistent contribution, if the algorithm has one; the sum of
            messages and the total then both get √2 times the noise (`laplace`: twice).
        mechanism: `gaussian` or `laplace`.
        budget: the largest ε: a run ends before the round that would exceed it.
        ledger: an append-only file, in which the spending of all runs on these clients adds up. None keeps the ledger
            in memory. If it was created with a rate below one, its claim excludes adversaries who know the cohorts, and
            runs of any rates add up; otherwise sampled rounds are counted as if all clients had been asked.
        entropy: source of noise and cohorts; default: the operating system's. `from_seed(0)` makes a simulation
            reproducible and guarantees nothing, as its ledger states.

    Returns:
        A wrapper for runs without `cohort=`, because the accountant has to know how clients are drawn. All algorithms
        that it wraps spend from one ledger.

    Raises:
        ValueError: clip, noise, δ, rate, size or budget out of range. In wrapping: an algorithm whose totals do not
            allow noise; an exchange that is not additive; another privacy wrapper.
    """
    settings = _Settings(clip, noise, delta, sampling_rate, size, clip_told, mechanism)
    _check_settings(settings)
    entropy = from_system() if entropy is None else entropy
    adversary = LISTENERS if clip_told is not None else SAMPLED if sampling_rate < 1 else ADVERSARY
    claim = Claim("client", ADJACENCY, adversary, SYSTEM if entropy.guarantees else NO_GUARANTEE)
    release, account = Release(float(noise), float(sampling_rate), mechanism), Ledger(ledger, claim, delta, budget)

    def wrap(algorithm: Algorithm) -> Algorithm:
        _check(algorithm, clip_told)
        check_no_averaged_buffers(algorithm)
        spending = Spending(
            account, release, 1, entropy, partial(_check_clients, delta), sampling_rate, size, quorum=None
        )
        return _private(algorithm, settings, spending)

    about = settings._replace(mechanism=mechanism.name)._asdict()  # type: ignore[arg-type]
    return Wrapper(Stage.PRIVACY, "privacy.client_level", wrap, about)


def _private(algorithm: Algorithm, settings: _Settings, spending: Spending) -> Algorithm:
    adaptive = isinstance(settings.clip, AdaptiveClip)
    noise = settings.noise * settings.mechanism.join(1 if settings.clip_told is None else 2)  # number of joint releases
    if settings.clip_told is not None:
        algorithm = noised_totals(algorithm, settings.clip_told, noise, spending)
    return dataclasses.replace(
        algorithm,
        init=partial(_init, algorithm, settings),
        outbox=(lambda state: _Outbox(algorithm.outbox(state.inner), state.clip)) if adaptive else algorithm.outbox,
        client=partial(_client, algorithm, settings, not spending.entropy.guarantees),
        server=partial(_server, algorithm, settings),
        model=(lambda inbox, state: algorithm.model(inbox.parameters, state)) if adaptive else algorithm.model,
        exchange=_noised(algorithm.exchange, settings.clip, noise, spending),
        report=partial(_report, algorithm) if adaptive else algorithm.report,
        budget=spending,
    )


def _check_settings(settings: _Settings) -> None:
    check_clip(settings.clip)
    check_noise(settings.noise)
    check_rate(settings.sampling_rate)
    if settings.size is not None and (settings.sampling_rate != 1 or settings.size < 1):
        raise ValueError(
            f"Expected either a rate or a size of at least 1, but got {settings.sampling_rate} and {settings.size}"
        )
    if isinstance(settings.clip, AdaptiveClip) and settings.mechanism is not gaussian:
        raise ValueError("Expected gaussian noise for an adaptive clip, whose budget is a share of Gaussian releases")
    if settings.clip_told is not None:
        check_clip(settings.clip_told)
        if settings.sampling_rate < 1 or isinstance(settings.clip, AdaptiveClip):
            raise ValueError(
                "Expected neither a rate nor an adaptive clip with a total, but got one: a client that is silent stays "
                "in every total, so that sampling amplifies nothing; ask some by size="
            )


def _check(algorithm: Algorithm, clip_told: float | None) -> None:
    if algorithm.told is not None:
        check_total(algorithm.told)
    if (algorithm.told is None) != (clip_told is None):
        raise ValueError(
            f"Expected clip_told= for algorithms with persistent contributions, and for these only, but got "
            f"{clip_told}: their running total is released in every round; ft.fedavg and its variants have none"
        )
    if not algorithm.exchange.additive:
        raise ValueError(
            "Expected an exchange that adds messages up, such as ft.star(), but got one that keeps them apart (a "
            "graph, private rows, a median): clipping does not bound what one client changes there"
        )
    if algorithm.budget is not None:
        raise ValueError("Expected an algorithm without a budget of its own, but got one: choose one level of privacy")


def _check_clients(delta: float, cohort: Any, clients: int) -> None:
    """Raise ValueError if a run's cohort or population is not the one that is accounted for."""
    if cohort is not None:
        raise ValueError(
            f"Expected no cohort=, but got {cohort}: the accountant has to know how clients are drawn, so pass "
            "sampling_rate= or size= to client_level, which draws the cohort itself"
        )
    check_delta_of(delta, "clients", cohort, clients)


def _init(algorithm: Algorithm, settings: _Settings, parameters: Tree, clients: int) -> tuple[Tree, Tree]:
    inner, state = algorithm.init(parameters, clients)
    if isinstance(settings.clip, AdaptiveClip):
        return AdaptiveState(inner, torch.tensor(settings.clip.start, dtype=torch.float64)), state
    return inner, state


def _client(
    algorithm: Algorithm, settings: _Settings, losses: bool, inbox: Tree, state: Tree, data: Any, turn: Turn
) -> Reply:
    """Return the algorithm's reply, its message clipped and in units of the bounds, its weights one."""
    clip = settings.clip
    adaptive = isinstance(clip, AdaptiveClip)
    reply = algorithm.client(inbox.parameters if adaptive else inbox, state, data, turn)
    values = tuple(mean.value for mean in _means(reply.message))
    one = torch.ones(len(turn.key), dtype=torch.float64, device=turn.key.device)
    if isinstance(clip, Mapping):
        bounds = [bound for value in values for bound in bounds_of(value, clip)]
        leaves = zip(tree.leaves(values), bounds)
        values = tree.refill(values, [clip_rows(leaf, bound, settings.mechanism)[0] / bound for leaf, bound in leaves])
    else:
        bound: float | Tensor = inbox.clip if isinstance(clip, AdaptiveClip) else clip
        values, norm = clip_rows(values, bound, settings.mechanism)
        values = tree.scale(values, 1 / bound)
    parts = iter(values)
    message: Tree = _map(lambda mean: Mean(next(parts), one), reply.message)
    if isinstance(clip, AdaptiveClip):
        message = _Told(message, Mean((norm <= bound).to(one) - clip.quantile, one))
    return Reply(message, reply.state, reply.info if losses else {})


def _server(algorithm: Algorithm, settings: _Settings, state: Tree, aggregate: Tree, key: Tensor) -> Tree:
    """Take the algorithm's step with the noised means in their own units."""
    clip = settings.clip
    if isinstance(clip, AdaptiveClip):
        inner = algorithm.server(state.inner, _in_units(aggregate.message, float(state.clip)), key)
        return AdaptiveState(inner, state.clip * math.exp(-clip.lr * float(aggregate.within.value)))
    return algorithm.server(state, _in_units(aggregate, clip), key)


def _in_units(aggregate: Tree, clip: float | Mapping[str, float]) -> Tree:
    """Return means of numbers that were divided by their bounds, times these."""

    def scaled(mean: Mean) -> Mean:
        bounds = bounds_of(mean.value, clip) if isinstance(clip, Mapping) else [clip] * len(tree.leaves(mean.value))
        return mean._replace(value=tree.refill(mean.value, [b * v for b, v in zip(bounds, tree.leaves(mean.value))]))

    return _map(scaled, aggregate)


def _noised(exchange: Exchange, clip: Clip, noise: float, spending: Spending) -> Exchange:
    """Return the exchange with noise on its sums in float64, whose rounding keeps every client within its bound."""

    def scatter(outbox: Tree, ids: Rows) -> Tree:
        if not isinstance(clip, AdaptiveClip):
            return exchange.scatter(outbox, ids)
        return _Outbox(exchange.scatter(outbox.parameters, ids), tree.expand(outbox.clip, client_count(ids)))

    def gather(messages: Tree, ids: Rows) -> Tree:
        return exchange.gather(tree.wide(messages), ids)

    def finish(partial: Tree) -> Tree:
        aggregate = exchange.finish(partial)
        if isinstance(aggregate, Sum):  # of persistent contributions, which only the server sees
            return aggregate
        if isinstance(aggregate, Sent):
            return aggregate._replace(fresh=noised(aggregate.fresh))
        return noised(aggregate)

    def noised(aggregate: Tree) -> Tree:
        if isinstance(clip, AdaptiveClip):
            message = _released(aggregate.message, noise / math.sqrt(1 - clip.share), "values", spending)
            bits = max(clip.quantile, 1 - clip.quantile) * noise / math.sqrt(clip.share)
            return _Told(message, _released(aggregate.within, bits, "bits", spending))
        parts = len(tree.leaves(tuple(mean.value for mean in _means(aggregate)))) if isinstance(clip, Mapping) else 1
        return _released(aggregate, noise * spending.release.mechanism.join(parts), "values", spending)

    return exchange._replace(scatter=scatter, gather=gather, finish=finish)


def _released(aggregate: Tree, scale: float, phase: str, spending: Spending) -> Tree:
    """Return the aggregate's sums with noise, divided by the clients that were expected."""
    means, expected = _means(aggregate), spending.expected
    sums = tuple(tree.scale(mean.value, float(mean.weight)) for mean in means)
    leaves = tree.leaves(tree.as_real(sums))
    flat = torch.cat([leaf.flatten() for leaf in leaves]).cpu()
    scales = torch.full_like(flat, scale)
    noised = on_grid(flat + spending.noise(phase, scales), scales).split([leaf.numel() for leaf in leaves])
    rows = [part.reshape(leaf.shape).to(leaf.device) for part, leaf in zip(noised, leaves)]
    values = iter(tree.scale(tree.from_real(tree.refill(sums, rows), sums), 1 / expected))
    weight = torch.tensor(expected, dtype=torch.float64)
    return _map(lambda mean: Mean(next(values), weight.to(mean.weight.device)), aggregate)


def _report(algorithm: Algorithm, state: AdaptiveState) -> dict[str, float | Tensor]:
    """Return the algorithm's report with the clipping bound."""
    return {**({} if algorithm.report is None else algorithm.report(state.inner)), "clip": state.clip}


def _means(message: Tree) -> list[Mean]:
    means: list[Mean] = []
    _map(lambda mean: means.append(mean) or mean, message)  # type: ignore[func-returns-value]
    if not means:
        raise ValueError("Expected clients that send a Mean, but they send none")
    return means


def _map(function: Any, message: Tree) -> Tree:
    def apply(node: Tree) -> Tree:
        if isinstance(node, Sum) or not isinstance(node, Mean):
            raise TypeError(
                f"Expected messages of Mean under client-level privacy, but got {type(node).__name__}: whoever adds "
                "noise does not know the number of clients in a sum; use an algorithm whose messages are averaged"
            )
        return function(node)

    return tree.map(apply, message, is_leaf=(Mean, Sum))
