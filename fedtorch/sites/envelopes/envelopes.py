"""Sealed envelopes between the sites of a graph, at the server and at a site; see `sealed` for their purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.exchange import sum_over
from fedtorch.networks.network import Network
from fedtorch.protocol.halves import Half, Send
from fedtorch.sites.envelopes.keyring import DIRECTORY, SiteKeys, Wait
from fedtorch.sites.envelopes.sealer import Sealer
from fedtorch.sites.identity.key_directory import Speaker
from fedtorch.sites.rounds.policy import Refusal
from fedtorch.tree import Tree
from fedtorch.wire import PayloadError

_FROM = "from "  # prefix of an envelope's name when the server passes it on


class Envelopes:
    """The server's store of envelopes, which passes on the last committed ones of every site.

    Args:
        request: (site, number of the request) -> a request for envelopes.
        wait: returns the step that waits for sites.
        next_sequence: returns a new number for a request.
    """

    def __init__(self, request: Callable[[str, int], Send], wait: Wait, next_sequence: Callable[[], int]) -> None:
        self._request, self._wait, self._next = request, wait, next_sequence
        self._held: dict[str, dict[str, bytes]] = {}  # envelopes by sender and receiver
        self._fresh: set[str] = set()  # senders whose envelopes are sealed for the directory's keys
        self._directory = b""

    def gather(self, sites: Sequence[str], directory: bytes) -> Half:
        """Request envelopes from sites whose last ones are not sealed for the keys of this directory."""
        if directory != self._directory:
            self._fresh.clear()
            self._directory = directory
        number, wanted = self._next(), [site for site in sites if site not in self._fresh]
        if wanted:
            for site in wanted:
                yield self._request(site, number)
            answers = yield self._wait(wanted, lambda site, frame: frame.blobs())
            self.keep(answers.messages)
            self._fresh.update(answers.messages)

    def forget(self) -> None:
        """Discard all envelopes, so that sites are asked again, in the states of another round."""
        self._fresh.clear()
        self._held.clear()

    def keep(self, envelopes: Mapping[str, dict[str, bytes]]) -> None:
        """Store envelopes by sender and receiver, in place of the senders' earlier ones."""
        self._held.update(envelopes)

    def to(self, site: str) -> dict[str, bytes]:
        """Return the envelopes for a site, by name."""
        return {_FROM + sender: envelopes[site] for sender, envelopes in self._held.items() if site in envelopes}


class SiteEnvelopes:
    """Writes and opens a site's envelopes.

    Args:
        keys: the site's keys.
        algorithm: the algorithm, as built by the site.
        network: the network, whose nodes are the clients.
        server: the server's initial state, of which only `total` changes.
        initial: a node's initial contribution, `(1, ...)`.
        ids: numbers of the site's nodes.

    Raises:
        Refusal: the algorithm's server has more state than the total of contributions.
    """

    def __init__(
        self, keys: SiteKeys, algorithm: Algorithm, network: Network, server: Any, initial: Tree, ids: range
    ) -> None:
        if tree.leaves(server._replace(total=None)):
            raise Refusal("the algorithm's server has a state of its own, which envelopes between nodes do not provide")
        self._keys, self._algorithm, self._server, self._initial, self._ids = keys, algorithm, server, initial, ids
        self._edges, self._nodes = torch.cat([network.edges, network.edges.flip(1)]), network.nodes  # (2E, 2)
        self._sealer: Sealer | None = None
        self._epoch: int | None = None

    def write(self, directory: bytes, contributions: Tree) -> dict[str, bytes]:
        """Return envelopes by receiver with the contributions `(K, ...)` of the site's nodes.

        Raises:
            Refusal: the directory is invalid.
        """
        sealer, envelopes = self._current_sealer(), {}
        for speaker in self._others(directory):
            nodes = self._between(self._ids, _nodes(speaker))
            if len(nodes):
                content = wire.encode(tree.take(contributions, nodes - self._ids.start))
                envelopes[speaker.name] = sealer.seal(speaker, content)
        return envelopes

    def inboxes(self, blobs: Mapping[str, bytes], contributions: Tree, ids: Tensor) -> Tree:
        """Return the inboxes of nodes `ids` of the site, `(K, ...)`.

        Args:
            blobs: the directory and the envelopes, by name.
            contributions: contributions of all nodes of the site, `(K', ...)`.
            ids: numbers of some of them.

        Raises:
            Refusal: an envelope is missing or invalid.
        """
        sealer, parts, numbers = self._current_sealer(), [contributions], [torch.tensor(self._ids)]
        for speaker in self._others(blobs.get(DIRECTORY, b"")):
            nodes = self._between(_nodes(speaker), self._ids)
            if len(nodes):
                parts.append(self._opened(sealer, speaker, blobs.get(_FROM + speaker.name, b""), len(nodes)))
                numbers.append(nodes)
        known, everybody = torch.cat(numbers), range(self._nodes)
        needed = self._between(everybody, self._ids)
        if not bool(torch.isin(needed, known).all()):
            raise Refusal(f"no site in the directory has the nodes {needed[~torch.isin(needed, known)].tolist()[:10]}")
        total = sum_over(self._algorithm.exchange, tree.concatenate(parts), known)
        outbox = self._algorithm.outbox(self._server._replace(total=total))
        return self._algorithm.exchange.scatter(outbox, ids)

    def _opened(self, sealer: Sealer, sender: Speaker, envelope: bytes, nodes: int) -> Tree:
        like = tree.map(lambda leaf: leaf.expand(nodes, *leaf.shape[1:]), self._initial)
        try:
            content = sealer.open(sender, envelope)
            return wire.decode(content, like, client=sender.name)
        except (PayloadError, ValueError) as error:
            raise Refusal(str(error)) from None

    def _others(self, directory: bytes) -> list[Speaker]:
        return [speaker for speaker in self._keys.read(directory)[0] if speaker.name != self._keys.name]

    def _current_sealer(self) -> Sealer:
        """Return the sealer of the current keys; new keys start a new one, with new numbers of envelopes."""
        if self._sealer is None or self._epoch != self._keys.keys.epoch:
            self._epoch = self._keys.keys.epoch
            self._sealer = Sealer(self._keys.run, self._keys.name, self._keys.keys.sealing)
        return self._sealer

    def _between(self, senders: range, receivers: range) -> Tensor:
        """Return the nodes of `senders` with a neighbour in `receivers`, ascending."""
        sends, hears = self._edges.T
        inside = (
            (sends >= senders.start) & (sends < senders.stop) & (hears >= receivers.start) & (hears < receivers.stop)
        )
        return sends[inside].unique()


def _nodes(speaker: Speaker) -> range:
    return range(speaker.first, speaker.first + speaker.clients)
