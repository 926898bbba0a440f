"""The clients of one process: their prepared data and states, and their part in a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch._devices import is_cuda
from fedtorch.data import BadClients, ClientData, FederatedData
from fedtorch.expected import loaded
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.disclosure import of_reply
from fedtorch.federation.exchanges.carry import Carry
from fedtorch.federation.exchanges.exchange import (
    Sent,
    Sum,
    check_shapes,
    check_sum,
    client_count,
    in_dtypes_of,
    indices,
    is_finite,
    not_finite,
)
from fedtorch.federation.populations.population import Pending
from fedtorch.federation.populations.state_table import StateTable
from fedtorch.federation.turn import Turn
from fedtorch.learns import Field
from fedtorch.tree import Rows, Tree

if TYPE_CHECKING:
    from fedtorch.data.client_loaders import ClientLoaders

BLOCK_ROWS = 65_536  # rows of a block in evaluation
SMALL_BLOCK = 16_384  # rows of a block, padding included, that are not worth dividing by size
_MOST_VALIDATIONS = 4  # sets of rows whose stacked blocks stay cached for the next evaluation
_MERGE_EVERY = 32  # partial aggregates in memory before they are merged
# bytes of clients that run at once on the CPU; larger memory would be page-faulted again at every step
_BYTES = 128 * 2**20
_SHARE = 4  # a quarter of a CUDA device's free memory: activations and optimiser states need the rest

Block = tuple[Rows, Tree]  # the clients' ids, and their prepared data


class Answers(NamedTuple):
    """The answers of the clients of a block."""

    ids: Rows
    message: Tree  # (K, ...) all that they send
    state: Tree  # (K, ...)
    info: dict[str, Tensor]  # (K,) each

    def without(self, clients: Tensor, device: torch.device) -> Answers:
        """Return the answers without those of some clients; all tensors are on `device`."""
        arrived = ~torch.isin(indices(self.ids), clients)
        if bool(arrived.all()):
            return self
        rows = arrived.nonzero()[:, 0]
        return Answers(indices(self.ids)[rows], *tree.take(self[1:], rows.to(device)))


class Gathered(NamedTuple):
    """A round of the clients of one process."""

    partial: Tree  # aggregate, None without answers
    states: list[tuple[Rows, Tree]]  # to commit
    ids: Tensor  # (M,) the clients that answered, ascending
    info: dict[str, Tensor]  # (M,) each
    up: int  # bytes
    down: int
    refused: dict[int, str]  # clients whose message had NaN or Inf, and in which field
    failed: dict[int, Exception]  # clients that could not take part, and why
    message: Tree  # of the last block, None without blocks


class LocalClients:
    """The clients that this process runs; `clients` counts those of the whole federation.

    Args:
        algorithm: the clients' algorithm.
        state: one client's initial state.
        names: all clients' names.
        blocks: `(ids, data)` of the clients here.
        clients: number of clients in the federation.
        chunk: most clients at once.

    Attributes:
        noted: names of values sent besides the messages, which may differ between clients.
    """

    in_process = True

    def __init__(
        self,
        algorithm: Algorithm,
        state: Tree,
        names: tuple[str, ...],
        blocks: list[tuple[Tensor, ClientData]],
        clients: int,
        chunk: int | None,
    ) -> None:
        self.algorithm, self.names, self.clients, self._chunk = algorithm, names, clients, chunk
        self.device = blocks[0][1].count.device
        self.table = StateTable(tree.to(state, self.device, copy=True), clients)
        self.noted: dict[str, None] = {}
        self.hold(blocks)
        self._validation: dict[int, tuple[FederatedData, list[tuple[Tensor, ClientData]]]] = {}

    def hold(self, blocks: list[tuple[Tensor, ClientData]]) -> None:
        """Set the rows of the clients here, in place of earlier ones."""
        self._blocks = [(ids, self._prepare(ids, data)) for ids, data in blocks]
        self._sizes = [self._block_size(data, self._chunk) for _, data in self._blocks]
        self._whole = [_as_slice(ids) if len(ids) else ids for ids, _ in self._blocks]

    def _prepare(self, ids: Tensor, data: ClientData | ClientLoaders) -> Tree:
        try:
            return self.algorithm.prepare(data)
        except BadClients as error:
            name = self.names[int(ids[error.rows[0]])]
            raise ValueError(f"Client {name!r}: {error}") from error
        except loaded("fedtorch.data.client_loaders", "NoRows") as error:
            settings = self.algorithm.settings
            name = " of ".join(settings[each] for each in ("algorithm", "local.solver") if each in settings)
            raise TypeError(f"{name}: {error}") from error

    def _block_size(self, data: Tree, chunk: int | None) -> int:
        """Return how many clients of a block run at once."""
        if chunk is not None:
            return chunk
        each = tree.nbytes(data) / max(1, len(tree.leaves(data)[0])) + 2 * tree.nbytes(self.table.initial)
        each += 8 * tree.nbytes(self.algorithm.start)
        return max(1, int(block_bytes(self.device) / max(each, 1)))

    def blocks(self, cohort: Tensor | None) -> Iterator[Block]:
        """Return the cohort in blocks: (ids, prepared data); all clients as views."""
        for number, ((ids, _), size) in enumerate(zip(self._blocks, self._sizes)):
            rows = None if cohort is None else _places(cohort, ids)
            count = len(ids) if rows is None else len(rows)
            if rows is None and 0 < count <= size:
                yield self._whole[number], self._taken(number, slice(0, count))
                continue
            for start in range(0, count, size):
                part = slice(start, min(start + size, len(ids))) if rows is None else rows[start : start + size]
                yield _as_slice(ids[part]), self._taken(number, part)

    def _taken(self, number: int, rows: Rows) -> Tree:
        """Return the prepared data of some clients of a block, uncopied for all of them."""
        ids, data = self._blocks[number]
        return data if isinstance(rows, slice) and rows == slice(0, len(ids)) else tree.take(data, rows)

    def empty_block(self) -> Block:
        """Return a block of no clients, `K = 0`."""
        return self._blocks[0][0][:0], self._taken(0, slice(0, 0))

    def reply(self, block: Block, outbox: Tree, turn: Turn) -> Reply:
        """Run the clients of one block; the message is all that they send."""
        ids, data = block
        inbox, state = self.algorithm.exchange.scatter(outbox, ids), self.table.read(ids)
        client_turn = turn.of_clients(lambda: indices(ids), self.device)
        reply, told = self.algorithm.client(inbox, state, data, client_turn), self.algorithm.told
        if told is None:
            return reply
        return reply._replace(message=Sent(reply.message, Sum(tree.subtract(told.of(reply.state), told.of(state)))))

    def _answers(self, block: Block, outbox: Tree, turn: Turn, failed: dict[int, Exception]) -> Answers | None:
        """Return a block's answers without clients that fail, who are recorded; None without answers."""
        while True:
            try:
                return Answers(block[0], *self.reply(block, outbox, turn))
            except BadClients as error:
                ids = indices(block[0])
                failed.update((int(ids[row]), error) for row in error.rows)
                rest = torch.tensor([row for row in range(len(ids)) if row not in error.rows], dtype=torch.int64)
                if len(rest) == 0:
                    return None
                block = ids[rest], tree.take(block[1], rest)

    def gather(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None) -> Gathered:
        """Do a round of the clients here, as far as a partial aggregate, without messages that are `not_finite`.

        If a block shows that clients must not share steps, the blocks before it are trained again.
        """
        exchange = self.algorithm.exchange
        refused: dict[int, str] = {}
        failed: dict[int, Exception] = {}
        partials: list[Tree] = []
        states: list[tuple[Rows, Tree]] = []
        infos: list[tuple[Rows, dict[str, Tensor]]] = []
        up = down = 0
        answers: Answers | None = None
        for block in self.blocks(cohort):
            known = len(turn.refused)
            replied = self._answers(block, outbox, turn, failed)
            if len(turn.refused) > known and infos:
                return self.gather(outbox, cohort, turn, lost)
            if replied is None:
                continue
            if answers is not None:
                self._check_alike(answers, replied)
            answers = replied
            if turn.round == 0:
                check_shapes(answers.message, answers.ids)
            sent, received = exchange.traffic(outbox, answers.message, answers.ids)
            up, down = up + sent, down + received
            if lost is not None:
                answers = answers.without(lost, self.device)
            partial = exchange.gather(answers.message, answers.ids)
            if not is_finite(partial, answers.message):
                bad = {int(indices(answers.ids)[row]): field for row, field in not_finite(answers.message).items()}
                refused.update(bad)
                answers = answers.without(torch.tensor(list(bad), dtype=torch.int64), self.device)
                partial = exchange.gather(answers.message, answers.ids)
                check_sum(partial, client_count(answers.ids))
            infos.append((answers.ids, answers.info))
            if client_count(answers.ids) == 0:
                continue
            partials.append(partial)
            if len(partials) == _MERGE_EVERY:
                partials = [exchange.merge(partials)]
            states.append((answers.ids, answers.state))
        if not infos:  # nobody answers; names of diagnostics come from a block without clients
            nobody = self.empty_block()
            infos.append((nobody[0], self.reply(nobody, outbox, turn).info))
        self.noted.update((name, None) for _, info in infos for name in info)
        partial, message = exchange.merge(partials) if partials else None, answers and answers.message
        return Gathered(partial, states, *joined(infos), up, down, refused, failed, message)

    def _check_alike(self, first: Answers, second: Answers) -> None:
        """Raise ValueError if the fields or shapes of clients' messages differ between blocks.

        Their sum would have no meaning, and a disclosure would list the fields of some clients only.
        """
        one, other = (_shapes(each.message) for each in (first, second))
        if one != other:
            names = [self.names[int(indices(each.ids)[0])] for each in (first, second) if client_count(each.ids)]
            raise ValueError(
                f"Expected messages of the same fields and shapes of all clients, but got {one} and {other}, of "
                f"clients in the blocks of {names}; let Algorithm.client return the same of any rows, such as zeros "
                "for what a client has nothing of"
            )

    def finish(self, partial: Tree, message: Tree) -> Tree:
        """Return the aggregate as the server takes it, of a partial one and any block's messages."""
        try:
            aggregate = self.algorithm.exchange.finish(partial)
        except BadClients as error:
            raise ValueError(f"Client {self.names[error.rows[0]]!r}: {error}") from error
        if self.algorithm.told is None:
            return in_dtypes_of(message, aggregate)
        return aggregate._replace(fresh=in_dtypes_of(message.fresh, aggregate.fresh))

    def commit(self, states: list[tuple[Rows, Tree]]) -> None:
        """Store the states of clients whose messages have arrived."""
        if len(states) > 1:  # side by side
            self.table.reserve(torch.cat([indices(ids) for ids, _ in states]))
        for ids, state in states:
            self.table.write(ids, state)

    def step(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None = None) -> Pending:
        """Run a cohort; see `Clients.step`."""
        gathered = self.gather(outbox, cohort, turn, lost)
        aggregate = None if gathered.partial is None else self.finish(gathered.partial, gathered.message)
        commit = lambda: self.commit(gathered.states)
        answered = (aggregate, gathered.ids, gathered.info, gathered.up, gathered.down, commit)
        return Pending(*answered, refused=gathered.refused, failed=gathered.failed)

    def total(self) -> Tree:
        """Return the total of persistent contributions; see `Clients.total`."""
        return self.algorithm.exchange.finish(self.told_here()).value

    def told_here(self) -> Tree:
        """Return the partial aggregate of the persistent contributions of the clients here."""
        assert self.algorithm.told is not None
        exchange, local_ids = self.algorithm.exchange, torch.cat([ids for ids, _ in self._blocks]).sort().values
        asked = torch.isin(local_ids, self.table.touched())
        parts = local_ids[asked].split(
            max(1, int(block_bytes(self.device) / max(2 * tree.nbytes(self.table.initial), 1)))
        )
        partials = [exchange.gather(Sum(self.algorithm.told.of(self.table.read(ids))), ids) for ids in parts]
        initial, others = self.algorithm.told.of(tree.expand(self.table.initial, 1)), local_ids[~asked]
        everywhere = tree.map(lambda leaf: leaf.expand(len(others), *leaf.shape[1:]), initial)
        return exchange.merge([*partials, exchange.gather(Sum(everywhere), others)])

    def evaluate(self, outbox: Tree, data: FederatedData, function: Callable[[Tree, ClientData], Tree]) -> Tree:
        """Apply `function` to stacked clients; see `Clients.evaluate`."""
        order, parts = self.evaluate_parts(outbox, data, function)
        return tree.take(tree.concatenate(parts), order.argsort().to(self.device))

    def evaluate_parts(
        self,
        outbox: Tree,
        data: FederatedData,
        function: Callable[[Tree, ClientData], Tree],
        mine: Tensor | None = None,
    ) -> tuple[Tensor, list[Tree]]:
        """Return (ids, results in blocks) of the clients in `mine` `(K,)` bool, default all."""
        if len(data) != self.clients and self.clients > 1:
            raise ValueError(
                f"Expected data of the population's {self.clients} clients, but got {len(data)}; split the data of the "
                "same clients, or pass unseen=True for others, such as all rows as one client"
            )
        order, parts = [], []
        for ids, block in self._stacked(data):
            size = min(BLOCK_ROWS // max(1, block.mask.shape[1]), self._block_size(block, self._chunk))
            for rows in torch.arange(len(ids)).split(max(1, size)):
                rows = rows if mine is None else rows[mine[ids[rows]]]
                state_ids = ids[rows] if self.clients > 1 else torch.zeros_like(rows)
                inbox = self.algorithm.exchange.scatter(outbox, state_ids)
                model = self.algorithm.model(inbox, self.table.read(state_ids))
                parts.append(function(model, tree.take(block, rows.to(self.device))))
                order.append(ids[rows])
        return torch.cat(order), parts

    def tensors(self, outbox: Tree, ids: Tensor) -> Tree:
        """Return the tensors that clients predict with; see `Clients.tensors`."""
        model = self.algorithm.model(self.algorithm.exchange.scatter(outbox, ids), self.table.read(ids))
        return tree.map(torch.clone, model)

    def disclosed(
        self, algorithm: Algorithm, carry: Carry, outbox: Tree, turn: Turn, at_sites: bool = False
    ) -> list[Field]:
        """Return the fields that leave the clients; unless they are `at_sites`, each client counts as a site.

        Values that only some clients send besides their messages are listed once sent.
        """
        reply = self.reply(self.empty_block(), outbox, turn)
        info = {**reply.info, **dict.fromkeys(self.noted, torch.empty(0))}
        return of_reply(algorithm, carry, reply._replace(info=info), at_sites)

    def _stacked(self, data: FederatedData) -> list[tuple[Tensor, ClientData]]:
        if id(data) not in self._validation:
            if len(self._validation) == _MOST_VALIDATIONS:
                del self._validation[next(iter(self._validation))]
            self._validation[id(data)] = (data, data.to(self.device).buckets(small=SMALL_BLOCK))
        return self._validation[id(data)][1]

    def state_dict(self) -> dict[str, Tensor]:
        """Return ids and states of the clients that have committed, flat."""
        return self.table.state_dict()

    def load_state_dict(self, flat: dict[str, Tensor], anyway: bool = False) -> None:
        """Load the states in `flat` of the clients that are here."""
        local = torch.zeros(self.clients, dtype=torch.bool)
        for ids, _ in self._blocks:
            local[ids] = True
        self.table.load_state_dict(flat, local)

    def meet(self) -> None:
        """Do nothing: there are no other processes."""

    def introduce(self, about: Callable[[], Mapping[str, str]]) -> None:
        """Do nothing: there is no other process to compare with."""


def _places(cohort: Tensor, ids: Tensor) -> Tensor | None:
    """Return the positions in `ids` of the clients in the cohort, None for all; both are ascending."""
    if cohort.equal(ids):
        return None
    place = torch.searchsorted(ids, cohort)
    inside = place < len(ids)
    place, cohort = place[inside], cohort[inside]
    place = place[ids[place] == cohort]
    return None if len(place) == len(ids) else place


def _shapes(message: Tree) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one client's tensors, by their path."""
    return {path: tuple(leaf.shape[1:]) for path, leaf in tree.items(message)}


def _as_slice(ids: Tensor) -> Rows:
    """Return consecutive ids as a slice, so that they are read as views."""
    first, last = int(ids[0]), int(ids[-1]) + 1
    return slice(first, last) if last - first == len(ids) and _ascend(ids) else ids


def _ascend(ids: Tensor) -> bool:
    """Return whether distinct ids ascend."""
    return bool(((numbers := ids.numpy())[1:] > numbers[:-1]).all())


def joined(infos: Sequence[tuple[Rows, dict[str, Tensor]]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (ids, info) of several blocks in ascending order of ids; NaN for values that a block does not have."""
    if not infos:
        return torch.zeros(0, dtype=torch.int64), {}
    if len(infos) == 1 and (isinstance(infos[0][0], slice) or _ascend(infos[0][0])):
        return indices(infos[0][0]), tree.to(infos[0][1], "cpu", torch.float64, copy=True)
    names = list(dict.fromkeys(name for _, info in infos for name in info))
    unknown = lambda ids: torch.full((client_count(ids),), torch.nan, dtype=torch.float64)
    told = lambda name: [part[name].to("cpu", torch.float64) if name in part else unknown(ids) for ids, part in infos]
    info = {name: torch.cat(told(name)) for name in names}
    ids = torch.cat([indices(rows) for rows, _ in infos])
    order = slice(None) if _ascend(ids) else ids.argsort()
    return ids[order], tree.take(info, order)


def block_bytes(device: torch.device) -> int:
    """Return the bytes that a block of clients may take: 128 MiB, or a quarter of a CUDA device's free memory."""
    if not is_cuda(device):
        return _BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return free // _SHARE
