"""The README's Python lines run as printed, one after the other in one namespace, in a folder of their own."""

import logging
import re
from pathlib import Path

import pytest
import torch.distributed as dist

README = Path(__file__).parent.parent / "README.md"


def blocks():
    found = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert "devices=2" in found[-1]
    return [block.replace("devices=2", "devices=1") for block in found]  # the last one is for torchrun's two processes


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")
def test_lines_run_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    names = {}
    try:
        for block in blocks():
            exec(compile(block, "README.md", "exec"), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert names["federation"].round == 50
