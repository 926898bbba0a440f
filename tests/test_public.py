"""What the stubs of the packages declare is there, documented, annotated and shown by an example that runs; pages,
experiments and their configurations use nothing else."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import public
import pytest

import fedtorch as ft
from fedtorch import _lazy

MOST = 273  # names that are no parts
PARTS = {  # what the functions of the parts in CONTRIBUTING.md return: one more is what the package is for
    "Algorithm",
    "Attack",
    "Cohort",
    "Deviation",
    "Exchange",
    "Faults",
    "Figure",
    "GlobalKernel",
    "GlobalPrior",
    "LocalKernel",
    "LocalSolver",
    "Model",
    "Poison",
    "Rule",
    "Solution",
    "StackedMetric",
    "Wrapper",
}
MISSPELT = {"fedtorch.fedavgg"}  # on purpose, where a page shows what a wrong name is answered with
CALLABLE = public.classes_and_functions()


def part(value: Any) -> str:
    """Return which part a function returns, "question" for one of a fitted `run`, and "" for any other value."""
    if not inspect.isfunction(value):
        return ""
    returned, first = value.__annotations__.get("return", ""), next(iter(value.__annotations__), "")
    return returned if returned in PARTS else "question" if first == "run" else ""


def test_no_more_names_are_declared_than_a_reader_can_look_through() -> None:
    """Parts are not counted: who has used one knows how to use the others of its kind."""
    many = sum(not part(value) for value in public.declared().values()) - MOST
    assert many <= 0, f"{many} more than {MOST}: take one away that nobody needs, or leave the new one undeclared"


def test_parts_are_known_by_what_functions_return() -> None:
    declared = public.declared()
    assert {part(value) for value in declared.values()} == {*PARTS, "question", ""}
    assert part(declared["fedtorch.federation.exchanges.robust.krum.krum"]) == "Rule"
    assert part(declared["fedtorch.inference.comparison.loo"]) == "question"
    assert part(declared["fedtorch.federation.exchanges.robust.rules.Rule"]) == "", "a type is none"
    assert part(declared["fedtorch.federation.runs.run.run"]) == ""


@pytest.mark.parametrize("package", public.packages())
def test_a_package_hands_out_what_its_stub_declares(package: str) -> None:
    module = public._module(package)
    for name, (home, attribute) in _lazy.declared(package, public.stubs()[package]).items():
        defined = getattr(public._module(home), attribute)
        assert getattr(module, name) is defined, f"{package}.{name} is not {home}.{attribute}"
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_a_module_that_is_handed_out_lists_its_public_names() -> None:
    handed_out = public.handed_out()
    assert [name for name, names in handed_out.items() if not names] == []
    for name, names in handed_out.items():
        assert [each for each in names if not hasattr(public._module(name), each)] == []


def test_public_names_are_documented() -> None:
    assert [name for name, value in CALLABLE.items() if not (inspect.getdoc(value) or "").strip()] == []


def unannotated(value: Any) -> list[str]:
    """Return the parameters of a function that have no annotation, and "return" where its result has none."""
    function = inspect.unwrap(value.__init__ if inspect.isclass(value) else value)
    code = getattr(function, "__code__", None)
    if code is None or not str(getattr(function, "__module__", "")).startswith("fedtorch"):
        return []  # of another library, or made by `dataclass` and `NamedTuple`
    names = [*inspect.signature(function).parameters, *([] if inspect.isclass(value) else ["return"])]
    return [name for name in names if name not in function.__annotations__ and name != "self"]


def test_public_names_are_annotated() -> None:
    assert {name: unannotated(value) for name, value in CALLABLE.items() if unannotated(value)} == {}


def test_a_missing_annotation_is_found() -> None:
    def half(a: int, b) -> int:  # type: ignore[no-untyped-def]
        return a

    half.__module__ = "fedtorch.example"
    assert unannotated(half) == ["b"]


def test_every_public_name_is_used_by_a_runnable_example() -> None:
    assert public.without_example() == []


def test_examples_are_found_where_they_are() -> None:
    found = public.examples()
    assert found["fedtorch.federation.algorithms.fedavg.fedavg"][0] == "fedtorch.federation.algorithms.fedavg.fedavg"
    assert "fedtorch.vfl" in found["fedtorch.vfl.rows.parties.align"]  # of the package's text
    assert "start" in found["fedtorch.federation.lightning.federation.Federation"]  # the page


def test_pages_experiments_and_configurations_use_declared_names_only() -> None:
    found = {(place, chain): public.undeclared(chain) for place, chains in public.uses().items() for chain in chains}
    assert {use: part for use, part in found.items() if part and part not in MISSPELT} == {}


def test_undeclared_uses_are_found() -> None:
    program = """
import fedtorch as ft
from fedtorch import models
from fedtorch.federation.runs.run import Run
from fedtorch.models.gibbs import kernels as k

ft.History, ft.data.digits(), models.linear.LinearHead(2), models.linear.Spectral, k.check_start
other.History
"""
    found = {public.undeclared(chain) for chain in public.chains(program)}
    assert found == {
        None,
        "fedtorch.History",
        "fedtorch.federation.runs.run",
        "fedtorch.models.linear.Spectral",
        "fedtorch.models.gibbs.kernels",
    }


def test_undeclared_uses_of_pages_are_found() -> None:
    page = """
Begin with `ft.History`, or `fedtorch.trust.record.spans` and `ft.data.digits`.

```yaml
algorithm: {class_path: fedtorch.federation.algorithms.ep.algorithm.EPServer}
```

```{code-cell} ipython3
:tags: [hide-cell]
import fedtorch as ft
from fedtorch.trust import privacy
```

```{code-cell} ipython3
privacy.epsilon, privacy.Entropy
```
"""
    assert {public.undeclared(chain) for chain in public.used_by_page(page)} == {
        None,
        "fedtorch.History",
        "fedtorch.trust.record.spans",
        "fedtorch.federation.algorithms.ep.algorithm",
        "fedtorch.trust.privacy.Entropy",
    }


def test_completion_offers_public_names_only() -> None:
    shown = {module: dir(public._module(module)) for module in public.handed_out()}
    assert len(shown) > 50
    assert {module: names for module, names in shown.items() if names != sorted(public.handed_out()[module])} == {}


def test_nothing_private_is_public() -> None:
    names = [f"{module}.{name}" for module, names in public.handed_out().items() for name in names]
    assert [name for name in names if re.search(r"\._", name)] == []


def test_contents_are_what_the_package_hands_out() -> None:
    contents = dict(public.contents())
    assert contents["fedavg"] == "fedtorch.federation.algorithms.fedavg.fedavg"
    assert contents["data"] == "fedtorch.data"
    assert isinstance(public._module(contents["recipes"]), ModuleType)


@pytest.mark.slow
def test_the_example_of_a_module_that_is_called_like_its_function_runs_alone() -> None:
    """In a process of its own, where nothing else has imported the package before."""
    root = Path(ft.__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "fedtorch/inference/ranef.py", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
