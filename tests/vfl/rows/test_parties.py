"""Parties, their alignment, and labels that leak into features."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fedtorch import random, vfl
from fedtorch.data import VerticalTable
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.rows.data import VerticalData
from fedtorch.vfl.rows.parties import LabelLeakageWarning, Party, align, determines, joined, party_named

ROWS = [f"patient {i}" for i in range(12)]
X = random.normal(random.key(0), (12, 5))
Y = (torch.arange(12) % 3 == 0).float()


def shuffled(party: vfl.Party, key: int) -> vfl.Party:
    return party.take(random.permutation(random.key(key), len(party.identifiers)))


def parties() -> list[vfl.Party]:
    return [
        vfl.Party("clinic", ROWS, X[:, :2], ["age", "pulse"]),
        vfl.Party("laboratory", ROWS, X[:, 2:]),
        vfl.Party("registry", ROWS, response=Y),
    ]


def test_alignment_undoes_any_order_and_drops_what_others_lack() -> None:
    clinic, laboratory, registry = parties()
    order = random.permutation(random.key(5), 12)[:9]
    held = [shuffled(clinic, 1), shuffled(laboratory, 2).take(torch.arange(10)), registry.take(order)]
    aligned = vfl.align(held)
    expected = sorted((int(i) for i in order if ROWS[i] in set(held[1].identifiers)), key=ROWS.__getitem__)
    assert aligned.names == ("clinic", "laboratory")
    assert aligned.data.present is None
    for mine, whole in zip((*aligned.data.features, aligned.data.response), (X[:, :2], X[:, 2:], Y)):
        assert torch.equal(mine, whole[expected])
    assert [held[0].identifiers[row] for row in aligned.rows["clinic"]] == [ROWS[i] for i in expected]


def test_rows_that_a_party_lacks_are_marked() -> None:
    clinic, laboratory, registry = parties()
    aligned = vfl.align([clinic, laboratory.take(torch.tensor([7, 3])), registry], required=["clinic"])
    here = torch.zeros(12, dtype=torch.bool)
    here[[3, 7]] = True
    order = sorted(range(12), key=ROWS.__getitem__)
    assert torch.equal(aligned.data.present, torch.stack([torch.ones_like(here), here], 1)[order])
    assert torch.equal(aligned.data.features[1], torch.where(here[:, None], X[:, 2:], 0)[order])
    model = vfl.augmented(likelihoods.bernoulli(), [vfl.linear(2), vfl.linear(3)], 1.0)
    with pytest.raises(ValueError, match="Expected rows that all parties have"):
        vfl.sfvi(model, vfl.Guide(), aligned.data, steps=1)


def test_the_party_with_labels_may_have_features() -> None:
    clinic = parties()[0]
    both = vfl.Party("registry", ROWS, X[:, 2:], response=Y)
    assert len(vfl.align([clinic, both]).data.features) == 2
    assert torch.equal(joined([clinic, both]).features[1], X[:, 2:])


def test_duplicates_are_refused_and_can_be_dropped() -> None:
    clinic, laboratory, registry = parties()
    twice = clinic.take(torch.tensor([4, 2, 4, 0]))
    with pytest.raises(ValueError, match="distinct identifiers at 'clinic', but rows 0 and 2"):
        vfl.align([twice, laboratory, registry])
    assert torch.equal(vfl.align([twice.distinct(), laboratory, registry]).data.features[0], X[[0, 2, 4], :2])


def test_a_table_s_parties() -> None:
    table = VerticalTable(X, Y, tuple("abcde"), ((0, 3), (1,)), (0,))
    held = Party.from_table(table, ROWS)
    assert [party.name for party in held] == ["party 0", "party 1", "labels"]
    assert held[0].features == ["a", "d"]
    order = sorted(range(12), key=ROWS.__getitem__)
    assert torch.equal(vfl.align(held).data.features[0], X[order][:, [0, 3]])


def test_bad_input() -> None:
    clinic, laboratory, registry = parties()
    with pytest.raises(ValueError, match="Expected 12 rows of features at 'a', one per identifier"):
        vfl.Party("a", ROWS, X[:3])
    with pytest.raises(ValueError, match="Expected features or labels at 'a'"):
        vfl.Party("a", ROWS)
    with pytest.raises(ValueError, match="Expected a column for each of 1 names"):
        vfl.Party("a", ROWS, X, ["age"])
    with pytest.raises(ValueError, match="Expected one party with labels"):
        vfl.align([clinic, laboratory])
    with pytest.raises(ValueError, match="Expected parties with distinct names"):
        vfl.align([clinic, clinic, registry])
    with pytest.raises(ValueError, match=r"Expected one of the parties .*, but got 'bank'"):
        vfl.align(parties(), required=["bank"])
    with pytest.raises(ValueError, match="but got 'bank'"):
        party_named(parties(), "bank")
    with pytest.raises(ValueError, match="row 0 has another"):
        joined([shuffled(clinic, 3), laboratory, registry])
    with pytest.raises(ValueError, match="Expected 12 rows at 'clinic' as at 'registry', but got 5"):
        joined([clinic.take(torch.arange(5)), laboratory, registry])


N = 60
NOISE = random.normal(random.key(9), (N,), torch.float64)
LABEL = (NOISE > 0.2).double()
CLASSES = torch.arange(N) % 4


@pytest.mark.parametrize(("feature", "response", "leaks"), [
    (LABEL, LABEL, True),
    (3 - 2 * LABEL, LABEL, True),
    (NOISE, LABEL, True),  # a threshold of it
    (CLASSES * 2.0, CLASSES % 2, True),  # four values, two labels
    (CLASSES.double(), (CLASSES > 1).double(), True),
    (4.0 - 2 * NOISE, NOISE, True),
    (NOISE.exp(), NOISE, False),
    (NOISE, CLASSES, False),
    (torch.arange(N).double(), CLASSES, False),  # an identifier has all rows' labels, by chance
    (torch.ones(N), LABEL, False),
    (torch.where(torch.arange(N) == 4, 1 - LABEL, LABEL), LABEL, False),
    (NOISE[:4], torch.tensor([0, 0, 1, 1]).double(), False),  # too few rows to tell
])  # fmt: skip
def test_label_leakage_detection(feature: torch.Tensor, response: torch.Tensor, leaks: bool) -> None:
    assert determines(feature, response) == leaks


def test_alignment_warns_of_leakage_by_name() -> None:
    rows = [str(i) for i in range(N)]
    features = torch.stack([random.normal(random.key(4), (N,), torch.float64), 1 - LABEL], 1)
    held = [vfl.Party("clinic", rows, features, ["age", "discharge code"]), vfl.Party("y", rows, response=LABEL)]
    for check in (vfl.align, joined):
        with pytest.warns(LabelLeakageWarning, match="Feature 'discharge code' of party 'clinic' determines"):
            check(held)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joined([vfl.Party("images", rows, torch.zeros(N, 1, 4, 4)), held[1]])


@pytest.mark.parametrize(("change", "message"), [
    ({"features": (torch.eye(3), torch.ones(2, 1))}, r"features of party 1 of 3 rows, .* but got shape \(2, 1\)"),
    ({"features": (torch.tensor([[1.0], [torch.nan], [2.0]]),)}, "finite features of party 0, but got NaN or Inf"),
    ({"offset": torch.zeros(4)}, "offset of 3 rows"),
    ({"weight": torch.ones(2)}, "weight of 3 rows"),
    ({"response": torch.tensor(1.0)}, "features of party 0 of 0 rows"),
])  # fmt: skip
def test_rows_that_do_not_fit_are_refused_when_data_are_made(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"features": (torch.eye(3), torch.ones(3, 1)), "response": torch.zeros(3)}
    VerticalData(**good)
    with pytest.raises(ValueError, match=message):
        VerticalData(**{**good, **change})


def test_repr_contains_no_rows() -> None:
    """What a log may have: identifiers, features and labels are in no repr, also of what holds several parties."""
    values = torch.tensor([[41.5], [42.5]], dtype=torch.float64)
    clinic = Party("clinic", ["ann", "bob"], values, ["age"])
    registry = Party("registry", ["bob", "ann"], response=torch.tensor([7.25, 8.25], dtype=torch.float64))
    aligned = align([clinic, registry])
    said = repr((clinic, registry, aligned))
    assert "Party('clinic', 2 rows, x=Tensor(2, 1), features=['age'])" in said
    assert "VerticalData(features=[(2, 1)], response=Tensor(2,))" in said
    for secret in ("ann", "bob", "41.5", "42.5", "7.25", "8.25"):
        assert secret not in said
