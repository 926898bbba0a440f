"""Sites of one process take turns at their work, and none waits for good."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.formulas.agreeing import FRAMES

from fedtorch.sites import SiteConfiguration
from fedtorch.sites.rounds import frames as frames, site as turns
from fedtorch.sites.rounds.site import Turns


def test_no_more_work_at_once_than_there_are_turns() -> None:
    two, working, most = Turns(2), set[int](), list[int]()

    def work(k: int) -> None:
        with two.taken():
            working.add(k)
            most.append(len(working))
            time.sleep(0.002)
            working.discard(k)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    assert max(most) == 2
    assert len(most) == 16


def test_who_hangs_holds_up_nobody_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_LONGEST", 0.05)
    one, hanging, go_on = Turns(1), threading.Event(), threading.Event()

    def hang() -> None:
        with one.taken():
            hanging.set()
            go_on.wait(10.0)

    thread = threading.Thread(target=hang)
    thread.start()
    assert hanging.wait(10.0)
    with one.taken():
        assert thread.is_alive()
    go_on.set()
    thread.join()
    began = time.monotonic()
    with one.taken(), one.taken():  # who went on without a turn has given none back
        assert time.monotonic() - began >= 0.05


def test_a_person_who_thinks_has_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_LONGEST", 600.0)  # who waited for the turn of one who thinks would wait for good
    one, thinking, answer, worked = Turns(1), threading.Event(), threading.Event(), threading.Event()

    def think() -> None:
        with one.taken():
            with one.given_back():
                thinking.set()
                answer.wait(600.0)
            assert one._free._value == 0, "a turn again, for the work after the answer"

    with ThreadPoolExecutor(1) as pool:
        person = pool.submit(think)
        assert thinking.wait(600.0)
        with one.taken():
            worked.set()
        answer.set()
        person.result()
    assert worked.is_set()
    assert one._free._value == 1
    with one.given_back():  # by one that has none
        assert one._free._value == 1


def test_a_site_that_asks_its_people_lets_the_others_of_its_process_work(monkeypatch: pytest.MonkeyPatch) -> None:
    one, free = Turns(1), list[int]()
    monkeypatch.setattr(turns, "TURNS", one)
    configuration = SiteConfiguration.of_frame(FRAMES["a"], "clinic", {"it": lambda design: None})
    site = turns.Site(configuration, ask=lambda shown: not free.append(one._free._value))
    question = {"step": "describe", "formula": "y ~ age", "minimum": 10, "declared": [], "also": [], "offset": []}
    reply = site.answer(frames.encode("agree", sequence=1, question={**question, "sites": ["a"]}))
    assert "histograms" in frames.read(reply or b"", "a").names("answer")
    assert free == [1]


def test_an_error_gives_the_turn_back() -> None:
    one = Turns(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"), one.taken():
            raise ValueError("broken")
    assert one._free._value == 1


def test_a_forked_process_begins_with_all_turns_free() -> None:
    one = Turns(1)
    with one.taken():
        one.renew()
        assert one._free._value == 1
