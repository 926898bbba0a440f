"""Sites on other machines, and the server that they join.

fedtorch authority DIR --server DIR               server: make an authority, and in another folder the server's identity
fedtorch invite NAME --authority DIR --at H:P     server: print a token for a site
fedtorch admit --authority DIR --server DIR --listen H:P   server: enrol sites that have a token, until interrupted
fedtorch revoke NAME --server DIR --why TEXT      server: revoke a site's key
fedtorch enrol TOKEN --identity DIR [--renew]     site: make a key, and get a certificate for it
fedtorch join H:P --data my_data.py --identity DIR   site: take part until a run is over; --ask: only after a yes
fedtorch join --check --data my_data.py           site: show what the file lets a server have, without connecting
fedtorch join H:P --half my_half.py --identity DIR   party: run its half of a vertical protocol
fedtorch states DIR [--clean DAYS]                site: list the stored runs; delete runs that ended so long ago
fedtorch states DIR --begin-sums                  site: create the record of its sums under masks and agreements
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedtorch.cli._launch import THREADS
from fedtorch.cli._terminal import log


def add(commands: Any) -> None:
    """Add the commands to a parser's subcommands."""
    _add_server(commands)
    _add_site(commands)


def _add_server(commands: Any) -> None:
    authority = _command(commands, "authority", _make_authority, "server: make an authority and the server's identity")
    authority.add_argument("folder", metavar="DIR", type=Path, help="a new folder for its key; a run does not need it")
    authority.add_argument("--renew", action="store_true", help="give the server a new certificate of this authority")
    invite = _command(commands, "invite", _invite, "server: print a token for a site")
    invite.add_argument("name", metavar="NAME", help="the site's name, for its certificate")
    invite.add_argument("--at", required=True, metavar="HOST:PORT", help="address of `fedtorch admit`")
    invite.add_argument("--days", type=float, default=3.0, metavar="N", help="days until it expires (default 3)")
    invite.add_argument("--rows", type=int, metavar="N", help="most rows that the site may report")
    admit = _command(commands, "admit", _admit, "server: enrol sites that have a token, until interrupted")
    admit.add_argument("--listen", required=True, metavar="HOST:PORT", help="address at which sites enrol")
    revoke = _command(commands, "revoke", _revoke, "server: revoke a site's key")
    revoke.add_argument("name", metavar="NAME", help="the site's name")
    revoke.add_argument("--why", default="", metavar="TEXT", help="reason, which is stored and sent to the site")
    for command in (invite, admit):
        command.add_argument("--authority", required=True, metavar="DIR", type=Path, help="the authority's folder")
    for command in (authority, admit, revoke):
        command.add_argument(
            "--server",
            default=Path("server"),
            metavar="DIR",
            type=Path,
            help="the server's identity and roster, for runs (default server)",
        )
    for command in (authority, admit):
        command.add_argument(
            "--lifetime", type=float, default=365.0, metavar="DAYS", help="lifetime of a new certificate (default 365)"
        )


