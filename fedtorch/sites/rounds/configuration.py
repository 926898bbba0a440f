"""The configuration of a site: its clients' rows, the algorithms that it offers, by name, and its policy.

A configuration is usually a file at the site, `my_data.py`:

    import torch, fedtorch as ft
    from fedtorch.sites import Policy

    data = ft.data.from_tensors([(x, y)], names=["ward 7"])

    def fedavg(lr: float) -> ft.Algorithm:
        return ft.fedavg(ft.gradient_descent(torch.nn.Linear(3, 1), loss=loss, optimizer=..., epochs=1))

    algorithms = {"fedavg": fedavg}
    policy = Policy(rounds=1000)

The server chooses the settings: let a function take few, and check those that cost time or memory.

A server names an algorithm and gives settings as JSON; the site calls its function of that name. Nothing else from the
server decides what is run.

For formulas of the server the file has a frame in place of rows, and the algorithms are functions of a design:

    frame, client = "patients.csv", "ward"  # or a frame, or a function that returns one; the column of clients

    def regression(design, family="logistic"):
        return ft.ep(hierarchical.regression(design, family))

    algorithms = {"regression": regression}
    policy = Policy(minimum=10, columns=("death", "age", "sex"))
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedtorch import expected
from fedtorch.data import FederatedData
from fedtorch.data.formulas.cells import Cells, level_name
from fedtorch.federation.algorithm import Algorithm
from fedtorch.sites.formulas.tables import read_frame, without_rows
from fedtorch.sites.rounds.policy import AFTER_FIT, COMPOSED, Policy

_LISTED = 5  # most clients that are listed by name
_DONE = {"refuse": "refused", "drop": "rows left out", "impute": "imputed"}  # treatment of missing cells


@dataclass(frozen=True)
class SiteConfiguration:
    """The configuration of a site.

    Attributes:
        data: its clients' rows.
        algorithms: by name, functions of settings that return an algorithm with a `start`, the structure of its
            parameters; if it has none, use `dataclasses.replace(algorithm, start=...)`. Each call makes a new algorithm
            with a new solver: sites of one process compute at the same time, and a site that would share another's
            solver refuses the run.
        policy: limits on its answers.
        validation: rows of the same clients for `metrics`.
        metrics: metrics by name, as for `Run.evaluate`.
        chunk: most clients to compute at once.
        frame: a table whose rows are made by a design, see `of_frame`; `data` has no columns before sites agree on one.
        client: the frame's column of clients.
        missing: treatment of missing cells in columns that a formula reads: "refuse" them, "drop" their rows from all
            reports and computations, or "impute" them at the site. Algorithms that impute are
            `ft.normal_em(M, columns=design)`, and others with `| ft.inference.completed(...)`. If one site of a run
            imputes, rows of all sites have a mask; sites without missing cells may say "refuse", none "drop".

    Raises:
        TypeError: an attribute has a wrong type.
        ValueError: no algorithms; a policy out of range, or whose carry= does not name each algorithm; validation rows
            of other clients.
    """

    data: FederatedData
    algorithms: Mapping[str, Callable[..., Algorithm]]
    policy: Policy = field(default_factory=Policy)
    validation: FederatedData | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    chunk: int | None = None
    frame: Any = None
    client: str = ""
    missing: Literal["refuse", "drop", "impute"] = "refuse"

    @classmethod
    def of_frame(
        cls, frame: Any, client: str, algorithms: Mapping[str, Callable[..., Algorithm]], **more: Any
    ) -> SiteConfiguration:
        """Configure a site with a frame, whose rows are made by a design on which sites agree.

        Args:
            frame: a pandas frame, or one with `__dataframe__`; the path of a CSV or parquet file; or a function that
                returns a frame.
            client: the column of clients.
            algorithms: by name, functions of a design and of settings by name.
            more: other attributes.
        """
        table = read_frame(frame)
        return cls(without_rows(table, client), algorithms, frame=table, client=client, **more)

    def described(self) -> str:
        """Return a text for people at the site: its clients, columns and algorithms, and what a server may get."""
        policy, counts, names = self.policy, self.data.counts.tolist(), self.data.names
        counted = policy.counted if policy.person is None else f"persons ({policy.person!r})"
        each = ", ".join(f"{name} {count}" for name, count in zip(names[:_LISTED], counts))
        lines = [
            f"Clients: {len(names)} of {sum(counts)} rows in all ({each}{', …' * (len(names) > _LISTED)})",
            *self._columns(),
            "Algorithms: " + ", ".join(f"{name}{inspect.signature(make)}" for name, make in self.algorithms.items()),
            f"Behind each number that leaves: at least {policy.minimum} {counted}",
        ]
        if policy.minimum == 1:
            lines.append("    so a number may come from a single row, as for a site that is one person")
        few = min(self.rows_of_clients()) < policy.minimum
        carry = {"": policy.carry} if not isinstance(policy.carry, Mapping) else policy.carry
        ways = ", ".join(f"{name}: {way}" if name else str(way) for name, way in carry.items())
        scores = ", ".join(self.metrics) if self.validation is not None else ""
        lines += [
            f"Before a run: clients' {'pseudonyms, and their mean row count' if few else 'names and row counts'}",
            *(["    and for a formula, histograms of its columns and names of common levels"] if self.client else []),
            "In a run: what the algorithm sends, which `run.disclosure()` lists at the server"
            + (f", carried {ways}" if ways else ", not hidden from the server"),
            f"Scores of the validation rows: {scores or 'none'}",
            *([f"    exactly, by models that the server chooses: {COMPOSED}"] if scores else []),
            f"After a fit: {'; '.join(AFTER_FIT[name] for name in policy.after_fit) or 'nothing'}",
            *([f"    exactly, of at least so many {policy.counted}: {COMPOSED}"] if policy.after_fit else []),
            f"Rounds in all: {'any number' if policy.rounds is None else policy.rounds}",
            f"Noise that is accounted for: {'none' if policy.epsilon is None else f'epsilon {policy.epsilon:g}'}",
        ]
        return "\n".join(lines)

    def _columns(self) -> list[str]:
        """Return a line for each column that formulas may read, and one line for all others."""
        if self.frame is None:
            return []
        hidden = [name for name in (self.client, self.policy.person) if name]
        columns = [name for name in self.frame if name not in hidden]
        read = columns if self.policy.columns is None else [name for name in columns if name in self.policy.columns]
        lines = ["Columns that formulas may read:"]
        if absent := [name for name in self.policy.columns or () if name not in columns]:
            lines.append(f"    not in the frame, although the policy names them: {', '.join(absent)}")
        for name in read:
            lacking = int(self.frame[name].isna().sum())
            cells = f"{lacking} of {len(self.frame)} cells missing, {_DONE[self.missing]}" if lacking else "complete"
            lines.append(f"    {name}: {self.frame[name].dtype}, {cells}")
        unread = [*hidden, *(name for name in columns if name not in read)]
        return [*lines, f"Columns that no formula reads: {', '.join(map(str, unread)) or 'none'}"]

    def rows_of_clients(self) -> list[int]:
        """Return each client's number of rows, or of persons if the policy counts these."""
        persons = self.persons()
        return self.data.counts.tolist() if persons is None else [len(each) for each in persons.values()]

    def persons(self) -> dict[str, frozenset[Any]] | None:
        """Return the persons of each client, by its name; None if the policy counts rows."""
        if self.policy.person is None:
            return None
        by_client = self.frame.groupby(self.client, sort=False)[self.policy.person]
        return {level_name(client): frozenset(values) for client, values in by_client.unique().items()}

    def rows_of_a_person(self) -> int:
        """Return the most rows of one person; 1 if the policy counts rows."""
        return 1 if self.policy.person is None else int(self.frame[self.policy.person].value_counts().max())

    def __post_init__(self) -> None:
        advice = "make it with ft.data.from_tensors([(x, y)]), or of loaders' data sets with ft.data.from_datasets"
        expected.kind(self.data, FederatedData, "data as FederatedData", advice)
        expected.kind(self.algorithms, Mapping, "algorithms by name", "such as algorithms = {'fedavg': make}")
        if not self.algorithms:
            raise ValueError("Expected at least one algorithm that the site offers, but got none")
        for name, make in self.algorithms.items():
            expected.function(make, f"algorithm {name!r} as a function of its settings", "wrap it in one")
        expected.kind(self.policy, Policy, "policy as Policy", "such as policy = Policy(rounds=100)")
        self.policy.check()
        if self.policy.person is not None:
            if self.frame is None or self.policy.person not in self.frame:
                raise ValueError(
                    f"Expected a policy whose person= is a column of the site's frame, but got {self.policy.person!r}; "
                    "bring a frame with it, by SiteConfiguration.of_frame(...), or let rows count"
                )
            if self.validation is not None:
                raise ValueError(
                    "Expected no validation rows beside a policy with person=, because their persons are not known; "
                    "evaluate at the site, with the model that `join` returns"
                )
            Cells(self.frame).complete(self.policy.person)
        if self.missing not in _DONE:
            raise ValueError(f"Expected missing= as one of {list(_DONE)}, but got {self.missing!r}")
        if isinstance(self.policy.carry, Mapping) and set(self.policy.carry) != set(self.algorithms):
            raise ValueError(
                f"Expected policy whose carry= names all algorithms {sorted(self.algorithms)} and no others, but got "
                f"{sorted(self.policy.carry)}"
            )
        if self.validation is not None and self.validation.names != self.data.names:
            raise ValueError("Expected validation rows of the same clients; split them with data.split(0.8, seed=0)")


