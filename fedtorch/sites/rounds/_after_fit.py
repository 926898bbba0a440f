"""A site's answers beside rounds: scores, and questions after a fit, which are on a list; the server's half."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.exchange import is_finite
from fedtorch.federation.populations.clients import LocalClients
from fedtorch.federation.populations.in_process import SMALL_BLOCK
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.evaluation import Sums, inputs_and_targets
from fedtorch.federation.runs.posterior_draws import (
    APART,
    STEEP,
    Drawn,
    by_client as by_client_of,
    masked_sum,
    over_rows,
    sent_draws,
)
from fedtorch.protocol.halves import Half
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.configuration import SiteConfiguration
from fedtorch.sites.rounds.fingerprint import built
from fedtorch.sites.rounds.frames import Frame, Inboxes
from fedtorch.sites.rounds.policy import AFTER_FIT, Policy, Refusal
from fedtorch.sites.rounds.server import ServerSession
from fedtorch.sites.rounds.sites import reasons
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.federation.runs.holders import Holder, Kind

_MOST_NODES = 2**16  # of the mixtures that sites tell
_BY_DRAW = ("densities", "margins", "checks")  # what is told as sums over rows at draws
_MOST_BESIDE = 100  # other runs in one question
_FINER = {"densities": 12, "margins": 8, "checks": 8}  # binary digits of sums beyond log₂√rows; the latter by draw
_MOST_APART = 3  # models of one question that may predict rows differently, such as one without the best covariate


def scoring(algorithm: Algorithm, wanted: Mapping[str, Any]) -> Callable[[Tree, ClientData], Tree]:
    """Return what makes metrics' sums of what clients predict with and their validation rows, `(K, ...)`.

    Raises:
        Refusal: the algorithm does not predict.
    """
    if algorithm.predict is None:
        raise Refusal("the algorithm does not predict")
    return Sums(algorithm.predict, wanted, inputs_and_targets, in_process=False).of_block


def by_client(
    clients: LocalClients, inboxes: Inboxes, data: FederatedData, function: Callable[[Tree, ClientData], Tree]
) -> Tree:
    """Return what a function makes of clients' tensors and rows `(K, ...)`, in the order of their inboxes."""
    parts = []
    with torch.no_grad():
        for rows, block in data.buckets(small=SMALL_BLOCK):
            parts.append((rows, function(clients.tensors(inboxes, inboxes.ids[rows]), block)))
    order, every = tree.concatenate(parts)
    return tree.take(every, order.argsort())


def question(frame: Frame, algorithm: Algorithm) -> tuple[Kind, dict[str, Tensor]]:
    """Return what is asked, and room for the tensors beside it.

    Raises:
        Refusal: it is none that fits of the algorithm answer.
        PayloadError: the frame is not as it should be.
    """
    from fedtorch.federation.runs.holders import room
    from fedtorch.inference.questions import QUESTIONS

    name, known = frame.text("question"), posterior_of(algorithm).questions & QUESTIONS.keys()
    if name not in known:
        raise Refusal(f"of this run the site answers the questions {sorted(known)}, but not {name!r}")
    try:
        return QUESTIONS[name], room(frame.names("shapes"))
    except ValueError as error:
        raise frame.refused("shapes of tensors", str(error)) from None


def check_draws(kind: Kind, sent: Mapping[str, Tensor], holder: Holder, policy: Policy) -> None:
    """Refuse draws at which sums over rows would tell single rows: more of them than a posterior needs, or others.

    A sum at a draw of large coefficients counts the rows on one side of a plane, or in a slab. Draws of one posterior
    move what the site's own rows are predicted to be by little; planes that somebody has chosen are far apart. More
    than a few models that are compared are held to the same together, else each of a hundred could have a plane of its
    own. A few tell what one question at a single draw tells anyway. At a draw that is steep over the rows the digits of
    one sum, each of another value of a column, would count the rows there, or those in a slab: predictors have a small
    sd over the site's rows.

    Raises:
        Refusal: they are too many, too far apart or too steep.
    """
    if kind.tells not in _BY_DRAW or "phi" not in sent:
        return
    told, every = AFTER_FIT[kind.tells], [*holder.beside, (holder, sent)]
    if (most := max(len(its["phi"]) for _, its in every)) > policy.draws:
        raise Refusal(
            f"the site tells {told} at no more than {policy.draws} draws in one question, but was sent "
            f"{most}; ask with fewer, such as by draws=; its side would allow it by a larger Policy(draws=)"
        )
    if policy.minimum == 1:
        return
    sources, counts = [sent_draws(one, its).at for one, its in every], holder.data.counts[:, None]
    data = [one.data for one, _ in every]
    apart = by_client_of(holder, data, sources, _apart)
    alone = (apart / counts)[counts[:, 0] >= policy.minimum] if kind.by_client else apart[:0]
    within, between = (torch.cat([alone, apart.sum(0, keepdim=True) / counts.sum()]) <= APART**2).split(
        [len(every), apart.shape[1] - len(every)], dim=1
    )
    if not bool(within.all()):
        raise Refusal(
            f"the site tells {told} at draws of one posterior, and those of this question are further apart than "
            "draws are of a posterior that its rows are in; ask with those of a run that has converged, and of fewer "
            "coefficients where rows say little of some"
        )
    if len(every) > _MOST_APART and not bool(between.all()):
        raise Refusal(
            f"the site tells {told} of more than {_MOST_APART} models together where they predict its rows alike, and "
            f"those of this question are further apart; compare at most {_MOST_APART} of them at a time"
        )
    for moments in by_client_of(holder, data, sources, _over_rows).values():
        enough = holder.data.counts >= policy.minimum if kind.by_client else holder.data.counts < 0
        together = over_rows(holder.data.counts, moments["mean"], moments["squares"])
        each = moments["squares"][enough] / counts[enough]
        if not bool((torch.cat([together[None], each]) <= STEEP**2).all()):
            raise Refusal(
                f"the site tells {told} at draws at which its rows' predictors have an sd of at most {STEEP:g}, and at "
                "one of this question they have a larger one: digits of a sum would count the rows at single values; "
                "ask with those of a run that has converged, and of fewer coefficients where they separate the rows"
            )