def _add_site(commands: Any) -> None:
    enrol = _command(commands, "enrol", _enrol, "site: make a key, and get a certificate for it")
    enrol.add_argument("token", metavar="TOKEN", help="the token from the server's side, made by `fedtorch invite`")
    enrol.add_argument("--renew", action="store_true", help="get a new certificate for the existing key")
    join = _command(commands, "join", _join, "site: answer a server's requests until a run is over")
    join.add_argument("address", metavar="HOST:PORT", nargs="?", help="address of the run's server")
    source = join.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="FILE", help="the site's own Python file: data, algorithms, policy")
    source.add_argument("--half", metavar="FILE", help="a party's own Python file: its half, see protocol.journal")
    join.add_argument(
        "--check", action="store_true", help="read --data, and show what it lets a server have, without connecting"
    )
    join.add_argument(
        "--ask",
        action="store_true",
        help="show what leaves in a run, or for a formula, and wait for yes on the terminal",
    )
    join.add_argument("--states", type=Path, metavar="DIR", help="folder for states; default: beside the identity")
    join.add_argument("--save", type=Path, metavar="FILE", help="file for the clients' tensors after the run")
    join.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="longest silence of the server (default 600)"
    )
    join.add_argument(
        "--threads", type=int, default=THREADS, metavar="N", help="threads of torch (default OMP_NUM_THREADS, or 1)"
    )
    join.add_argument(
        "--record", type=Path, metavar="FILE", help="the audit record; default: record.jsonl among the states"
    )
    states = _command(commands, "states", _show_states, "site: list the stored runs, and delete those that ended")
    states.add_argument("folder", metavar="DIR", type=Path, help="the folder of states")
    states.add_argument(
        "--clean", type=float, metavar="DAYS", help="delete runs that ended so many days ago or earlier"
    )
    states.add_argument(
        "--begin-sums",
        action="store_true",
        help="create the record of sums under masks and agreements, for a site that was in none (enrol does so, too)",
    )
    states.add_argument("--abandon", nargs="+", default=[], metavar="RUN", help="delete these runs though pending")
    for command in (enrol, join):
        command.add_argument(
            "--identity",
            default=Path("identity"),
            metavar="DIR",
            type=Path,
            help="its key and certificate (default identity)",
        )


def _command(commands: Any, name: str, do: Any, what: str) -> Any:
    parser = commands.add_parser(name, help=what, description=what)
    parser.set_defaults(run=do)
    return parser


def _make_authority(options: argparse.Namespace) -> None:
    from datetime import timedelta

    from fedtorch.sites.identity import identity

    if options.folder.resolve() == options.server.resolve():
        raise ValueError(
            "Expected two folders, because the authority's key must not be where the server runs, but got "
            f"{options.folder} for both; choose another --server"
        )
    if not options.renew:
        _check_empty(options.server)
        identity.make_authority(options.folder)
    elif not (options.folder / "authority.key.pem").exists():
        raise FileNotFoundError(f"Expected an authority in {options.folder}, but its key is not there")
    made = identity.make_server(options.folder, timedelta(days=options.lifetime))
    made.save(options.server)
    print(
        f"authority {identity.fingerprint(made.authority)} in {options.folder}; keep this folder away from the server"
    )
    print(f"server in {options.server}; its certificate ends on {made.ends:%Y-%m-%d}")


def _check_empty(folder: Path) -> None:
    """Raise FileExistsError for the folder of another server."""
    if (folder / "certificate.pem").exists():
        raise FileExistsError(f"Expected a folder without an identity, but {folder} has one; choose another --server")


def _roster(options: argparse.Namespace) -> Any:
    from fedtorch.sites.identity.roster import Roster

    return Roster(options.server / "roster.json")


def _invite(options: argparse.Namespace) -> None:
    from fedtorch.sites import enrolment

    seconds = options.days * enrolment.DAY
    print(enrolment.invite(options.authority, options.name, options.at, seconds=seconds, rows=options.rows))


