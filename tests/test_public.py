"""Every public name has an example that runs: of its own, or one that uses it, to which the reference links."""

from __future__ import annotations

import public


def test_every_public_name_is_used_by_a_runnable_example() -> None:
    assert public.without_example() == []


def test_examples_are_found_where_they_are() -> None:
    found = public.examples()
    assert found["fedtorch.federation.algorithms.fedavg.fedavg"][0] == "fedtorch.federation.algorithms.fedavg.fedavg"
    assert "fedtorch.vfl" in found["fedtorch.vfl.parties.align"]  # of the package's text
    assert "start" in found["fedtorch.federation.lightning.Federation"]  # the page


def test_private_modules_are_not_public() -> None:
    assert not [name for name in public.examples() if "._" in name]
