"""The pretended device for Lightning's Trainers: `L.Trainer(accelerator=FarAccelerator(), devices=1)`.

Lightning takes the device of an accelerator that it does not know for the CPU, but for one that is a kind of Apple's.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import MPSAccelerator

from support.pretended_device import NAME


class FarAccelerator(MPSAccelerator):
    """One pretended device."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        assert devices in (1, "1", [0])
        return [0]

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, index) for index in devices]

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME
