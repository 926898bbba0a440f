"""Sites as processes agree on a design over gRPC, and one that is killed and started again has its rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas
import pytest
from support.formulas.agreeing import FRAMES, REQUEST
from support.formulas.enrolled import NAMES, Place
from support.oracles.closed_forms import ROUNDING, distance
from support.scripts.my_frame import regression

import fedtorch as ft
from fedtorch.data.agreement.server import agreed
from fedtorch.data.agreement.site import Answers
from fedtorch.sites import Remote, agree

pytest.importorskip("grpc")


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Place]:
    made = Place(tmp_path, capsys)
    yield made
    for site in made.sites.values():
        site.kill()


@pytest.mark.slow
def test_three_processes_agree_on_the_bits_of_one(place: Place) -> None:
    host = place.serve()
    for name in NAMES:
        place.join(name, host.port, "my_frame.py")
    waits = {"seconds": 60.0, "timeout": 60.0}
    design = agree(host, NAMES, REQUEST.formula, client="clinic", other=REQUEST.other, **waits)
    assert design.to_json() == agreed(REQUEST, {name: Answers(frame) for name, frame in FRAMES.items()}).to_json()
    place.kill("b")
    place.join("b", host.port, "my_frame.py")
    there = Remote(host, NAMES, "it", quorum=1.0, **waits)
    run = ft.run(regression(design), there, rounds=2)
    there.finish(run)
    pooled = pandas.concat(FRAMES.values())
    here = ft.data.from_frame(pooled, client="clinic", formula=REQUEST.formula, minimum=10, other=REQUEST.other)
    assert distance(run.server, ft.run(regression(design), ft.InProcess(here), rounds=2).server) < ROUNDING
    said = [place.sites[name].communicate(timeout=60) for name in NAMES]
    assert "levels ['rare'] have fewer than 10 rows and are not told" in said[0]
    host.close()


@pytest.mark.slow
def test_no_process_ends_because_one_site_treats_missing_cells_in_another_way(place: Place) -> None:
    """Which is known at once, and in that site's log; once its file is mended the others go on as they are."""
    host = place.serve()
    for name in NAMES:
        place.join(name, host.port, "my_frame.py", MISSING="impute" if name == "b" else "drop")
    waits = {"seconds": 60.0, "timeout": 60.0}
    with pytest.raises(ValueError, match="but 'b' has missing='impute', and the other 2 have missing='drop'"):
        agree(host, NAMES, REQUEST.formula, client="clinic", other=REQUEST.other, **waits)
    assert [place.sites[name].returncode for name in NAMES] == [None] * 3
    place.sites["b"].await_text("'b' has missing='impute', and the other 2 have missing='drop'", timeout=60)
    place.kill("b")
    place.join("b", host.port, "my_frame.py")
    design = agree(host, NAMES, REQUEST.formula, client="clinic", other=REQUEST.other, **waits)
    there = Remote(host, NAMES, "it", quorum=1.0, **waits)
    there.finish(ft.run(regression(design), there, rounds=1))
    for name in NAMES:
        said = place.sites[name].communicate(timeout=60)
        assert place.sites[name].returncode == 0, said[-3000:]
    host.close()
