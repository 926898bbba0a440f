"""Three ranks that agree on a design; writes each rank's as JSON.

Usage: agreeing_ranks.py FOLDER
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

from fedtorch.data.agreement.site import Answers
from fedtorch.protocol import ranks
from fedtorch.protocol.agreement import server_half, site_half
from support.forked import over_ranks
from support.formulas.agreeing import FRAMES, REQUEST


def body(rank: int) -> str:
    """Rank 0 asks, and has a site of its own; the others answer."""
    sites = [Answers(frame) for frame in FRAMES.values()]
    half = site_half(sites[rank]) if rank else server_half(REQUEST, [1, 2], {0: sites[0]})
    return ranks.over_ranks(half, rank, 3, timedelta(seconds=20))[0].to_json()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    designs = over_ranks(folder, 3, body)
    (folder / "designs.json").write_text(json.dumps(designs))
