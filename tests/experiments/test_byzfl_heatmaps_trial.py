"""The trial of byzfl's heatmaps: its searching attacks, its rule, a round as a plain loop, and what a cell is."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fedtorch as ft
from experiments.trials import byzfl, byzfl_heatmaps, byzfl_training
from fedtorch.trust import robust


@pytest.mark.parametrize(
    ("direction", "printed"),
    [
        (byzfl_training.inner_products, (-2.74877907, -3.43597384, -4.1231686)),
        (byzfl_training.little, (12.91985116, 13.91985116, 14.91985116)),
    ],
)
def test_attacks_that_search_are_as_documented(direction, printed) -> None:
    rule = robust.nearest_neighbour_mixing(1, byzfl_training.clipped(robust.trimmed_mean(1 / 4)))
    attack = byzfl_training.strongest(direction, rule, 1, inner=False)
    lie = attack.together(byzfl.EXAMPLE, byzfl.EXAMPLE[:1])[0]
    torch.testing.assert_close(lie.tolist(), list(printed))


def test_the_median_of_three_steps_is_as_documented() -> None:
    printed = list(byzfl.COMPARED["geometric median, 3 steps"].printed)
    average = byzfl_training.smoothed_median().average(byzfl.EXAMPLE, torch.full((3,), 1 / 3).double())
    torch.testing.assert_close(average.tolist(), printed)


@pytest.mark.parametrize("direction", [byzfl_training.inner_products, byzfl_training.little])
def test_a_search_among_rotated_messages_is_that_of_all_coordinates(direction) -> None:
    honest = 0.25 * torch.randn(10, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.05
    plain = byzfl_training.clipped(robust.nearest_neighbour_mixing(2, byzfl_training.smoothed_median()))
    weights, averages = torch.full((12,), 1 / 12, dtype=torch.float64), []
    for rule, inner in ((byzfl_training.rule(2), True), (plain, False)):
        lies = byzfl_training.strongest(direction, rule, 2, inner=inner).together(honest, honest[:2])
        averages.append(rule.average(torch.cat([honest, lies]), weights))  # clipped factors are many, and the same
    torch.testing.assert_close(*averages, atol=1e-5, rtol=0)
    begin = direction(honest)[0].expand(2, -1)
    assert not torch.allclose(averages[0], plain.average(torch.cat([honest, begin]), weights), atol=1e-3)


def test_rows_of_clients() -> None:
    labels = torch.arange(40) % 4
    apart = byzfl_training.shares(labels.numpy(), range(40), 0.0)
    assert [set(labels[rows].tolist()) for rows in apart] == [{0}, {0}, {0, 1}, {1}, {1}, {2}, {2}, {2, 3}, {3}, {3}]
    alike = byzfl_training.shares(labels.numpy(), range(40), 1.0)
    for parts in (apart, alike):
        assert sorted(row for rows in parts for row in rows) == list(range(40))
    assert [rows.tolist() for rows in alike] != [rows.tolist() for rows in apart]


def test_a_cell_is_the_worst_attack_at_its_best_round() -> None:
    course = byzfl_training.Course
    courses = {
        "sign flipping": [course([0.1, 0.9, 0.5], [2.0, 1.0]), course([0.1, 0.7, 0.9], [2.0, 1.2])],  # 0.8 at 1
        "inner products": [course([0.2, 0.4, 0.6], [2.0, 1.9]), course([0.2, 0.8, 0.4], [2.0, 1.7])],  # 0.6 at 1
        "a little is enough": [course([0.1, 0.7, 0.7], [0.1, 1.9]), course([0.1, 0.7, 0.7], [0.1, 1.9])],
    }
    accuracy, loss, *each = byzfl_heatmaps.rows_of(byzfl_heatmaps.Cell(0.0, 1), courses)
    assert (accuracy.ours, accuracy.published) == (pytest.approx(0.6), 0.87)
    assert accuracy.sd == pytest.approx(0.08**0.5)
    assert (loss.ours, loss.published) == (pytest.approx(1.8), 0.35)
    assert [row.ours for row in each] == pytest.approx([0.8, 0.6, 0.7])


@pytest.mark.slow
def test_rounds_are_those_of_a_plain_loop() -> None:
    draws = torch.Generator().manual_seed(0)
    of = byzfl_training.Pictures(
        torch.randn(1000, 1, 28, 28, generator=draws), torch.randint(10, (1000,), generator=draws)
    )
    rule, rounds = byzfl_training.rule(2), 3
    network, rows = byzfl_training.drawn(of.y, 0.33, 1, rounds)
    course = byzfl_training.train(
        rule, byzfl_training.attack("sign flipping", rule, 2), 0.33, 1, rounds=rounds, every=3, training=of, test=of
    )
    plain = copy.deepcopy(network)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=1e-4)
    momenta = [torch.zeros(431_080, dtype=torch.float64) for _ in range(10)]
    losses = []
    for number in range(rounds):
        told = []
        for k, mine in enumerate(rows):
            batch = mine[25 * number : 25 * number + 25]
            loss = F.nll_loss(plain(of.x[batch]), of.y[batch])
            gradient = torch.cat([leaf.flatten() for leaf in torch.autograd.grad(loss, list(plain.parameters()))])
            momenta[k] = 0.9 * momenta[k] + 0.1 * gradient
            told.append(float(loss.detach()))
        losses.append(sum(told) / 10)
        honest = torch.stack(momenta)
        lies = -honest.mean(0).expand(2, -1)
        step = rule.average(torch.cat([honest, lies]), torch.full((12,), 1 / 12).double()).float()
        for leaf, part in zip(plain.parameters(), step.split([leaf.numel() for leaf in plain.parameters()])):
            leaf.grad = part.reshape(leaf.shape)
        optimizer.step()
    assert course.loss == pytest.approx(losses, rel=1e-5)
    assert course.accuracy[-1] == pytest.approx(
        byzfl_training.accuracy(network, dict(plain.named_parameters()), of), abs=2e-3
    )


@pytest.mark.slow
def test_the_trial_runs_and_goes_on(tmp_path: Path) -> None:
    try:
        ft.data.mnist(train=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    arguments = ["--smoke", "--kept", str(tmp_path / "kept"), "--json", str(tmp_path / "rows.json")]
    byzfl_heatmaps.main(arguments)
    first = json.loads((tmp_path / "rows.json").read_text())["rows"]
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "kept").iterdir()}
    byzfl_heatmaps.main(arguments)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == first
    assert kept == {file: file.stat().st_mtime_ns for file in (tmp_path / "kept").iterdir()}
    assert len(kept) == 3
    assert [row["published"] for row in first[:2]] == [0.87, 0.35]