def _apart(drawn: list[Drawn]) -> Tensor:
    """Return sums over clients' rows of the variances of a row's predictor over draws, `(K, models + families)`.

    They are those over the draws of each model, and then over those of all models of a family, each of which counts
    the same, however many draws it has. They are in units of the response's noise, of the draw that has least, where
    its family has one. Of ordered responses the predictor is that of the threshold at which it varies most.
    """
    families: dict[tuple[Any, ...], list[int]] = {}
    for number, one in enumerate(drawn):
        families.setdefault((one.family.name, *one.scale.shape[2:]), []).append(number)
    mask = drawn[0].mask
    total = torch.zeros(len(mask), len(drawn) + len(families), dtype=torch.float64)
    for place, members in enumerate(families.values(), len(drawn)):
        models = [drawn[number] for number in members]
        for part in max(models, key=lambda one: one.theta.shape[1]).parts():
            near = models[0].predictor(part)[..., :1]  # from which differences have more digits than far values
            planes = [_planes(one, part, near) for one in models]
            known = [one.scales(part).amin(-1) if one.family.precise else torch.ones(()) for one in models]
            units = [unit.expand_as(mask[:, part]) for unit in known]  # of a row, where it has a weight
            each = torch.stack([values.var(2, correction=0) for values in planes], -1)
            means = torch.stack([values.mean(2) for values in planes], -1)
            joint = (each.mean(-1) + means.var(-1, correction=0)).amax(-1) / torch.stack(units).amin(0)
            own = each.amax(2) / torch.stack(units, -1)
            total[:, members] += masked_sum(own, mask[:, part])
            total[:, place] += masked_sum(joint, mask[:, part])
    return total


def _over_rows(drawn: list[Drawn]) -> dict[str, dict[str, Tensor]]:
    """Return means and sums of squares over clients' rows of predictors at each draw, `(K, S)`, by number of the model.

    Models are left out whose means are linear in the predictor: of their rows' squares and products a few numbers,
    which are the same at all draws, tell all.
    """
    found = {}
    for number, one in enumerate(drawn):
        if one.family.precise or not one.mask.shape[1]:
            continue
        near = one.predictor(slice(0, 1))  # from which differences have more digits than far values
        total = near.new_zeros(2, len(near), near.shape[-1])
        for part in one.parts():
            above = one.predictor(part) - near
            total += torch.stack([masked_sum(each, one.mask[:, part]) for each in (above, above.square())])
        count = one.mask.sum(1, keepdim=True).clamp(min=1)
        mean = total[0] / count
        found[str(number)] = {"mean": near[:, 0] + mean, "squares": total[1] - count * mean.square()}
    return found


def _digits(tells: str, rows: int) -> int:
    """Return of how many binary digits a sum over rows is told.

    What is not known of a sum is about √rows of it, by chance. Its other digits tell of single rows, also at draws that
    are not steep, where somebody knows which values a column may have.
    """
    return _FINER[tells] + math.ceil(math.log2(max(rows, 1)) / 2)


