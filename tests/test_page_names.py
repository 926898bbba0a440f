"""What pages call by name is there: names of the package, arguments, files, commands and their options."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import page_names

BLOCKS = """
```python
import fedtorch as ft
from fedtorch.models import hierarchical

model = fit(rows)
```
"""


def test_every_name_of_a_page_stands_for_something() -> None:
    found = {str(path): page_names.Page(path).unresolved() for path in page_names.pages()}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_name_of_a_docstring_stands_for_something() -> None:
    found = {
        module: page_names.Docstrings(module, text).unresolved() for module, text in page_names.docstrings().items()
    }
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("fedtorch.sites.rounds.population", "such as `transport.serve(...)`"),
        ("fedtorch.sites.rounds.population", "see `fedtorch.sites.make_authority`"),
        ("fedtorch.sites.rounds.population", "see `past_sums.begin`"),
        ("fedtorch.sites.enrolment", "see `identity.make_nobody`"),
        ("fedtorch.federation.runs.run", "see `ft.Run.stop_now`"),
        ("fedtorch.federation.runs.run", "see `Run.stop_now(…)`"),
    ],
)
def test_names_of_nothing_are_found_in_docstrings(module: str, text: str) -> None:
    assert len(page_names.Docstrings(module, [text]).unresolved()) == 1


def test_modules_that_nobody_hands_out_need_their_whole_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = ["`past_sums.begin(folder)` of `fedtorch.sites`", "`fedtorch.sites.rounds.past_sums.begin(folder)`"]
    found = []
    for text in pages:
        monkeypatch.setattr(page_names, "ROOT", tmp_path)
        (tmp_path / "page.md").write_text(text)
        page = page_names.Page(tmp_path / "page.md")
        monkeypatch.undo()
        found.append(page.unresolved())
    assert found == [["past_sums.begin(folder): no past_sums.begin"], []]


@pytest.mark.parametrize(
    "text",
    [
        "hierarchical.poisson",
        "ft.fedavrage",
        "fedtorch.models.hierarchical.linaer",
        "privacy.epsilons",
        "ft.InProcess(data, chunks=1)",
        "ft.Run.stop_now",
        "run.bytes_upwards",
        "data.split_in_halves(0.8)",
        "model.no_such_member",
        "wheels=",
        "ft.scaffold(local) | ft.trust.attacks.no_such_attack([0])",
        "not_a_word_of_it",
        "no_such_script.py",
        "fedtorch/federation/algorithms/<name>.rs",
        "make no-such-target",
        "make test PYTEST=tests/vfl",
        "fedtorch report DIR --no-such-option",
        "fedtorch no-such-command",
        "python -m experiments.no_such_experiment",
        "python -m experiments.quickstart --no-such-option",
        "--no-such-option",
        "pip install 'fedtorch[everything]'",
        "callbacks: [{class_path: fedtorch.NoReport}]",
    ],
)
def test_names_of_nothing_are_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_names, "ROOT", tmp_path)  # of pages only: what programs say is kept
    page = tmp_path / "page.md"
    page.write_text(f"{BLOCKS}\nIt is `{text}`.\n")
    read = page_names.Page(page)
    monkeypatch.undo()
    assert len(read.unresolved()) == 1


def test_commands_of_blocks_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_names, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ fedtorch report DIR  # what it is\n$ make nothing\n```\n\n```python\nft.nothing()\n```\n"
    )
    read = page_names.Page(page)
    monkeypatch.undo()
    assert read.unresolved() == ["make nothing: no target nothing", "ft.nothing: no ft.nothing"]