def _admit(options: argparse.Namespace) -> None:
    from datetime import timedelta

    from fedtorch.sites.enrolment import EnrolmentServer

    lifetime = timedelta(days=options.lifetime)
    enrolling = EnrolmentServer(options.authority, options.listen, _roster(options), lifetime=lifetime)
    print(f"enrolling at {options.listen.rpartition(':')[0]}:{enrolling.port}; interrupt to end", flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    enrolling.close()


def _revoke(options: argparse.Namespace) -> None:
    _roster(options).revoke(options.name, options.why)


def _enrol(options: argparse.Namespace) -> None:
    from fedtorch.sites import enrolment
    from fedtorch.sites.rounds import past_sums

    made = enrolment.enrol(enrolment.Token.read(options.token), options.identity, options.renew)
    if not options.renew:
        with suppress(FileExistsError):  # for another identity of the same site
            past_sums.begin(options.identity / "states")
    where = f"the identity is in {options.identity}, its certificate ends on {made.ends:%Y-%m-%d}"
    print(f"enrolled as {made.name!r}; {where}")


def _join(options: argparse.Namespace) -> None:
    if options.check:
        from fedtorch.sites.rounds.configuration import read_configuration

        if options.data is None:
            raise ValueError("Expected --data FILE with --check, but got --half; a half is checked by running it")
        print(read_configuration(options.data).described())
        return
    if options.address is None:
        raise ValueError("Expected HOST:PORT of the run's server, but got none; --check connects to nobody")
    if options.ask and options.data is None:
        raise ValueError("Expected --data FILE with --ask, but got --half; of a half see `run.disclosure()`")
    if options.ask and (sys.stdin is None or not sys.stdin.isatty()):
        raise ValueError(
            "Expected a terminal with --ask, where somebody says yes or no, but got none; start it there, or leave "
            "--ask out: Policy(...) limits all runs, and --check shows what these limits let a server have"
        )
    (_take_part if options.half is None else _run_half)(options)


def _run_half(options: argparse.Namespace) -> None:
    from fedtorch import sites as transport
    from fedtorch.sites.identity import identity
    from fedtorch.sites.vertical.remote import over_link, read_half

    log()
    me = identity.read(options.identity)
    _begin(options, me)
    dial = partial(transport.connect, options.address, me)
    waits = {"seconds": options.timeout, "timeout": options.timeout}
    traffic = over_link(read_half(options.half), dial, _states(options), **waits)[1]
    print(f"the protocol is over; {traffic.up} bytes up and {traffic.down} down")


def _begin(options: argparse.Namespace, me: Any) -> None:
    """Log which site this is, and set torch's number of threads."""
    import torch

    torch.set_num_threads(options.threads)
    ends = f"{me.ends:%Y-%m-%d}"
    logging.info("connecting to %s as %r, whose certificate ends on %s", options.address, me.name, ends)
    logging.info("torch uses %d of %d cores; --threads N changes that", options.threads, os.cpu_count() or 1)


def _states(options: argparse.Namespace) -> Path:
    return options.states or options.identity / "states"


def _take_part(options: argparse.Namespace) -> None:
    from fedtorch import sites as transport
    from fedtorch.sites import AuditRecord, join
    from fedtorch.sites.identity import identity
    from fedtorch.sites.rounds.configuration import read_configuration

    log()
    me, configuration = identity.read(options.identity), read_configuration(options.data)
    _begin(options, me)
    dial = partial(transport.connect, options.address, me)
    record = AuditRecord(options.record or _states(options) / "record.jsonl", me)
    ask = _say_yes if options.ask else None
    session = join(dial, configuration, _states(options), identity=me, timeout=options.timeout, record=record, ask=ask)
    print(f"run {session.run} is over")
    if options.save is not None:
        session.save(options.save)


def _say_yes(shown: str) -> bool:
    """Show a text, and wait on the terminal for yes or no; the end of input counts as no."""
    print(f"\n{shown}")
    while True:
        try:
            reply = input("Take part? yes or no: ").strip().lower()
        except EOFError:
            return False
        if reply in ("yes", "no"):
            return reply == "yes"
        print(f"Expected yes or no, but got {reply!r}")


def _show_states(options: argparse.Namespace) -> None:
    import math

    from fedtorch.protocol.versions import clean, runs
    from fedtorch.sites.rounds import past_sums

    if options.begin_sums:
        past_sums.begin(options.folder)
        print(f"{options.folder} has a new record of the sums under masks and agreements in which the site takes part")
    if options.clean is not None or options.abandon:
        for each in clean(options.folder, math.inf if options.clean is None else options.clean, options.abandon):
            print(f"deleted {each.run}")
    for each in runs(options.folder):
        print(f"{each.run}  {'over' if each.over else 'pending'}  {each.days:.1f} days ago  {each.bytes} bytes")
