"""What a site brings, and what it refuses to begin with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from support.oracles.closed_forms import linear_clients, sgd

import fedtorch as ft
from fedtorch.sites import Policy, SiteConfiguration, join
from fedtorch.sites.rounds.configuration import read_configuration
from fedtorch.sites.streams.hub import Link

DATA = linear_clients([3, 4])


def fedavg() -> ft.Algorithm:
    return ft.fedavg(sgd(0.1))


def nobody() -> Link:
    raise ConnectionError("nobody is there")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data": 3}, "Expected data as FederatedData, but got int"),
        ({"algorithms": [fedavg]}, "Expected algorithms by name, but got list"),
        ({"algorithms": {}}, "Expected at least one algorithm"),
        ({"algorithms": {"a": fedavg()}}, "Expected algorithm 'a' as a function of its settings"),
        ({"policy": 3}, "Expected policy as Policy, but got int"),
        ({"policy": Policy(honest=0)}, "at least 1 honest client"),
        ({"policy": Policy(rounds=-1)}, "no negative number of rounds"),
        ({"policy": Policy(epsilon=0.0)}, "Expected a positive epsilon"),
        ({"validation": linear_clients([3])}, "Expected validation rows of the same clients"),
    ],
)
def test_offers_that_are_none(change: dict[str, Any], expected: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(expected)):
        SiteConfiguration(**{"data": DATA, "algorithms": {"fedavg": fedavg}, **change})


def test_a_file_with_a_smallest_cohort_is_told_what_takes_its_place(tmp_path: Path) -> None:
    (tmp_path / "my_data.py").write_text("from fedtorch.sites import Policy\npolicy = Policy(smallest_cohort=3)\n")
    with pytest.raises(TypeError, match=r"Expected Policy\(minimum=.*got smallest_cohort="):
        read_configuration(tmp_path / "my_data.py")


def test_an_offer_is_a_file_of_the_site_s_own(tmp_path: Path) -> None:
    file = tmp_path / "my_data.py"
    file.write_text(
        "import torch, fedtorch as ft\n"
        "from fedtorch.sites import Policy\n"
        "data = ft.data.from_tensors([(torch.eye(2), torch.ones(2))], ['ward 7'])\n"
        "algorithms = {'fedavg': lambda: ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))}\n"
        "policy = Policy(rounds=3)\n"
        "helper = 'what else is in the file does not matter'\n"
    )
    configuration = read_configuration(file)
    assert configuration.data.names == ("ward 7",)
    assert configuration.policy == Policy(rounds=3)
    assert isinstance(configuration.algorithms["fedavg"](), ft.Algorithm)


def test_one_process_works_in_a_folder(tmp_path: Path) -> None:
    configuration = SiteConfiguration(DATA, {"fedavg": fedavg})
    with (
        FileLock(tmp_path / "lock"),
        pytest.raises(FileExistsError, match="end that process, or choose another folder"),
    ):
        join(nobody, configuration, tmp_path)
    with pytest.raises(TimeoutError, match=r"Expected a server within 0\.01 s, but got none; nobody is there"):
        join(nobody, configuration, tmp_path, timeout=0.01)
