"""Attention is plain within interceptions of any thread, and what it was after the last of them."""

from __future__ import annotations

import threading

import torch

from fedtorch import random
from fedtorch.module_randomness.interception import KeyedRandomness


def fused() -> bool:
    return torch.backends.cuda.flash_sdp_enabled()


def test_interceptions_of_threads_that_overlap() -> None:
    begun, ended, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with KeyedRandomness(random.key(1)):
            begun.set()
            assert ended.wait(60)
            seen.append(fused())

    thread = threading.Thread(target=other)
    with KeyedRandomness(random.key(0)):
        thread.start()
        assert begun.wait(60)  # it finds what this thread has set
    ended.set()
    thread.join()
    assert seen == [False]  # the end of this thread's did not end its
    assert fused()


def test_what_was_forbidden_stays_so() -> None:
    before = fused()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with KeyedRandomness(random.key(0)), KeyedRandomness(random.key(1)):
            assert not fused()
        assert not fused()
    finally:
        torch.backends.cuda.enable_flash_sdp(before)
