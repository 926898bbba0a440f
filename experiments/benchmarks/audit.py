"""What an audit record costs: an entry, a round of three sites with and without records, and its verification.

- `entries`: seconds to sign and append an entry, to force the file to the disk, and to verify one.
- `rounds`: a round of FedAvg of three sites in the threads of one process, all of which and the server keep records,
  beside the same without; models of 10³ and 10⁶ numbers, of which the record has a digest for every frame.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure
from fedtorch.sites import AuditRecord, Hub, Policy, SiteConfiguration, join
from fedtorch.sites.audit import audit
from fedtorch.sites.identity import identity
from fedtorch.sites.streams import memory

SITES = ("a", "b", "c")


def entries(smoke: bool) -> list[common.Row]:
    """Seconds an entry."""
    count = 20 if smoke else 2000
    with tempfile.TemporaryDirectory() as folder:
        site = identity.make_server(folder)
        record = AuditRecord(Path(folder) / "record.jsonl", site)
        append = [common.seconds(partial(record.note, "request", kind="round", digest=64 * "a")) for _ in range(count)]
        sync = [common.seconds(record.sync) for _ in range(count // 10)]
        verify = common.seconds(partial(audit.verify, record.path, certificate=site.certificate)) / count
    figures = {"sign and append": statistics.median(append), "fsync": statistics.median(sync), "verify": verify}
    return [common.Row("an entry", f"{what}, µs", 1e6 * value) for what, value in figures.items()]


@contextmanager
def runs(folder: Path, size: int) -> Iterator[dict[str, ft.Run]]:
    """The same run with and without records."""
    server = identity.make_server(folder)
    members = {name: identity.make_site(folder, name) for name in SITES}
    module = nn.Linear(size, 1, bias=False)
    sgd = partial(torch.optim.SGD, lr=1e-6)
    loss = lambda output, target: (output[..., 0] - target).square().mean()
    make = lambda: ft.fedavg(ft.gradient_descent(module, steps=1, batch_size=2, loss=loss, optimizer=sgd))
    data = ft.data.from_tensors([(torch.randn(2, size), torch.randn(2))])
    hubs, made, threads = [], {}, []
    for way in ("with records", "without"):
        host, keeps = Hub(), way == "with records"
        for name, own in members.items():
            brought = SiteConfiguration(
                ft.data.FederatedData(data.rows, data.counts, (name,)), {"it": make}, Policy(minimum=1)
            )
            record = AuditRecord(folder / f"{name}.jsonl", own) if keeps else None
            dial = partial(memory.link, host, name)
            threads.append(threading.Thread(target=join, args=(dial, brought), kwargs={"record": record}, daemon=True))
            threads[-1].start()
        sites = ft.Remote(host, SITES, "it", record=AuditRecord(folder / "server.jsonl", server) if keeps else None)
        made[way] = ft.Run(make(), sites)
        hubs.append((host, sites))
    yield made
    for (host, sites), run in zip(hubs, made.values()):
        sites.finish(run)
        host.close()
    for thread in threads:
        thread.join(10.0)


def rounds(smoke: bool) -> list[common.Row]:
    """Seconds of a round, and how many times longer one is with records."""
    rows = []
    for size in (10**3,) if smoke else (10**3, 10**6):
        with tempfile.TemporaryDirectory() as folder, runs(Path(folder), size) as made:
            times = measure.interleaved({way: run.step for way, run in made.items()}, 2 if smoke else 40, warm=2)
        setting = f"a round of 3 sites, {size} numbers"
        rows += [common.Row(setting, f"{way}, ms", 1e3 * value) for way, value in measure.medians(times).items()]
        rows.append(common.Row(setting, "ratio", measure.ratio(times["with records"], times["without"])))
    return rows


def parts(smoke: bool) -> measure.Parts:
    """By name."""
    return {"entries": partial(entries, smoke), "rounds": partial(rounds, smoke)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all or one of the parts."""
    measure.run("audit", __doc__, parts, argv)


if __name__ == "__main__":
    main()
