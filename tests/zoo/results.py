"""Run the zoo and keep what came of it: `PYTHONPATH=tests python -m zoo.results`; `--page` writes the page only.

Results of each release of PyTorch stand side by side in `results.json`, of which `docs/zoo.md` is made.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import textwrap
import warnings
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zoo import masks
from zoo.case import WAYS, Case
from zoo.cases import CASES

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parents[1] / "docs" / "zoo.md"
SHORT = {"stacked": "stacked", "client by client": "one by one", "lightning_fit": "`lightning_fit`"}


def arguments(case: Case) -> str:
    """Return what a user says besides epochs and batch size."""
    said = [f"{name}={value!r}" for name, value in case.says.items()]
    if "client by client" in case.ways and "stacked" not in case.ways:
        said.append("batched=False")
    return ", ".join(f"`{each}`" for each in said)


def described(case: Case) -> dict[str, Any]:
    """Return what the table says of a case whatever the release."""
    return {
        "name": case.name,
        "package": case.distribution,
        "says": arguments(case),
        "change": case.change,
        "remark": case.remark,
    }


def measure(kept: dict[str, Any], names: list[str]) -> None:
    """Run the cases whose names contain one of `names`, or all, and keep each result when it is there."""
    from zoo.loop import outcome

    there = [case for case in CASES if find_spec(case.imports) is not None]
    release = kept["releases"].setdefault(metadata.version("torch").partition("+")[0], {"results": {}})
    release["packages"] = {case.distribution: metadata.version(case.distribution) for case in there}
    for case in there:
        key = f"{case.distribution}: {case.name}"
        if names and not any(name in key for name in names):
            continue
        each = {way: outcome(case, way) for way in WAYS}
        release["results"][key] = {
            way: float(f"{value:.1e}") if isinstance(value, float) else value for way, value in each.items()
        }
        sys.stdout.write(f"{key}: {each}\n")
        write(kept)


def write(kept: dict[str, Any]) -> None:
    """Write results and page."""
    kept["cases"] = [described(case) for case in CASES]
    kept["releases"] = dict(sorted(kept["releases"].items()))
    known = {f"{case.distribution}: {case.name}" for case in CASES}
    for release in kept["releases"].values():
        release["results"] = {key: value for key, value in release["results"].items() if key in known}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))


def cell(kept: dict[str, Any], case: dict[str, Any], way: str) -> str:
    """Return the largest difference over the releases, or – for a refusal."""
    key = f"{case['package']}: {case['name']}"
    every = [each["results"][key][way] for each in kept["releases"].values() if key in each["results"]]
    numbers = [value for value in every if isinstance(value, float)]
    return f"{max(numbers):.0e}".replace("e-0", "e-").replace("0e+00", "0") if numbers else "–"


def counts(kept: dict[str, Any]) -> dict[str, int]:
    """Return how many projects there are, without a change to their code, and stacked."""
    cases = kept["cases"]
    return {
        "projects": len(cases),
        "unchanged": sum(not case["change"] for case in cases),
        "stacked": sum(cell(kept, case, "stacked") != "–" for case in cases),
    }


def page(kept: dict[str, Any]) -> str:
    """Return the page of what is kept."""
    number, releases = counts(kept), " and ".join(kept["releases"])
    rows = [
        "| project | package | " + " | ".join(SHORT.values()) + " | a user says | remark |",
        "| --- | --- |" + " ---: |" * len(SHORT) + " --- | --- |",
    ]
    for case in kept["cases"]:
        cells = [cell(kept, case, way) for way in WAYS]
        said = case["change"] or case["says"] or "nothing"
        rows.append("| " + " | ".join([case["name"], case["package"], *cells, said, case["remark"]]) + " |")
    installed = [
        f"| {package} | " + " | ".join(each["packages"].get(package, "–") for each in kept["releases"].values()) + " |"
        for package in sorted({name for each in kept["releases"].values() for name in each["packages"]})
    ]
    header = "| package | " + " | ".join(f"PyTorch {release}" for release in kept["releases"]) + " |"
    register = textwrap.dedent(inspect.getsource(masks.register).partition('"""\n')[2].rpartition("    return")[0])
    return TEXT.format(
        mask=register.strip().replace(": Any", "").replace(" -> Any", "").replace("\n\n", "\n\n\n"),
        speed=speed(kept.get("speed", [])),
        **number,
        releases=releases,
        table="\n".join(rows),
        packages="\n".join([header, "| --- |" + " ---: |" * len(kept["releases"]), *installed]),
    )


def speed(measured: list[dict[str, Any]]) -> str:
    """Return the table of what `zoo.speed` has measured."""
    threads = sorted({each["threads"] for each in measured})
    rows: dict[tuple[Any, ...], dict[int, float]] = {}
    for each in measured:
        setting = (each["hidden"], each["rows"], each.get("mask", "of transformers"))
        rows.setdefault(setting, {})[each["threads"]] = each["ratio"]
    header = "| hidden size | rows of a client | mask | " + " | ".join(f"threads: {n}" for n in threads) + " |"
    lines = [header, "| ---: | --- | --- |" + " ---: |" * len(threads)]
    for setting, ratios in rows.items():
        lines.append("| " + " | ".join(map(str, (*setting, *(ratios.get(n, "–") for n in threads)))) + " |")
    return "\n".join(lines)


TEXT = """# Projects of other people

<!-- Written by tests/zoo/results.py from tests/zoo/results.json. -->

{projects} modules and projects of published packages, {unchanged} of them without any change to their code, trained
for two epochs on three clients with different numbers of rows, and held against a plain loop of each client: the same
batches, the same draws. The number is the largest difference of any parameter or buffer, relative to those above 1,
over PyTorch {releases}; – is a refusal that says what to write instead. {stacked} train stacked, all clients in one
pass. Weights are random and sizes tiny. `make test-zoo` makes the environment and repeats it. A package
that has no number for a release in the table at the end ran under the other alone.

{table}

What is left to a user is the choice whose statistics a BatchNorm has (`buffers=`), and `batched=False` where
`torch.vmap` cannot run the code; `batched="auto"` finds that out. Modules with several optimisers or a plateau schedule
train by `ft.lightning_fit`.

## Masks of transformers

A BERT of two layers on 20 clients, how many times as fast stacked as client by client (`tests/zoo/speed.py`, batches
of four sentences of 16 tokens, most of them padded):

{speed}

With wider layers a processor's core is busy with one client alone, and stacking saves less.

Encoders of `transformers` look whether anything is masked before they mask. Clients whose batches differ in that have
steps of their own, in groups. A mask that is always made keeps clients together, with `rowwise=True` also those that
have different numbers of rows; it is registered by the public interface of `transformers`, once:

```python
{mask}
model.set_attn_implementation("always_masked")
```

## Releases

{packages}

torchaudio and torchvision come from the index with operators for CUDA: beside a PyTorch for the CPU torchaudio cannot
be imported, and torchvision has networks but no operators.
"""


def main() -> None:
    """Measure in this environment, unless told `--page`; arguments are parts of names, none means all."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"releases": {}}
    if "--page" not in sys.argv:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        measure(kept, sys.argv[1:])
    write(kept)


if __name__ == "__main__":
    main()
