"""What a client of NVFlare does: load the model it is sent, train, and send it back."""

from __future__ import annotations

import sys

import nvflare.client as flare

from experiments.benchmarks.peers import work


def main(file: str, task: str) -> None:
    """Train in every round until the server ends."""
    mine = work.load(file, task)
    flare.init()
    client = int(flare.get_site_name().removeprefix("site-"))
    while flare.is_running():
        received = flare.receive()
        model = mine.model()
        model.load_state_dict(received.params)
        mine.fit(model, mine.batches(received.current_round, client))
        rows = len(mine.clients[client][1])
        flare.send(flare.FLModel(params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:3])