def _rounded(told: Tree, digits: int) -> Tree:
    """Return numbers to so many binary digits; whole numbers below 2 to as many are as they were.

    >>> _rounded(torch.tensor([100.0, 100.123456789, -0.1]).double(), 16).tolist()
    [100.0, 100.123046875, -0.100000381...]
    """

    def of_leaf(leaf: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(leaf)
        return torch.ldexp((mantissa * 2.0**digits).round(), exponent - digits)

    return tree.map(of_leaf, told)


def _planes(drawn: Drawn, part: slice, near: Tensor) -> Tensor:
    """Return by how much predictors of some rows are above `near`, before and after thresholds, `(K, n, S, planes)`."""
    eta = (drawn.predictor(part) - near)[..., None]
    return eta if drawn.scale.ndim == 2 else torch.cat([eta, eta - drawn.scale[:, None]], -1)


def answer(
    frame: Frame,
    kind: Kind,
    sent: Mapping[str, Tensor],
    holder: Holder,
    configured: Callable[[str | None], SiteConfiguration],
    policy: Policy,
) -> bytes:
    """Return a site's answer.

    Args:
        frame: that asks.
        kind, sent: the question.
        holder: the site in this run.
        configured: design of a formula, as JSON -> the configuration with rows by it, for other runs.
        policy: of the site.

    Raises:
        Refusal: the site cannot or may not, or other runs are of algorithms, rows or clients that it does not have.
    """
    from fedtorch.federation.runs.holders import Unanswerable, sent_beside

    data, beside = holder.data, []
    for number, other in enumerate(_others(frame)):
        its = configured(None if other.about.get("design") is None else other.text("design"))
        if its.data.names != data.names or not its.data.counts.equal(data.counts):
            raise Refusal("the site's rows of another model are not of the same clients, or not as many")
        one = holder._replace(algorithm=built(its, other)[0], data=its.data)
        beside.append((one, sent_beside(sent, number)))
    holder = holder._replace(beside=beside)
    check_draws(kind, sent, holder, policy)
    try:
        told = kind.answer(holder, sent, frame.names("about"))
    except Unanswerable as error:
        raise Refusal(str(error)) from error
    if kind.tells in _BY_DRAW and not kind.exact and policy.minimum > 1:
        told = _rounded(told, _digits(kind.tells, int(holder.data.counts.sum())))
    nodes = tree.leaves(told)[0].shape[-1] if kind.by_client else 1
    return frames.encode("answer", {"told": told}, nodes=nodes, sequence=frame.integer("sequence", 1))


def _others(frame: Frame) -> list[Frame]:
    """Return what a question says of other runs, as the frames that begin them say it."""
    said = frame.names("about").get("beside", [])
    if not isinstance(said, list) or len(said) > _MOST_BESIDE or not all(isinstance(one, dict) for one in said):
        raise frame.refused(f"at most {_MOST_BESIDE} other runs", said)
    return [frame._replace(kind="begin", about=one) for one in said]


def asked(
    session: ServerSession,
    outbox: Tree,
    kind: Kind,
    sent: Mapping[str, Tensor],
    about: Mapping[str, Any],
    each: Mapping[str, Tensor],
) -> Half:
    """Ask all sites a question; return a row per client, or the sum of their answers.

    A site is sent `sent`, and of `each` `(K, ...)` the rows of its own clients.

    Raises:
        RuntimeError: a site has left or does not answer; the message says why.
    """
    from fedtorch.federation.runs.holders import Form

    sites = session.plan.sites
    if left := set(sites.names) - set(session.members()):
        raise RuntimeError(f"Expected answers of all sites, but {sorted(left)} have left the run; fit without them")
    if session.plan.carry.network is not None:
        yield from session.prepare([])
    number, counts = sites.next_sequence(), dict(zip(sites.names, session.plan.counts))

    def tensors(site: str) -> dict[str, Tensor]:
        own = session.of_site(site)
        return {**sent, **{name: leaf[own] for name, leaf in each.items()}}

    for site in sites.names:
        inboxes, its = session.inboxes(outbox, session.of_site(site)), tensors(site)
        shapes = {name: list(leaf.shape) for name, leaf in its.items()}
        yield session.request("ask", site, number, inboxes, its, question=kind.name, about=about, shapes=shapes)

    def read(site: str, frame: Frame) -> Tree:
        nodes = frame.integer("nodes", 1, _MOST_NODES)
        form = Form(session.algorithm, counts[site], tensors(site), about, nodes)
        told = frame.tree({"told": kind.like(form)}, finite=False)
        if not kind.by_client and not is_finite(told["told"]):
            raise frame.refused("finite sums", "NaN or Inf")
        return told["told"]

    answers = yield session.wait(sites.names, read)
    if answers.missing:
        raise RuntimeError(f"Expected answers of all sites, but got none of {reasons(answers.missing)}")
    told = [answers.messages[site] for site in sites.names]
    widths = {tree.leaves(each)[0].shape[1:] for each in told}
    if kind.by_client and len(widths) > 1:
        raise RuntimeError(f"Expected as many nodes of every site, but got {sorted(map(list, widths))}")
    return tree.concatenate(told) if kind.by_client else tree.map(lambda *leaves: torch.stack(leaves).sum(0), *told)
