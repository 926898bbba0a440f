"""Projects that nobody here wrote train stacked, client by client and by `lightning_fit`, as in a plain loop.

`make test-zoo` runs it in an environment of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedtorch.federation.solvers.stacked_loss import StackedLoss
from zoo.case import WAYS, Case
from zoo.cases import CASES, language
from zoo.loop import distance, looped, made, outcome, trained
from zoo.speed import SETTINGS, ratio

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.imports}, {case.name}")
def test_training_is_that_of_a_plain_loop(case, way):
    pytest.importorskip(case.imports)
    result = outcome(case, way)
    if way in case.ways:
        assert result < 1e-5
    else:
        assert isinstance(result, str)


def test_a_mask_that_is_always_made_keeps_clients_with_different_numbers_of_rows_together(monkeypatch):
    pytest.importorskip("transformers")
    from zoo.masks import register

    net = language.bert()
    net.set_attn_implementation(register())
    case = Case("BERT", "transformers", lambda: language.project(net), language.texts)
    module, data = made(case)
    case = replace(case, says={"rowwise": True})
    calls = []
    together = StackedLoss.together
    monkeypatch.setattr(StackedLoss, "together", lambda self, *given: calls.append(self) or together(self, *given))
    assert distance(trained(case, "stacked", module, data), looped(case, "stacked", module, data)) < 1e-5
    steps = 2 * 3  # epochs, and steps of the client with most rows
    assert max(calls.count(each) for each in calls) == steps  # all clients in each


def test_a_small_bert_is_three_times_as_fast_stacked():
    pytest.importorskip("transformers")
    assert ratio(SETTINGS[0]) >= 3
