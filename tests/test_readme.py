"""The README's Python lines run as printed, one after the other, in a folder of their own."""

import logging
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def blocks():
    found = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    return [block for block in found if "devices=2" not in block]  # that one is for torchrun


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")
def test_lines_run_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    names = {}
    found = blocks()
    assert len(found) >= 3
    for block in found:
        exec(compile(block, "README.md", "exec"), names)
    assert names["federation"].round > 0
