"""A progress bar over communication rounds."""

from __future__ import annotations

import sys

from tqdm.auto import tqdm


def rounds_bar(title: str, total: int | None, *, initial: int = 0, shown: bool = True) -> tqdm:
    """A bar on the standard output, a context that closes it.

    Args:
        title: in front of it.
        total: rounds in all; None if nobody knows.
        initial: rounds that were done before.
        shown: False shows nothing.
    """
    return tqdm(
        total=total,
        initial=initial,
        desc=title,
        unit="round",
        disable=not shown,
        file=sys.stdout,
        dynamic_ncols=True,
    )
