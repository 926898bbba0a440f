"""What a run keeps, what it has to agree with to go on from it, and how clients join that were not there before.

A checkpoint belongs to a run with the same settings on the same rows, by `fingerprint` and by what the population notes
of its rows. Clients that join are numbered after those that were there. They are in the initial state, and the server's
state becomes that of a run which has had them from the beginning and has never asked them: totals grow by what they
tell, and what `Algorithm.init` makes of the number of clients becomes what it makes of the new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtorch import checkpoint, tree
from fedtorch.checkpoint import below, describe
from fedtorch.data.digests import different
from fedtorch.federation.exchanges.carry import agreed
from fedtorch.federation.exchanges.exchange import sum_over
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.federation.runs.run import Run

_COUNTS = ("number", "bytes_up", "bytes_down")
_TOTAL = "total"  # the field of a server's state of what clients tell for good


def fingerprint(run: Run) -> dict[str, str]:
    """Return the settings that a run's checkpoints belong to, by name."""
    about = {**run.algorithm.settings, "seed": run.seed, "cohort": run.cohort, "faults": run.faults}
    about.update(agreed(run.population.carry))
    return {**{name: describe(value) for name, value in about.items()}, "clients": describe(run.population.names)}


def state_of(run: Run) -> dict[str, Tensor]:
    """Return everything that a run needs to go on, flat; see `Run.state_dict`."""
    flat = {f"clients.{name}": leaf for name, leaf in run.clients.state_dict().items()}
    flat.update(tree.flatten(tree.to(run.server, "cpu", copy=True), "server"))
    flat.update({f"history.{name}": leaf for name, leaf in run.log.state_dict().items()})
    for i, recorder in enumerate(run.recorders):
        flat.update({f"recorders.{i}.{name}": leaf for name, leaf in recorder.state_dict().items()})
    flat.update({name: torch.tensor(getattr(run, name)) for name in _COUNTS})
    flat.update({f"rows.{name}": leaf for name, leaf in run.population.noted().items()})
    flat["rows.clients"] = torch.tensor(len(run.population.names))
    texts = {"fingerprint": json.dumps(run.fingerprint()), "ended": run.ended}
    return flat | {name: torch.tensor(list(text.encode()), dtype=torch.uint8) for name, text in texts.items()}


def load(run: Run, flat: Mapping[str, Tensor], anyway: bool, joined: str | None) -> None:
    """Go on from what `state_of` returned; see `Run.load_state_dict`."""
    if joined not in (None, "new"):
        raise ValueError(f"Expected joined='new', or None where no clients have joined, but got {joined!r}")
    before, now = _clients_of(flat, run), len(run.population.names)
    _check_number(before, now, joined)
    checkpoint.check_structure(flat, state_of(run), "server." if before < now else None)
    if not anyway:
        mine = {**fingerprint(run), "clients": describe(run.population.names[:before])}
        checkpoint.check_fingerprint(json.loads(bytes(flat["fingerprint"].tolist())), mine)
        _check_rows(run, below("rows.", flat), before)
    if before > now:
        raise ValueError(
            f"Expected a checkpoint of {now} clients or fewer, but got one of {before}; a run goes on with all that it "
            "began with: cohort=[0, 1] leaves others unasked"
        )
    server = tree.unflatten(flat, run.server, "server") if before == now else _joined(run, flat, before)
    for i, recorder in enumerate(run.recorders):
        recorder.load_state_dict(below(f"recorders.{i}.", flat))
    run.clients.load_state_dict(below("clients.", flat))
    run.log.load_state_dict(below("history.", flat))
    run.server = tree.map(lambda new, old: new.to(old.device, copy=True), server, run.server)
    if before < now and _total_of(server) is not None and not _adds(run, flat):
        run.server = run.server._replace(total=_total_anew(run))
    run.number, run.bytes_up, run.bytes_down = (int(flat[name]) for name in _COUNTS)
    run.last, run.ended = None, bytes(flat["ended"].tolist()).decode() if "ended" in flat else ""
    run.clients.introduce(lambda: {**run.fingerprint(), "round": str(run.number)})


def _clients_of(flat: Mapping[str, Tensor], run: Run) -> int:
    """Return of how many clients a checkpoint is."""
    return int(flat["rows.clients"]) if "rows.clients" in flat else len(run.population.names)


