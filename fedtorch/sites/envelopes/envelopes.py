"""Sealed envelopes between the sites of a graph: what the server passes on, what a site writes and opens.

See `sealed` for what they are good for.
"""

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

_FROM = "from "  # what an envelope's name begins with when it is passed on


class Envelopes:
    """Ask sites for envelopes, as the server, and pass on the last ones of every site that it has committed.

    Args:
        request: (site, number of the request) -> a request for envelopes.
        wait: makes the step that waits for sites.
        next_sequence: a number for requests.
    """

    def __init__(self, request: Callable[[str, int], Send], wait: Wait, next_sequence: Callable[[], int]) -> None:
        self._request, self._wait, self._next = request, wait, next_sequence
        self._held: dict[str, dict[str, bytes]] = {}  # by sender and receiver
        self._fresh: set[str] = set()  # whose envelopes are sealed for the keys of the directory
        self._directory = b""

    def gather(self, sites: Sequence[str], directory: bytes) -> Half:
        """Ask those sites for envelopes whose last ones are not for the keys of this directory."""
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
        """Ask sites for their envelopes again, as they stand in another round."""
        self._fresh.clear()
        self._held.clear()

    def keep(self, envelopes: Mapping[str, dict[str, bytes]]) -> None:
        """Take envelopes, by sender and receiver, in place of those that the senders sent before."""
        self._held.update(envelopes)

    def to(self, site: str) -> dict[str, bytes]:
        """Return the envelopes for a site, by name."""
        return {_FROM + sender: envelopes[site] for sender, envelopes in self._held.items() if site in envelopes}


class SiteEnvelopes:
    """A site's.

    Args:
        keys: of the site.
        algorithm: as the site has built it.
        network: whose nodes are the clients.
        server: the server's state in the beginning, of which `total` alone is ever made anew.
        initial: what a node tells before it has been asked, `(1, ...)`.
        own: the numbers of the site's nodes.

    Raises:
        Refusal: the algorithm's server keeps more than what nodes tell.
    """

    def __init__(
        self, keys: SiteKeys, algorithm: Algorithm, network: Network, server: Any, initial: Tree, own: range
    ) -> None:
        if tree.leaves(server._replace(total=None)):
            raise Refusal("the algorithm's server has a state of its own, which envelopes between nodes do not make")
        self._keys, self._algorithm, self._server, self._initial, self._own = keys, algorithm, server, initial, own
        self._edges, self._nodes = torch.cat([network.edges, network.edges.flip(1)]), network.nodes  # (2E, 2)
        self._sealer: Sealer | None = None
        self._epoch: int | None = None

    def write(self, directory: bytes, told: Tree) -> dict[str, bytes]:
        """Envelopes by receiver, of what the site's nodes tell `(K, ...)`; raises `Refusal` for a bad directory."""
        sealer, envelopes = self._seal(), {}
        for speaker in self._others(directory):
            nodes = self._between(self._own, _nodes(speaker))
            if len(nodes):
                envelopes[speaker.name] = sealer.seal(speaker, wire.encode(tree.take(told, nodes - self._own.start)))
        return envelopes

    def heard(self, blobs: Mapping[str, bytes], told: Tree, ids: Tensor) -> Tree:
        """Return the inboxes of nodes `ids` of the site, `(K, ...)`.

        Args:
            blobs: the directory and the envelopes, by name.
            told: by all nodes of the site, `(K', ...)`.
            ids: of some of them.

        Raises:
            Refusal: an envelope is missing, or not to be believed.
        """
        sealer, parts, numbers = self._seal(), [told], [torch.tensor(self._own)]
        for speaker in self._others(blobs.get(DIRECTORY, b"")):
            nodes = self._between(_nodes(speaker), self._own)
            if len(nodes):
                parts.append(self._opened(sealer, speaker, blobs.get(_FROM + speaker.name, b""), len(nodes)))
                numbers.append(nodes)
        known, everybody = torch.cat(numbers), range(self._nodes)
        needed = self._between(everybody, self._own)
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

    def _seal(self) -> Sealer:
        """The hand of the present keys; a new one forgets the numbers of envelopes, whose keys nobody has any more."""
        if self._sealer is None or self._epoch != self._keys.own.epoch:
            self._epoch = self._keys.own.epoch
            self._sealer = Sealer(self._keys.run, self._keys.name, self._keys.own.sealing)
        return self._sealer

    def _between(self, senders: range, receivers: range) -> Tensor:
        """Return those of `senders` that are neighbours of `receivers`, ascending."""
        sends, hears = self._edges.T
        inside = (
            (sends >= senders.start) & (sends < senders.stop) & (hears >= receivers.start) & (hears < receivers.stop)
        )
        return sends[inside].unique()


def _nodes(speaker: Speaker) -> range:
    return range(speaker.first, speaker.first + speaker.clients)
