r"""Wrong messages: model poisoning by some clients, `algorithm | attack`.

An attack has two parts, each of which may be missing. *Alone*, a client replaces its message, depending on the honest
message and its own key. *Together*, the attackers of a round see all messages and replace their own. An attacker's
persistent contribution (`told`) is replaced in the same way, and the total is the sum of the replaced values.

Attacks replace the client's message, so they wrap innermost, before `privacy.client_level` or `robust.rule`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.exchanges.exchange import Exchange, Mean, RowsOf, Sum, indices
from fedtorch.federation.exchanges.messages import changed, like, rows
from fedtorch.federation.turn import Turn
from fedtorch.federation.wrapper import Stage, Wrapper, line
from fedtorch.tree import Rows, Tree

Lie = Callable[[Tree, Tensor], Tree]  # (honest messages (K, ...), keys (K,)) -> false messages
Collusion = Callable[[Tensor, Tensor], Tensor]  # (honest messages (H, D), the attackers' own (A, D)) -> (A, D)


@dataclass(frozen=True)
class Attack:
    """Replace the messages of some clients by wrong ones.

    Attributes:
        clients: indices of the attackers.
        name: for settings.
        alone: each attacker's replacement; None for none.
        together: the attackers' joint replacement, None for none.
        weight: the factor by which they exaggerate their weight.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import attacks
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.full((1,), y)) for y in (1.0, 2.0, 3.0)])
        >>> average = ft.fedavg(ft.least_squares(torch.nn.Linear(1, 1, bias=False)))
        >>> double = attacks.Attack((2,), "double", alone=lambda said, key: ft.tree.scale(said, 2.0))
        >>> run = ft.run(average | double, ft.InProcess(data), {"weight": torch.zeros(1, 1)}, rounds=1)
        >>> run.server["weight"]  # (1 + 2 + 2 · 3) / 3
        tensor([[3.]])
    """

    clients: tuple[int, ...]
    name: str
    alone: Lie | None = None
    together: Collusion | None = None
    weight: float = 1.0

    @property
    def stage(self) -> Stage:
        """Return the innermost stage: attacks replace the client's message."""
        return Stage.LOCAL

    def __call__(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm with wrong messages.

        Raises:
            ValueError: the algorithm is wrapped already; or, at the start of a run, collusion about changes of totals
                without a robust rule.
        """
        name = f"attacks.{self.name}"
        return Wrapper(self.stage, name, partial(_attacked, self), {"clients": self.clients})(algorithm)


def _attacked(attack: Attack, algorithm: Algorithm) -> Algorithm:
    told = algorithm.told
    return dataclasses.replace(
        algorithm,
        init=partial(_init, algorithm),
        client=partial(_client, algorithm, attack),
        model=lambda inbox, state: algorithm.model(inbox.inbox, state.inner),
        exchange=_marking(_colluding(algorithm, attack), attack.clients),
        told=None if told is None else told._replace(of=partial(_lie_for_good, told.of, attack)),
    )


class _Marked(NamedTuple):
    """An inbox, and which clients attack."""

    inbox: Tree
    attacks: Tensor  # (K,) bool


class _State(NamedTuple):
    """A client's state; leaves `(K, ...)`."""

    inner: Tree  # state of the algorithm
    attacks: Tensor  # () bool, whether it has taken part
    key: Tensor  # () key of its false persistent contribution


def _init(algorithm: Algorithm, parameters: Tree, clients: int) -> tuple[Tree, _State]:
    server, state = algorithm.init(parameters, clients)
    return server, _State(state, torch.tensor(False), torch.tensor(0))


def _client(algorithm: Algorithm, attack: Attack, marked: _Marked, state: _State, data: Any, turn: Turn) -> Reply:
    if not isinstance(marked, _Marked):
        raise TypeError(
            "Expected the attack's own exchange, but it was replaced; change exchanges by wrappers, such as "
            "algorithm | attack | robust.rule(...)"
        )
    reply = algorithm.client(marked.inbox, state.inner, data, turn)
    message = tree.map(partial(_lie, attack, marked.attacks, turn.key), reply.message, is_leaf=(Mean, Sum))
    return reply._replace(message=message, state=_State(reply.state, marked.attacks, turn.key))


def _lie(attack: Attack, attacks: Tensor, key: Tensor, node: Mean | Sum | Tensor) -> Mean | Sum | Tensor:
    """Replace the values in a node of a message."""
    if isinstance(node, Tensor):
        return _instead(attack, attacks, key, node)
    value = _instead(attack, attacks, key, node.value)
    if isinstance(node, Sum):
        return Sum(value)
    return Mean(value, torch.where(attacks, node.weight * attack.weight, node.weight))


def _instead(attack: Attack, attacks: Tensor, key: Tensor, message: Tree) -> Tree:
    if attack.alone is None:
        return message
    numbers = tree.as_real(message)
    lies = tree.map(lambda lie, honest: lie.to(honest.dtype), attack.alone(numbers, key), numbers)
    return tree.where(attacks, tree.from_real(lies, message), message)


def _lie_for_good(of: Callable[[Tree], Tree], attack: Attack, state: _State) -> Tree:
    return _instead(attack, state.attacks, state.key, of(state.inner))


def _marking(exchange: Exchange, clients: tuple[int, ...]) -> Exchange:
    """Mark in every inbox whether it is an attacker's."""
    wrong = torch.tensor(clients, dtype=torch.int64)

    def scatter(outbox: Tree, ids: Rows) -> _Marked:
        leaves = tree.leaves(outbox)
        attacks = torch.isin(indices(ids), wrong)
        return _Marked(exchange.scatter(outbox, ids), attacks.to(leaves[0].device if leaves else "cpu"))

    return exchange._replace(scatter=scatter)


def _colluding(algorithm: Algorithm, attack: Attack) -> Exchange:
    """Return the algorithm's exchange with the attackers' joint replacement."""
    if attack.together is None:
        return algorithm.exchange
    refusal = "" if algorithm.told is None else _only_changes(attack)
    return changed(algorithm.exchange, partial(_agreed, attack), refusal)


def _only_changes(attack: Attack) -> str:
    wanted = line({f"attacks.{attack.name}": Stage.LOCAL, "robust.rule": Stage.ROBUST})
    return (
        f"Expected fresh messages for {attack.name}, but this algorithm tells only how its totals change; write "
        f"{wanted}, with the rule robust.trimmed_mean(0.0) for no defence"
    )


def _agreed(attack: Attack, rows: RowsOf) -> RowsOf:
    wrong = torch.isin(rows.ids, torch.tensor(attack.clients, dtype=torch.int64))
    if not bool(wrong.any()) or bool(wrong.all()):
        return rows
    return rows._replace(message=tree.map(partial(_replaced, attack, wrong), rows.message, is_leaf=(Mean, Sum)))


def _replaced(attack: Attack, wrong: Tensor, node: Mean | Sum | Tensor) -> Mean | Sum | Tensor:
    """Replace the attackers' rows in a node of all clients' messages."""
    assert attack.together is not None
    value = node if isinstance(node, Tensor) else node.value
    numbers = rows(value)
    agreed = attack.together(numbers[~wrong].to(torch.float64), numbers[wrong].to(torch.float64))
    numbers = numbers.index_put((wrong.nonzero()[:, 0].to(numbers.device),), agreed.to(numbers.dtype))
    value = tree.map(lambda new, old: new.to(old.dtype), like(numbers, value), value)
    return value if isinstance(node, Tensor) else node._replace(value=value)
