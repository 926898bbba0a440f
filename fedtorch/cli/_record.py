"""`fedtorch record`: verification of records, whether anybody has changed them.

fedtorch record verify run.safetensors.json              a recorded run, see `fedtorch.trust.record`
fedtorch record verify record.jsonl --certificate PEM    an audit record, see `fedtorch.sites.audit.audit`
fedtorch record verify SERVER SITE … --certificate PEM   audit records, also whether the server's and sites' agree
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    record = commands.add_parser("record", help="verify recorded runs, and audit records of sites and servers")
    actions = record.add_subparsers(required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="find changes")
    verify.add_argument("files", nargs="+", metavar="FILE", help="audit records, or JSON files beside checkpoints")
    verify.add_argument(
        "--certificate", type=Path, metavar="PEM", help="certificate of the authority, or of an audit record's signer"
    )
    verify.add_argument("--roster", type=Path, metavar="FILE", help="the server's roster, with the sites' keys")
    verify.add_argument("--head", metavar="N:HASH", help="an entry noted before, which must be in the record")
    verify.set_defaults(run=_verify_all)


def _verify_all(options: argparse.Namespace) -> int:
    from fedtorch.sites.audit import audit

    audits = [file for file in options.files if audit.is_record(file)]
    if options.head is not None and len(audits) != 1:
        raise ValueError(f"Expected one audit record whose entry --head is, but got {len(audits)}")
    code = max([_verify_audit(file, options) if file in audits else _verify(file) for file in options.files])
    sides = {file: audit.serves(file) for file in audits}
    servers, sites = ([file for file in audits if sides[file] is side] for side in (True, False))
    for pair in product(servers, sites):
        code = max(code, _print(" and ".join(pair), audit.compare(*pair)))
    return code


def _verify_audit(file: str, options: argparse.Namespace) -> int:
    from fedtorch.sites.audit import audit

    certificate = None if options.certificate is None else options.certificate.read_bytes()
    return _print(file, audit.verify(file, certificate=certificate, roster=options.roster, head=options.head))


def _print(what: str, verdict: Any) -> int:
    print(f"{what}\n  {verdict.message}")
    for line in (*verdict.problems[1:], *(f"note: {remark}" for remark in verdict.remarks)):
        print(f"    {line}")
    return 0 if verdict.holds else 1


def _verify(file: str) -> int:
    from fedtorch.trust import record

    try:
        checks = record.verify(file)
    except (OSError, ValueError) as error:
        print(f"fedtorch: {error}", file=sys.stderr)
        return 1
    print(file)
    for check in checks:
        print(f"  {'ok' if check.holds else 'FAILED':7} {check.name:11} {check.message}")
    return 0 if all(check.holds for check in checks) else 1
