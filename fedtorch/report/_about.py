"""The facts of a run besides its history, as plain data for JSON: clients, network, posteriors, settings, versions."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedtorch.data import FederatedData
from fedtorch.data.frames.incomplete import Incomplete
from fedtorch.federation.runs.run import Run
from fedtorch.metrics.scores import Score
from fedtorch.networks import Network
from fedtorch.plots.layouts import node_places
from fedtorch.report import _posteriors as posteriors
from fedtorch.trust import record
from fedtorch.vfl.fit.run import VerticalRun

FORMAT = 1
_SHOWN = 20  # clients whose missing cells are shown
_NODES, _EDGES = 1200, 3000  # the most nodes and edges of a network that are drawn


def about(
    run: Run | VerticalRun,
    *,
    title: str = "",
    ended: str = "",
    scores: Mapping[str, Score] | None = None,
    network: Any = None,
    clients: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the facts of a run for its report, besides the history.

    Args:
        run: the run, during or after training.
        title: of the report; default: the algorithm's name.
        ended: the reason why the run ended, if the report should give one; default: `run.ended`.
        scores: of the clients' models, from `Run.evaluate`.
        network: a `Network` to draw; default: that of the algorithm, if it has one.
        clients: each client's posterior, see `posteriors.by_client`.
    """
    settings = run.fingerprint()
    return {
        "format": FORMAT,
        "title": title or settings.get("algorithm", "A federated run"),
        "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "rounds": run.number,
        "ended": ended or run.ended,
        "clients": list(run.names if isinstance(run, VerticalRun) else run.population.names),
        "settings": settings,
        "versions": record.versions(),
        "machine": f"{platform.platform()}, {platform.machine()}",
        "scores": {name: _score(score) for name, score in (scores or {}).items() if score.is_number},
        "network": reduced(network),
        "posteriors": [*posteriors.described(run), *(clients or [])],
        "disclosure": _disclosure(run),
        **({} if isinstance(run, VerticalRun) else _of_federation(run, network, bool(ended or run.ended))),
    }


def _of_federation(run: Run, network: Any, ended: bool) -> dict[str, Any]:
    """Return the facts that vertical fits do not have, of the algorithm and of the population."""
    organisations = getattr(run.population, "organisations", {})
    return {
        "network": reduced(run.algorithm.exchange.network if network is None else network),
        "privacy": _privacy(run),
        "missing": _missing(run),
        "audited": _audited(run),
        "organisations": {name: list(sites) for name, sites in organisations.items()},
        "absences": dict(getattr(run.population, "absences", {})),
        "goal": None if ended or run.goal is None or run.number >= run.goal else run.goal,
    }


def _score(score: Score) -> dict[str, Any]:
    failed = 0 if score.failed is None else int(score.failed.sum())
    numbers = {"overall": score.overall, "clients": score.clients.tolist(), "failed": failed}
    numbers["undefined"] = score.count_undefined()
    return {**numbers, "largest_is_best": score.largest_is_best}


def _disclosure(run: Run | VerticalRun) -> list[list[str]]:
    """Return the disclosure table, header first, with one row for similar fields; empty for fits in one graph."""
    if not hasattr(run, "disclosure"):
        return []
    brief = run.disclosure(brief=True)
    return [list(brief.columns), *brief.astype(str).values.tolist()]


def _missing(run: Run) -> dict[str, Any] | None:
    """Return the shares of missing cells by client, largest first; None if no cell was missing."""
    elsewhere = hasattr(run.population, "counts")  # a population of sites has row counts and no rows
    data = None if elsewhere else getattr(run.population, "data", None)
    if not isinstance(data, FederatedData) or not (data.absent or isinstance(data.rows, Incomplete)):
        return None
    shares = data.missing()
    order = [*shares.iloc[:-1].sort_values("any", ascending=False, kind="stable").index[:_SHOWN], shares.index[-1]]
    rows = [[str(name), *shares.loc[name].tolist()] for name in order]
    return {"columns": list(shares.columns), "rows": rows}


def _audited(run: Run) -> str:
    """Return the name of the file of the server's audit record, empty if there is none."""
    record = getattr(getattr(run.population, "plan", None), "record", None)
    return "" if record is None else record.path.name


def _privacy(run: Run) -> dict[str, Any] | None:
    """Return the claim and the budget of an algorithm with a privacy ledger."""
    ledger = getattr(run.algorithm.budget, "ledger", None)
    if ledger is None:
        return None
    return {"epsilon": ledger.epsilon, "delta": ledger.delta, "budget": ledger.budget, "claim": ledger.claim._asdict()}


def reduced(network: Network | None) -> dict[str, Any] | None:
    """Return a network as plain data for a drawing: nodes to draw, their places, edges, and facts."""
    if network is None:
        return None
    shown = np.unique(np.linspace(0, network.nodes - 1, min(_NODES, network.nodes)).round().astype(int))
    place = np.full(network.nodes, -1)
    place[shown] = np.arange(len(shown))
    pairs = place[network.edges.numpy()]
    pairs = pairs[(pairs >= 0).all(1)]
    pairs = pairs[np.unique(np.linspace(0, max(0, len(pairs) - 1), min(_EDGES, len(pairs))).round().astype(int))]
    places = node_places(network)[shown]
    span = np.ptp(places, axis=0).max(initial=1e-12)
    counts = network.neighbour_counts
    return {
        "shown": shown.tolist(),
        "places": ((places - places.min(0)) / span).round(4).tolist(),
        "edges": pairs.tolist(),
        "partly": len(shown) < network.nodes or len(pairs) < len(network.edges),
        "facts": {
            "nodes": network.nodes,
            "edges": len(network.edges),
            "components": network.components.number,
            "neighbours": [int(counts.min()), float(counts.double().mean()), int(counts.max())],
            "connectivity": network.algebraic_connectivity if 1 < network.nodes <= 2000 else None,
        },
    }
