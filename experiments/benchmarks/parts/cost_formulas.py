"""What a round costs: a formula for each population, and what is assumed of machines that nobody measured here.

Seconds everywhere; K clients, P ranks, n sites, M bytes of a model's float64 sums or B of its message.

- `InProcess`: T = a + b K.
- `Distributed`: T = a + b ⌈K/P⌉ + h + 2 log₂P · α + 2 (P − 1)/P · (M + 16 K)/β. A round has one sum in float64: of the
  aggregate, counts, and a row for each client that was asked, whether it has answered and a diagnostic. Small sums go
  along trees, large ones round a ring.
- `Remote`, all on one machine, m sites in a process: T = L + max(r + n s + c, m c, (r + n (s + c))/cores). Where m > 1,
  c′ stands for c: Python runs one thread of a process at a time, so that sites answer one after the other, and each of
  their threads besides (two of ours and gRPC's own for a connection) has to wait for its turn whenever it wakes up.
- `Remote`, on machines of their own: T = L + r + n (s + 2 w B) + c + B/up + B/down + n · 2B/link, for the server works
  on one answer after the other.

a, b, h, α, β, L, r, s, c, c′, w are measured by `cost_model`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

ROW = 16  # bytes of a client in a round's sum: whether it has answered, and a diagnostic


class Here(NamedTuple):
    """What was measured on this machine."""

    round: float  # a: of a round, whoever takes part
    client: float  # b: of a client in a round
    meet: float  # h: of Python's part in a round's sum over ranks
    hop: float  # α: of a step of a collective
    pace: float  # β: bytes a second in a sum
    line: float  # L: a short frame to a site and back
    server: float  # r: processor time of the server in a round
    asked: float  # s: processor time of the server for a site
    site: float  # c: processor time of a site in a round
    shared: float  # c′: processor time of a site in a round, in a process that has other sites, too
    byte: float  # w: processor time of the server for a byte of a message, each way


class Cluster(NamedTuple):
    """Machines with GPUs; assumed."""

    nodes: int = 16
    gpus: int = 8  # of a node
    flops: float = 0.3 * 67e12  # a second: 30 % of an H100 SXM's published float32 rate
    memory: float = 0.7 * 3.35e12  # bytes a second: 70 % of its published bandwidth
    launch: float = 10e-6  # of a kernel
    kernels: int = 60  # of a stacked step
    near: tuple[float, float] = (3e-6, 0.7 * 450e9)  # a hop, bytes a second: 70 % of NVLink 4, each way
    far: tuple[float, float] = (8e-6, 0.8 * 50e9)  # 80 % of one 400 Gbit/s adapter a GPU

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus


class Device(NamedTuple):
    """What bounds an operation on one device."""

    name: str
    memory: float  # bytes a second
    single: float  # float32 operations a second
    double: float  # float64 operations a second
    call: float  # seconds of a call at the least

    def bound(self, calls: float, moved: float, operations: float, double: bool) -> float:
        """The least seconds of so many calls that move so many bytes and do so many operations in all."""
        return calls * self.call + max(moved / self.memory, operations / (self.double if double else self.single))


H100 = Device("H100 SXM", 3.35e12, 67e12, 34e12, 5e-6)  # published; of float64 the vector units; a launch assumed


class Wide(NamedTuple):
    """Sites of the world and their server; assumed."""

    line: float = 0.05  # there and back
    up: float = 20e6 / 8  # bytes a second, of a site
    down: float = 100e6 / 8
    link: float = 10e9 / 8  # of the server
    slower: float = 10.0  # than this machine, a site's processor


class Work(NamedTuple):
    """What clients do in a round."""

    name: str
    parameters: int
    flops: float  # of a row, forwards and backwards
    clients: int
    rows: int  # of a step
    steps: int


WORKS = (
    Work("linear, 10³ parameters, 10⁶ clients × 5 steps of 40 rows", 1000, 6e3, 1_000_000, 40, 5),
    Work("64-128-10, 10⁵ clients × 20 steps of 32 rows", 9610, 6 * 9610, 100_000, 32, 20),
    Work("ResNet-18, 1280 clients × 20 steps of 32 images of 32 × 32", 11_200_000, 3 * 2 * 0.56e9, 1280, 32, 20),
    Work("BERT-base, 1280 clients × 20 steps of 16 × 128 tokens", 110_000_000, 6 * 110e6 * 128, 1280, 16, 20),
)


def stacked(here: Here, clients: float) -> float:
    """A round in one process."""
    return here.round + here.client * clients


def summed(hops: float, share: float, size: float, clients: int, hop: float, pace: float) -> float:
    """What a round's sum takes over links of one kind, of `hops` steps, and `share` of bytes passing."""
    return 2 * hops * hop + 2 * share * (size + ROW * clients) / pace


def over_ranks(here: Here, clients: int, ranks: int, size: float) -> float:
    """A round over ranks on this machine; `size` bytes of sums."""
    share = (ranks - 1) / ranks
    own = stacked(here, math.ceil(clients / ranks)) + here.meet * (ranks > 1)
    return own + summed(math.log2(ranks), share, size, clients, here.hop, here.pace)


def over_sites(here: Here, sites: int, in_a_process: int, cores: int) -> float:
    """A round over sites that all share this machine's cores with their server."""
    server, site = here.server + sites * here.asked, here.site if in_a_process == 1 else here.shared
    return here.line + max(server + site, in_a_process * site, (server + sites * site) / cores)


class Parts(NamedTuple):
    """Where a round's time goes."""

    compute: float
    talk: float

    @property
    def seconds(self) -> float:
        """Of the round."""
        return self.compute + self.talk


def on_gpus(work: Work, cluster: Cluster, here: Here, ranks: int) -> Parts:
    """A round over so many GPUs: full nodes, or some of one."""
    clients = math.ceil(work.clients / ranks)
    arithmetic = clients * work.rows * work.flops / cluster.flops
    traffic = clients * 5 * 4 * work.parameters / cluster.memory  # parameters twice, a gradient, an update
    step = max(arithmetic, traffic) + cluster.kernels * cluster.launch
    inside, nodes = min(ranks, cluster.gpus), max(1, ranks // cluster.gpus)
    size = 8.0 * work.parameters
    near = summed(math.log2(inside), (inside - 1) / inside, size, work.clients, *cluster.near)
    far = summed(math.log2(nodes), (nodes - 1) / nodes, size / inside, work.clients, *cluster.far)
    return Parts(here.round + work.steps * step, here.meet * (ranks > 1) + near + far)


def over_the_world(here: Here, wide: Wide, sites: int, message: float, servers: int = 1) -> dict[str, float]:
    """A round of so many sites that answer, by what takes the time; with several servers below one, of their parts."""
    levels = [math.ceil(sites / servers)] + ([servers] if servers > 1 else [])
    travels = message / wide.up + message / wide.down + len(levels) * wide.line
    return {
        "the server's processor": sum(here.server + n * (here.asked + 2 * message * here.byte) for n in levels),
        "the server's link": sum(n * 2 * message / wide.link for n in levels),
        "the site's link": travels,
        "the site's processor": wide.slower * here.site,
    }
