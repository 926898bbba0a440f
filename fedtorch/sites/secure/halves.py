"""A secure sum as two halves of a protocol, the server's and a client's.

`parties.py` and `server.py` define the messages of each phase; these halves define their order. Drivers move the
messages: `fedtorch.protocol.halves.together` in one process, requests and answers of a round between sites.

>>> import torch
>>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
>>> from fedtorch.protocol.halves import together
>>> from fedtorch.sites.secure.messages import Session
>>> from fedtorch.sites.secure.neighbours import Neighbourhoods
>>> from fedtorch.sites.secure.parties import Client
>>> from fedtorch.sites.secure.server import Server
>>> from fedtorch.trust import privacy
>>> keys = {k: Ed25519PrivateKey.from_private_bytes(bytes([k]) * 32) for k in (1, 2, 3, 4)}
>>> public = {k: key.public_key().public_bytes_raw() for k, key in keys.items()}
>>> session = Session(b"run", 0, 0, public, size=2, graph=Neighbourhoods(3, 2), minimum=3)
>>> clients = {k: Client(session, k, keys[k], privacy.from_seed(k), torch.tensor([k, 10 * k])) for k in keys}
>>> halves = {0: server_half(Server(session)), **{k: client_half(each.answer) for k, each in clients.items()}}
>>> together(halves)[0][0]
tensor([ 10, 100])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fedtorch.protocol.halves import BYTES, Half, Name, Receive, Send, packed, unpacked
from fedtorch.sites.secure.messages import ADVERT, PHASES, most_up
from fedtorch.sites.secure.server import Server


def client_half(answer: Callable[[int, bytes], bytes | None], server: Name = 0, most: int = 2**31) -> Half:
    """Send a client's messages of all phases; each except the first answers a request of the server.

    Args:
        answer: (phase, the server's payload) -> message, such as `Client.answer`; None to send nothing more.
        server: name of the server.
        most: most bytes that the server may send.
    """
    for phase in PHASES:
        payload = b"" if phase == ADVERT else unpacked((yield Receive(server, BYTES, rows=True, most=most)))
        message = answer(phase, payload)
        if message is None:
            return
        yield Send(server, packed(message), rows=True)


def server_half(server: Server, least: int = 0, names: Mapping[int, str] = MappingProxyType({})) -> Half:
    """Request clients' messages phase by phase, and return the sum of the survivors' words.

    Args:
        server: checks and stores the messages.
        least: least clients, or sites, in the sum; with fewer none is asked to confirm it.
        names: names of clients by number, for error messages.

    Raises:
        RuntimeError: too few clients are left; see also `Server.total`.
    """
    for phase in PHASES:
        asked = tuple(sorted(server.present(phase)))
        if server.session.minimum <= len(server.survivors) < least and not server.confirmed:
            left = [names.get(client, client) for client in server.survivors]
            raise RuntimeError(f"Expected a sum of at least {least} sites, but only {left} are left")
        if phase != ADVERT:
            requests = {client: server.request(phase, client) for client in asked}
            for client, request in requests.items():
                yield Send(client, packed(request), rows=True)
        answers = yield Receive(asked, BYTES, rows=True, most=most_up(server.session, phase), least=least)
        messages = {client: unpacked(message) for client, message in answers.messages.items()}
        server.collect(phase, messages, answers.missing)
    return server.total()
