"""Scores and post-fit queries over sites: a site's answers, and the server's half."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from fedtorch.protocol.halves import Half
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.configuration import SiteConfiguration
from fedtorch.sites.rounds.fingerprint import built
from fedtorch.sites.rounds.frames import Frame, Inboxes
from fedtorch.sites.rounds.policy import Refusal
from fedtorch.sites.rounds.server import ServerSession
from fedtorch.sites.rounds.sites import reasons
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.federation.runs.holders import Holder, Kind

_MOST_NODES = 2**16  # most nodes of a site's mixtures
_MOST_BESIDE = 100  # most other runs in one query
_DESCRIBED = {"algorithm", "settings", "fingerprint", "design"}  # metadata of another run


def scoring(algorithm: Algorithm, wanted: Mapping[str, Any]) -> Callable[[Tree, ClientData], Tree]:
    """Return a function (clients' tensors, their validation rows) -> sums of metrics `(K, ...)`.

    Raises:
        Refusal: the algorithm does not predict.
    """
    if algorithm.predict is None:
        raise Refusal("the algorithm does not predict")
    return Sums(algorithm.predict, wanted, inputs_and_targets, in_process=False).of_block


def by_client(
    clients: LocalClients, inboxes: Inboxes, data: FederatedData, function: Callable[[Tree, ClientData], Tree]
) -> Tree:
    """Return a function's values of clients' tensors and rows `(K, ...)`, in the order of their inboxes."""
    parts = []
    with torch.no_grad():
        for rows, block in data.buckets(small=SMALL_BLOCK):
            parts.append((rows, function(clients.tensors(inboxes, inboxes.ids[rows]), block)))
    order, every = tree.concatenate(parts)
    return tree.take(every, order.argsort())


def question(frame: Frame, algorithm: Algorithm) -> tuple[Kind, dict[str, Tensor]]:
    """Return (the kind of a query, the structure of its tensors).

    Raises:
        Refusal: fits of the algorithm do not answer this query.
        PayloadError: the frame is malformed, or has content that the query does not use. Such content could vary the
            site's own draws, which depend on the whole request.
    """
    from fedtorch.federation.runs.holders import room
    from fedtorch.inference.questions import answered

    name, known = frame.text("question"), answered(posterior_of(algorithm))
    if name not in known:
        raise Refusal(f"of this run the site answers the questions {sorted(known)}, but not {name!r}")
    kind, shapes, about = known[name], frame.names("shapes"), frame.names("about")
    ends = ["", *(f" {number}" for number in range(len(_beside(frame))))]
    more = {*about} - {*kind.settings} | {*shapes} - {each + end for each in kind.tensors for end in ends}
    if more:
        raise frame.refused(f"of a question {name!r} {[*kind.tensors, *kind.settings]} and no more", sorted(more))
    try:
        return kind, room(shapes)
    except ValueError as error:
        raise frame.refused("shapes of tensors", str(error)) from None


def answer(
    frame: Frame,
    kind: Kind,
    sent: Mapping[str, Tensor],
    holder: Holder,
    others: Sequence[tuple[SiteConfiguration, Frame]],
) -> bytes:
    """Return a site's answer to a post-fit query.

    Args:
        frame: the query.
        kind: kind of the query.
        sent: tensors of the query.
        holder: the site's data and algorithm in this run.
        others: other runs of the query, see `others`.

    Raises:
        Refusal: the site cannot or may not answer, or does not have the algorithms, rows or clients of other runs.
    """
    from fedtorch.federation.runs.holders import Unanswerable, sent_beside

    data, beside = holder.data, []
    for number, (its, other) in enumerate(others):
        if its.data.names != data.names or not its.data.counts.equal(data.counts):
            raise Refusal("the site's rows of another model are not of the same clients, or not as many")
        one = holder._replace(algorithm=built(its, other)[0], data=its.data)
        beside.append((one, sent_beside(sent, number)))
    try:
        values = kind.answer(holder._replace(beside=beside), sent, frame.names("about"))
    except Unanswerable as error:
        raise Refusal(str(error)) from error
    nodes = tree.leaves(values)[0].shape[-1] if kind.by_client else 1
    return frames.encode("answer", {"told": values}, nodes=nodes, sequence=frame.integer("sequence", 1))


def others(
    frame: Frame, configured: Callable[[str | None], SiteConfiguration]
) -> list[tuple[SiteConfiguration, Frame]]:
    """Return the other runs of a query: for each the configuration with its rows, and a frame that begins it.

    Args:
        frame: the query.
        configured: design of a formula, as JSON -> the configuration with rows by that design.
    """
    runs = [frame._replace(kind="begin", about=one) for one in _beside(frame)]
    design = lambda run: None if run.about.get("design") is None else run.text("design")
    return [(configured(design(run)), run) for run in runs]


def _beside(frame: Frame) -> list[dict[str, Any]]:
    """Return the metadata of a query's other runs."""
    described = frame.names("about").get("beside", [])
    runs = isinstance(described, list) and all(isinstance(one, dict) and one.keys() <= _DESCRIBED for one in described)
    if not runs or len(described) > _MOST_BESIDE:
        raise frame.refused(f"at most {_MOST_BESIDE} other runs by {sorted(_DESCRIBED)}", described)
    return described


def asked(
    session: ServerSession,
    outbox: Tree,
    kind: Kind,
    sent: Mapping[str, Tensor],
    about: Mapping[str, Any],
    each: Mapping[str, Tensor],
) -> Half:
    """Send a post-fit query to all sites; return a row per client, or the sum of their answers.

    A site gets `sent`, and the rows of its own clients in `each` `(K, ...)`.

    Raises:
        RuntimeError: a site has been withdrawn or does not answer; the message gives the reason.
    """
    from fedtorch.federation.runs.holders import Form

    sites = session.plan.sites
    if left := set(sites.names) - set(session.members()):
        raise RuntimeError(f"Expected answers of all sites, but {sorted(left)} have left the run; fit without them")
    if session.plan.carry.network is not None:
        yield from session.prepare([])
    number, counts = sites.next_sequence(), dict(zip(sites.names, session.plan.counts))

    def tensors(site: str) -> dict[str, Tensor]:
        ids = session.of_site(site)
        return {**sent, **{name: leaf[ids] for name, leaf in each.items()}}

    for site in sites.names:
        inboxes, query = session.inboxes(outbox, session.of_site(site)), tensors(site)
        shapes = {name: list(leaf.shape) for name, leaf in query.items()}
        yield session.request("ask", site, number, inboxes, query, question=kind.name, about=about, shapes=shapes)

    def read(site: str, frame: Frame) -> Tree:
        nodes = frame.integer("nodes", 1, _MOST_NODES)
        form = Form(session.algorithm, counts[site], tensors(site), about, nodes)
        content = frame.tree({"told": kind.like(form)}, finite=False)
        if not kind.by_client and not is_finite(content["told"]):
            raise frame.refused("finite sums", "NaN or Inf")
        return content["told"]

    answers = yield session.wait(sites.names, read)
    if answers.missing:
        raise RuntimeError(f"Expected answers of all sites, but got none of {reasons(answers.missing)}")
    values = [answers.messages[site] for site in sites.names]
    widths = {tree.leaves(each)[0].shape[1:] for each in values}
    if kind.by_client and len(widths) > 1:
        raise RuntimeError(f"Expected as many nodes of every site, but got {sorted(map(list, widths))}")
    return tree.concatenate(values) if kind.by_client else tree.map(lambda *leaves: torch.stack(leaves).sum(0), *values)
