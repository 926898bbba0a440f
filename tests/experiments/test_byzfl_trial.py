"""The trial of byzfl: what its documentation prints comes out, and it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments import result_pages
from experiments.trials import byzfl


def test_documented_answers() -> None:
    rows = {row.setting.removesuffix(", documented"): row for row in byzfl.documented()}
    words = {name: result_pages.compared(vars(row), byzfl.READING) for name, row in rows.items()}
    assert len(words) == 12
    assert [name for name, word in words.items() if word != "agrees"] == ["geometric median, 3 steps"]
    for name, row in rows.items():
        compared = byzfl.COMPARED[name]
        if words[name] == "agrees" and "clipped messages" not in name:
            torch.testing.assert_close(compared.ours(1)(byzfl.EXAMPLE).tolist(), list(compared.printed or ()))
        assert row.published == pytest.approx(sum(compared.printed or ()) / 3)


def test_another_answer_is_seen() -> None:
    class Wrong:
        @staticmethod
        def Median():
            return lambda messages: messages.mean(0)

    largest, equal = byzfl.beside("median", Wrong, byzfl.sets(5))
    assert largest.ours > 1e-3
    assert equal.ours == 0


@pytest.mark.slow
def test_the_trial_runs(tmp_path: Path) -> None:
    byzfl.main(["--smoke", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len([row for row in rows if row["published"] is not None]) == 12
