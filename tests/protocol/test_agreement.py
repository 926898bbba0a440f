"""Sites agree over halves, ranks and streams on what they agree on in one process, to the bit."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas
import pytest
from support.formulas.agreeing import FRAMES, REQUEST
from support.processes import TESTS, Process

import fedtorch as ft
from fedtorch.data.agreement.disclosure import Disclosure
from fedtorch.data.agreement.server import agreed
from fedtorch.data.agreement.site import Answers
from fedtorch.protocol.agreement import decoded, server_half, site_half
from fedtorch.protocol.halves import together
from fedtorch.sites import Hub
from fedtorch.sites.streams import memory
from fedtorch.sites.vertical.remote import over_hub, over_link
from fedtorch.wire import PayloadError


def answers(**policy: Any) -> dict[str, Answers]:
    return {name: Answers(each, Disclosure(**policy), name=name) for name, each in FRAMES.items()}


def expected() -> ft.data.Design:
    return agreed(REQUEST, answers())


def test_halves_in_one_process_agree_on_the_same_bits() -> None:
    halves = {name: site_half(site, "server") for name, site in answers().items()}
    results, traffic = together({"server": server_half(REQUEST, list("abc")), **halves})
    assert {design.to_json() for design in results.values()} == {expected().to_json()}
    assert 0 < traffic.up < 20_000


def test_clients_of_one_frame_agree_on_the_same_bits() -> None:
    data = ft.data.from_frame(
        pandas.concat(FRAMES.values()), client="clinic", formula=REQUEST.formula, minimum=10, other={"sex": "x"}
    )
    assert data.design is not None
    assert data.design.to_json() == expected().to_json()


def test_sites_over_streams_agree_on_the_same_bits() -> None:
    hub = Hub()
    links = {name: memory.link(hub, name) for name in FRAMES}
    with ThreadPoolExecutor() as pool:
        there = [pool.submit(over_link, site_half(site), links[name]) for name, site in answers().items()]
        design, traffic = over_hub(server_half(REQUEST, list("abc")), hub, list("abc"), seconds=20.0)
    assert {each.result()[0].to_json() for each in there} | {design.to_json()} == {expected().to_json()}
    assert traffic.up == sum(each.result()[1].up for each in there)


def test_a_server_that_has_a_site_of_its_own_asks_it_too() -> None:
    brought = answers()
    local = {"a": brought.pop("a")}
    halves = {name: site_half(site, "server") for name, site in brought.items()}
    results, _ = together({"server": server_half(REQUEST, list("bc"), local), **halves})
    assert results["server"].to_json() == expected().to_json()


def test_who_does_not_agree_is_named_to_all() -> None:
    brought = answers() | {"b": Answers(FRAMES["b"], Disclosure(minimum=20))}
    names, said = list("abc"), dict[str, str]()

    def caught(name: str, half: Any) -> Any:
        try:
            yield from half
        except ValueError as error:
            said[name] = str(error)

    halves = {name: caught(name, site_half(site, "server")) for name, site in brought.items()}
    together({"server": caught("server", server_half(REQUEST, names)), **halves})
    assert said.keys() == {"server", *names}
    assert all("from site 'b': the site tells nothing of fewer than 20 rows" in each for each in said.values())


@pytest.mark.parametrize("payload", [b"", b"[]", b"\x80", b"[" * 100_000, b'{"a":' * 50_000])
def test_what_is_no_json_is_refused(payload: bytes) -> None:
    with pytest.raises(PayloadError, match="of 'a': expected JSON by name"):
        decoded("a", payload)


@pytest.mark.slow
def test_ranks_agree_on_the_same_bits(tmp_path: Path) -> None:
    """Rank 0 asks, and has a site of its own; ranks 1 and 2 answer."""
    script = TESTS / "support" / "scripts" / "agreeing_ranks.py"
    process = Process([str(script), str(tmp_path / "ranks")])
    said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert json.loads((tmp_path / "ranks" / "designs.json").read_text()) == [expected().to_json()] * 3
