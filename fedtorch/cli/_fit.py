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
    "fit": "train the federation of a configuration file",
    "validate": "score a checkpoint on the validation rows of a configuration file",
    "test": "score a checkpoint on the test rows of a configuration file",
    "predict": "write the predictions of a checkpoint's client models for their test rows",
}
HELP = """usage: fedtorch {name} --config FILE [--KEY VALUE …] [--ckpt_path FILE]

{what}

keys of the file, which are also options:
{keys}
    trainer: arguments of Lightning's Trainer, such as max_epochs, logger and callbacks.
    seed_everything: seed of modules' first weights, of the split and of the run; default 0.

A key within a key is an option with a dot: --trainer.max_epochs 50 --algorithm.local.epochs 2.

options:
    --config FILE, -c FILE: YAML or JSON; of several files and options a later one overrides an earlier.
    --print_config: print all keys with their values, including defaults, and run nothing.
    --ckpt_path FILE: the checkpoint from which to resume, to score, or to predict.
    --out FILE: file of predictions, for predict; default predictions.safetensors, with a tensor for each client.
"""


def add(commands: Any) -> None:
    """Add the commands to a parser's subcommands."""
    for name, what in WHAT.items():
        # A prefix that nobody types leaves all options to the parser of `FederationCLI`.
        parser = commands.add_parser(name, help=what, add_help=False, prefix_chars="\0")
        parser.set_defaults(run=partial(_run, name))
        parser.add_argument("arguments", nargs=argparse.REMAINDER)


def _run(name: str, options: argparse.Namespace) -> None:
    if {"-h", "--help"} & {*options.arguments}:
        sys.stdout.write(HELP.format(name=name, what=WHAT[name], keys=_keys()))
        return
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that the user's own modules there can be imported, as with `python -m`
    from fedtorch.cli._configuration import FederationCLI

    FederationCLI(name, options.arguments)


def _keys() -> str:
    """Return the arguments of `_configuration.federation` from its docstring, which is read without an import."""
    source = ast.parse((Path(__file__).parent / "_configuration.py").read_text("utf-8"))
    (function,) = (n for n in source.body if isinstance(n, ast.FunctionDef) and n.name == "federation")
    text = ast.get_docstring(function) or ""
    return text.partition("Args:\n")[2].partition("\n    seed:")[0]
