"""Collectives through shared memory are those of a process group; threads of this process stand for ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtorch.federation.populations import _collectives
from fedtorch.federation.populations._collectives import SharedMemory

LIBRARY = _collectives._program()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="there is no C compiler")
PART = _collectives._PART // 8  # numbers of a part


def over_threads(ranks: int, folder: Path, body: Callable[[int, SharedMemory], Any], seconds: float = 20.0) -> list:
    """Return what `body(rank, collectives)` returns, or its RuntimeError, of each rank; its streams end with it."""
    path = folder / "memory"
    path.write_bytes(bytes(_collectives.size_of(ranks)))
    pairs = {(i, j): socket.socketpair() for i in range(ranks) for j in range(i)}
    file = os.open(path, os.O_RDWR)

    def one(rank: int) -> Any:
        streams = {j: pairs[rank, j][0] for j in range(rank)} | {i: pairs[i, rank][1] for i in range(rank + 1, ranks)}
        try:
            given: Any = SimpleNamespace(sockets=streams)
            return body(rank, SharedMemory(file, rank, given, timedelta(seconds=seconds), LIBRARY))  # type: ignore
        except RuntimeError as error:
            return error
        finally:
            for stream in streams.values():
                stream.close()

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(one, range(ranks)))
    os.close(file)
    return found


def tensor_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    drawn = 100 * torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, PART, PART + 1, 20 * PART + 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_and_lists_are_those_of_all_ranks(tmp_path: Path, ranks: int, size: int, dtype: torch.dtype) -> None:
    def body(rank: int, memory: SharedMemory) -> Any:
        mine = tensor_of(rank, size, dtype)
        found = [torch.empty_like(mine) for _ in range(ranks)]
        memory.all_gather(found, mine)
        memory.all_reduce(mine)
        return mine, found

    tensors = [tensor_of(rank, size, dtype) for rank in range(ranks)]
    expected = tensors[0] + tensors[1]
    for other in tensors[2:]:
        expected = expected + other
    for total, found in over_threads(ranks, tmp_path, body):
        assert torch.equal(total, expected)  # in the order of the ranks, on all of them
        assert all(map(torch.equal, found, tensors))


def test_no_rank_overtakes_another(tmp_path: Path) -> None:
    def body(rank: int, memory: SharedMemory) -> int:
        wrong = 0
        for number in range(300):
            if number % 17 == rank:
                time.sleep(0.001)
            value = torch.full((3, 2), float(number * (rank + 1)), dtype=torch.float64)
            memory.all_reduce(value)
            wrong += not bool((value == 6 * number).all())
        return wrong

    assert over_threads(3, tmp_path, body) == [0, 0, 0]


def test_a_rank_that_ends_is_noticed_at_once_by_all_others(tmp_path: Path) -> None:
    def body(rank: int, memory: SharedMemory) -> Any:
        memory.all_reduce(torch.ones(1))
        if rank == 1:
            return None
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank [01] has not come"):  # 0 may have given up before
            memory.all_reduce(torch.ones(1))
        return time.monotonic() - began

    first, _, third = over_threads(3, tmp_path, body)
    assert max(first, third) < 10  # of 20 s that they would wait


def test_a_rank_that_ends_after_its_part_is_not_missed(tmp_path: Path) -> None:
    def body(rank: int, memory: SharedMemory) -> float:
        if rank == 0:
            time.sleep(0.3)
        value = torch.ones(1)
        memory.all_reduce(value)
        return float(value)

    assert over_threads(2, tmp_path, body) == [2.0, 2.0]


def test_ranks_that_have_given_up_do_not_go_on_with_one_that_is_late(tmp_path: Path) -> None:
    def body(rank: int, memory: SharedMemory) -> None:
        if rank == 2:
            time.sleep(1.0)
        memory.all_reduce(torch.ones(1))

    found = over_threads(3, tmp_path, body, seconds=0.2)
    assert [type(each) for each in found] == [RuntimeError] * 3


def test_other_numbers_of_bytes_are_refused_on_all(tmp_path: Path) -> None:
    found = over_threads(2, tmp_path, lambda rank, memory: memory.all_reduce(torch.ones(3 + rank)))
    assert [type(each) for each in found] == [RuntimeError] * 2
    assert any("another number of bytes" in str(each) for each in found)


def test_memory_that_cannot_be_had_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(_collectives, "_FOLDER", tmp_path / "none")
        assert _collectives._program() is None
    assert _collectives._opened(tmp_path / "elsewhere") is None
    assert _collectives._created(tmp_path / "there" / "is none", 1) is None
    file = _collectives._created(tmp_path / "memory", 4096)
    assert file is not None
    assert os.fstat(file).st_size == 4096
    assert os.fstat(file).st_mode & 0o777 == 0o600
    os.close(file)
    assert _collectives._created(tmp_path / "memory", 4096) is None  # somebody else's
