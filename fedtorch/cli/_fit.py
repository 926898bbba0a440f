"""`fedtorch fit`, `validate`, `test` and `predict`: a federation from a configuration file.

See `docs/howto/configuration.md`.

fedtorch fit --config run.yaml [--cohort 10] [--trainer.max_epochs 50] [--ckpt_path last.ckpt]
fedtorch validate --config run.yaml --ckpt_path last.ckpt
fedtorch test --config run.yaml --ckpt_path last.ckpt
fedtorch predict --config run.yaml --ckpt_path last.ckpt [--out predictions.safetensors]
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

WHAT = {
    "fit": "train what a configuration file says",
    "validate": "score what a checkpoint holds, as the configuration file says",
    "test": "score what a checkpoint holds on the test rows",
    "predict": "write what the clients' models of a checkpoint predict for their test rows",
}
HELP = """usage: fedtorch {name} --config FILE [--KEY VALUE …] [--ckpt_path FILE]

{what}

keys of the file, which are options too:
{keys}
    trainer: arguments of Lightning's Trainer, such as max_epochs, logger and callbacks.
    seed_everything: of modules' first weights, the split and the run; default 0.

A key within a key is an option with a dot: --trainer.max_epochs 50 --algorithm.local.epochs 2.

options:
    --config FILE, -c FILE: YAML or JSON; several files, and what follows them, are taken in their order.
    --print_config: print all keys as they would be, defaults included, and run nothing.
    --ckpt_path FILE: the checkpoint to go on from, to score, or to predict with.
    --out FILE: of predict, where predictions go; default predictions.safetensors, a tensor for each client.
"""


def add(commands: Any) -> None:
    """Add the commands to a parser's."""
    for name, what in WHAT.items():
        # A prefix that nobody types: options are for the parser that knows them.
        parser = commands.add_parser(name, help=what, add_help=False, prefix_chars="\0")
        parser.set_defaults(run=partial(_run, name))
        parser.add_argument("arguments", nargs=argparse.REMAINDER)


def _run(name: str, options: argparse.Namespace) -> None:
    if {"-h", "--help"} & {*options.arguments}:
        sys.stdout.write(HELP.format(name=name, what=WHAT[name], keys=_keys()))
        return
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a module of the user's own may lie, as for `python -m`
    from fedtorch.cli._configuration import FederationCLI

    FederationCLI(name, options.arguments)


def _keys() -> str:
    """Return the arguments of `configuration.federation` by its docstring, which is read and not imported."""
    source = ast.parse((Path(__file__).parent / "_configuration.py").read_text("utf-8"))
    (function,) = (n for n in source.body if isinstance(n, ast.FunctionDef) and n.name == "federation")
    text = ast.get_docstring(function) or ""
    return text.partition("Args:\n")[2].partition("\n    seed:")[0]