def _check_number(before: int, now: int, joined: str | None) -> None:
    if before < now and joined is None:
        raise ValueError(
            f"Expected a checkpoint of a run with {now} clients, but got one with {before}; pass joined='new' to go on "
            "with clients beyond these, which then begin in the initial state: run.load(path, joined='new'), "
            "ft.Federation(…, joined='new'), or `fedtorch fit --joined new`"
        )


def _check_rows(run: Run, before: Mapping[str, Tensor], clients: int) -> None:
    """Refuse other rows of the clients that were there, as far as they are noted."""
    if (found := different(before, run.population.noted(clients), run.population.names)) is not None:
        raise ValueError(
            f"Expected a checkpoint of a run on the rows that are here, but {found} when it was saved; pass "
            f"{checkpoint.ANYWAY}"
        )


# -- clients that join ---------------------------------------------------------------------------------------------


def _joined(run: Run, flat: Mapping[str, Tensor], before: int) -> Tree:
    """Return the server's state of a checkpoint of fewer clients, as it is with all of them."""
    budget = run.algorithm.budget
    if budget is not None and not budget.lasting:
        raise ValueError(
            "Expected an algorithm without a budget, or with a ledger in a file, which says how many clients there "
            "were in each round, but clients join one whose ledger is in memory; pass ledger=path"
        )
    now = len(run.population.names)
    begun, state = run.begun(now)
    fresh, like, earlier = tree.flatten(begun, "server"), tree.flatten(run.server, "server"), dict[str, Tensor]()
    made = dict[str, Tensor]()
    for name in like:
        loaded, new = flat[name], fresh[name].to("cpu")
        if _is_total(name):
            made[name] = new
        elif loaded.shape != new.shape:
            made[name] = _with_rows(name, loaded, new, before)
        else:
            earlier = earlier or _earlier(run, before)
            made[name] = _moved(name, loaded, new, earlier[name].to("cpu"))
    server = tree.unflatten(made, run.server, "server")
    if run.algorithm.told is None or not _adds(run, flat):
        return server
    told = run.algorithm.told.of(tree.expand(state, 1))
    others = tree.map(lambda leaf: leaf.expand(now - before, *leaf.shape[1:]), told)
    change = tree.to(sum_over(run.algorithm.exchange, others, slice(before, now)), "cpu")
    return server._replace(total=tree.add(tree.unflatten(flat, begun.total, f"server.{_TOTAL}"), change))


def _earlier(run: Run, clients: int) -> dict[str, Tensor]:
    """Return what the server's state began with of fewer clients, flat."""
    try:
        return tree.flatten(run.begun(clients)[0], "server")
    except ValueError as error:
        raise ValueError(
            f"Expected an algorithm that clients can join, but it refuses fewer of them: {error}"
        ) from error


def _moved(name: str, loaded: Tensor, new: Tensor, before: Tensor) -> Tensor:
    """Return a tensor of the server: as it is, or anew where it says how many clients there are."""
    if torch.equal(before, new):
        return loaded
    if torch.equal(loaded, before):
        return new
    raise ValueError(
        f"Expected a server whose state does not depend on how many clients there were at first, but {name!r} does, "
        "and has changed since; begin a run of all clients at this one's parameters"
    )


def _with_rows(name: str, loaded: Tensor, new: Tensor, before: int) -> Tensor:
    """Return a tensor that has a row for each client, with those of clients that join."""
    if loaded.ndim == 0 or len(loaded) != before or loaded.shape[1:] != new.shape[1:]:
        raise ValueError(
            f"Expected a server whose state has a row for each client, or nothing of any, but {name!r} is "
            f"{tuple(loaded.shape)} with {before} clients and {tuple(new.shape)} with all; begin a run of all clients"
        )
    return torch.cat([loaded, new[before:]])


def _is_total(name: str) -> bool:
    return name == f"server.{_TOTAL}" or name.startswith(f"server.{_TOTAL}.")


def _total_of(server: Tree) -> Tree:
    return getattr(server, _TOTAL, None)


def _adds(run: Run, flat: Mapping[str, Tensor]) -> bool:
    """Return whether a total is a sum over all clients, and not one for each of them."""
    mine = tree.flatten(_total_of(run.server), f"server.{_TOTAL}")
    return all(flat[name].shape == leaf.shape for name, leaf in mine.items())


def _total_anew(run: Run) -> Any:
    """Return the total of what all clients tell, of those that join what they tell in the initial state."""
    total = run.clients.total()
    if total is None:
        raise ValueError("Expected all clients, whose total is made anew where others join, but some cannot be asked")
    return total