def read_configuration(path: Path | str) -> SiteConfiguration:
    """Return the configuration that a Python file defines: `data`, `algorithms`, and optional attributes.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: a policy with smallest_cohort=, which minimum= replaces.
        ValueError: data or algorithms are missing; a frame without client, the column of clients.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Expected a file with the site's data and algorithms, but {path} is not there")
    try:
        defined = runpy.run_path(str(path))
    except TypeError as error:
        if "'smallest_cohort'" not in str(error):
            raise
        raise TypeError(
            "Expected Policy(minimum=…), rows behind every number that leaves the site, or persons with person=…, but "
            "got smallest_cohort=, which minimum= replaces; leave it out"
        ) from error
    if "frame" in defined and "data" not in defined:
        names = [name for name in SiteConfiguration.__dataclass_fields__ if name in defined]
        if {"client", "algorithms"} <= set(names):
            return SiteConfiguration.of_frame(**{name: defined[name] for name in names})
    missing = [name for name in ("data", "algorithms") if name not in defined]
    if missing:
        raise ValueError(
            f"Expected {path} to define {' and '.join(missing)}, or frame, client and algorithms; see "
            "fedtorch.sites.rounds.configuration"
        )
    return SiteConfiguration(
        **{name: defined[name] for name in SiteConfiguration.__dataclass_fields__ if name in defined}
    )
