"""A site's answers beside rounds: scores, and questions after a fit, which are on a list; the server's half."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.exchange import is_finite
from fedtorch.federation.populations.clients import LocalClients
from fedtorch.federation.populations.in_process import SMALL_BLOCK
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.evaluation import Sums, inputs_and_targets
from fedtorch.federation.runs.held import held, held_posterior
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.protocol.halves import Half
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.configuration import SiteConfiguration
from fedtorch.sites.rounds.fingerprint import built
from fedtorch.sites.rounds.frames import Frame, Inboxes
from fedtorch.sites.rounds.policy import Refusal, in_one
from fedtorch.sites.rounds.server import ServerSession
from fedtorch.sites.rounds.sites import reasons
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.federation.runs.holders import Holder, Kind

_MOST_NODES = 2**16  # of the mixtures that sites tell
_MOST_BESIDE = 100  # other runs in one question


def scores(
    clients: LocalClients,
    inboxes: Inboxes,
    data: FederatedData,
    wanted: Mapping[str, Any],
    together: bool,
    minimum: int,
    key: Tensor,
) -> Tree:
    """Return metrics' sums of what clients predict with and their validation rows, `(K, ...)`.

    Where the minimum is above one, those that are sums over rows are held.

    Args:
        clients: of the site.
        inboxes: what those that are asked have heard.
        data: their validation rows.
        wanted: metrics by name.
        together: whether the sum over all clients is told, in the place of the first, as where one has few rows.
        minimum, key: see `held`.

    Raises:
        Refusal: the algorithm does not predict.
    """
    if clients.algorithm.predict is None:
        raise Refusal("the algorithm does not predict")
    sums = Sums(clients.algorithm.predict, wanted, inputs_and_targets, in_process=False)
    every = by_client(clients, inboxes, data, sums.of_block)
    if minimum <= 1:
        return every
    told = [tree.map(lambda leaf, k=k: leaf[k : k + 1], every) for k in range(len(data))]
    rows = []
    with torch.no_grad():
        for k in range(len(data)):
            [(_, block)] = data.select([k]).buckets()
            rows.append(sums.of_each_row(clients.tensors(inboxes, inboxes.ids[k : k + 1]), block))
    if together:
        shared = {name: [one[name] for one in rows] for name in rows[0] if all(name in one for one in rows)}
        rows = [{name: tree.concatenate(each) for name, each in shared.items()}]
        told = [in_one(every)]
    for k, (one, of_rows) in enumerate(zip(told, rows)):
        numbers = sum(math.prod(leaf.shape[1:]) for leaf in tree.leaves(of_rows))
        keys = random.split(random.fold_in(key, k), max(len(of_rows), 1))
        for its, (name, leaves) in zip(keys, sorted(of_rows.items())):
            sum_of_rows = _held_sums(leaves, minimum, its, numbers)
            after = tree.map(lambda leaf: torch.zeros_like(leaf[1:]), one[name].sums)
            one[name] = one[name]._replace(sums=tree.concatenate([sum_of_rows, after]))
    return tree.concatenate(told)


def _held_sums(rows: Tree, minimum: int, key: Tensor, numbers: int) -> Tree:
    """Return held sums `(1, ...)` of rows `(N, ...)`, whole numbers where these are; see `held`."""
    leaves = tree.leaves(rows)
    whole = held(torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in leaves], 1), minimum, key, numbers).total
    parts = whole.split([leaf[:1].numel() for leaf in leaves])
    shaped = [
        (part if leaf.is_floating_point() else part.round()).to(leaf.dtype).reshape(1, *leaf.shape[1:])
        for part, leaf in zip(parts, leaves)
    ]
    return tree.refill(rows, shaped)


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


def answer(
    frame: Frame,
    kind: Kind,
    sent: Mapping[str, Tensor],
    holder: Holder,
    others: Sequence[tuple[SiteConfiguration, Frame]],
) -> bytes:
    """Return a site's answer.

    Args:
        frame: that asks.
        kind, sent: the question.
        holder: the site in this run.
        others: runs that are asked about beside, see `others`.

    Raises:
        Refusal: the site cannot or may not, or other runs are of algorithms, rows or clients that it does not have.
    """
    from fedtorch.federation.runs.holders import Unanswerable, sent_beside

    data, beside = holder.data, []
    for number, (its, other) in enumerate(others):
        if its.data.names != data.names or not its.data.counts.equal(data.counts):
            raise Refusal("the site's rows of another model are not of the same clients, or not as many")
        one = holder._replace(algorithm=built(its, other)[0], data=its.data)
        beside.append((one, sent_beside(sent, number)))
    holder = holder._replace(beside=beside)
    try:
        told = kind.answer(holder, sent, frame.names("about"))
    except Unanswerable as error:
        raise Refusal(str(error)) from error
    if isinstance(told, DevicePosterior) and holder.key is not None and holder.minimum > 1:
        told = held_posterior(told, holder.data.counts, holder.minimum, holder.key)
    nodes = tree.leaves(told)[0].shape[-1] if kind.by_client else 1
    return frames.encode("answer", {"told": told}, nodes=nodes, sequence=frame.integer("sequence", 1))


def others(
    frame: Frame, configured: Callable[[str | None], SiteConfiguration]
) -> list[tuple[SiteConfiguration, Frame]]:
    """Return what a question says of other runs, as the frames that begin them say it, and the rows of each.

    Args:
        frame: that asks.
        configured: design of a formula, as JSON -> the configuration with rows by it.
    """
    said = frame.names("about").get("beside", [])
    if not isinstance(said, list) or len(said) > _MOST_BESIDE or not all(isinstance(one, dict) for one in said):
        raise frame.refused(f"at most {_MOST_BESIDE} other runs", said)
    runs = [frame._replace(kind="begin", about=one) for one in said]
    design = lambda run: None if run.about.get("design") is None else run.text("design")
    return [(configured(design(run)), run) for run in runs]


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
