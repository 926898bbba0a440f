"""How much of a device clients take at once, and which device a rank takes, as far as the CPU can tell."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import fedtorch as ft
from fedtorch.federation.populations import _ranks as ranks, clients as federation_clients
from fedtorch.federation.populations.clients import block_bytes
from fedtorch.federation.populations.distributed import own_device


def test_a_block_takes_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    reading = lambda device: (asked.append(device), (80 * 2**30, 141 * 2**30))[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", reading)
    assert block_bytes(torch.device("cuda", 1)) == 20 * 2**30
    assert block_bytes(torch.device("cpu")) == 128 * 2**20
    assert asked == [torch.device("cuda", 1)]


def test_chunks_follow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ft.data.from_tensors([(torch.eye(4), torch.ones(4, 1))] * 6)
    algorithm = ft.fedavg(ft.least_squares(torch.nn.Linear(4, 1, bias=False)))

    def sizes() -> list[int]:
        blocks = ft.Run(algorithm, ft.InProcess(data)).clients.blocks(None)
        return [len(range(*ids.indices(6))) if isinstance(ids, slice) else len(ids) for ids, _ in blocks]

    assert sizes() == [6]
    monkeypatch.setattr(federation_clients, "block_bytes", lambda device: 1)
    assert sizes() == [1] * 6


def test_ranks_of_a_machine_take_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("cuda") == torch.device("cuda", 3)
    assert own_device("cuda:1") == torch.device("cuda", 1)
    assert own_device("cpu") == torch.device("cpu")
    assert own_device(None) is None


@pytest.mark.parametrize(("device", "chosen"), [("cuda:1", "nccl"), ("cpu", "gloo")])
def test_collectives_go_over_nccl_between_devices(device: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, torch.device | None]] = []

    class Met(Exception):
        pass

    def begin(backend: str, *, device_id: torch.device | None, **settings: object) -> None:
        begun.append((backend, device_id))
        raise Met

    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(ranks.dist, "init_process_group", begin)
    with pytest.raises(Met):
        ranks.Ranks(0, 2, torch.device(device), timedelta(seconds=1))._meet()
    assert begun == [(chosen, torch.device(device) if chosen == "nccl" else None)]


@pytest.mark.parametrize("place", [ft.InProcess, ft.Distributed])
def test_a_device_that_is_not_there_is_refused(place: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    data = ft.data.from_tensors([torch.ones(1, 1)])
    with pytest.raises(ValueError, match=r"Expected a CUDA device for device='cuda(:0)?', but got none"):
        place(data, device="cuda")
