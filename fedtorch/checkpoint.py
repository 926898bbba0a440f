"""Checkpoints of runs: flat tensors in a safetensors file, and a fingerprint of the run.

All safetensors files of the package are written by `write`: checkpoints, states of sites, draws, parts of a fit, rows.
The SHA-256 of a file, without its own digits, is in the header's metadata, and is compared before anything of the file
is used: one flipped bit, in the numbers or the header, is a `ValueError` with the path. That detects damage. Whoever
can write the file can also write another digest; file modes and records protect against people.

A fingerprint identifies a run: the algorithm's settings, seed, clients' names, cohort and faults. It does not contain
the chunk, the device or the number of ranks, which change no result beyond rounding. Digests of the clients' rows are
stored beside it, see `fedtorch.data.digests`. Functions count by their name and their closure's values, modules, such
as a loss, by their layers' settings and the tensors that are not trained.

>>> import tempfile, torch
>>> from fedtorch import checkpoint
>>> folder = tempfile.TemporaryDirectory()
>>> path = f"{folder.name}/round.safetensors"
>>> checkpoint.write(path, {"server.weight": torch.ones(2), "round": torch.tensor(3)})
>>> flat = checkpoint.read(path)
>>> checkpoint.below("server.", flat)
{'weight': tensor([1., 1.])}
>>> checkpoint.check_structure(flat, {"server.weight": torch.zeros(2), "round": torch.tensor(0)})  # as here
>>> theirs, mine = ({"lr": checkpoint.describe(lr)} for lr in (0.1, 0.5))
>>> checkpoint.check_fingerprint(theirs, mine)
Traceback (most recent call last):
ValueError: Expected a checkpoint of a run with lr 0.5, but got one with 0.1; pass anyway=True to go on from it ...
>>> folder.cleanup()
"""

from __future__ import annotations

import dis
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedtorch import _files as files, functional, wire
from fedtorch._safetensors_header import DIGEST_AT, LENGTH, fields_of, has_digest, make_file_header, read_header

ANYWAY = (
    "anyway=True to go on from it all the same: run.load(path, anyway=True), ft.Federation(…, anyway=True), or "
    "`fedtorch fit --anyway true`"
)
_LONGEST_HEADER = 10**8  # bytes, as in the library
_DEEPEST = 4  # deepest nesting of functions in a description
_LONGEST = 240  # characters of a description that are not abbreviated
_PAIRS = "complex128"  # the name in the metadata of tensors that are pairs of real numbers
_STRUCTURE = "structure"  # the name of the bytes of JSON among packed tensors


class TensorFile(NamedTuple):
    """A safetensors file of `write` with a valid digest, or one of another program, without digest."""

    file: Any  # the library's own file, with memory-mapped tensors
    about: dict[str, Any]  # metadata written with the tensors
    checked: bool  # whether it has a digest

    @property
    def names(self) -> list[str]:
        """Return the names of its tensors."""
        return list(self.file.keys())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that is read from the file on demand, unless it is of complex128."""
        leaf: Tensor = self.file.get_tensor(name)
        if name not in self.about.get(_PAIRS, ()):
            return leaf
        return torch.view_as_complex(leaf.clone())  # kernels need pairs at multiples of 16 bytes, the file has 8


def write(
    path: Path | str, flat: Mapping[str, Tensor], about: Mapping[str, Any] | None = None, *, private: bool = False
) -> None:
    """Write a safetensors file with its digest; a kill at any moment leaves the old file or the new one, complete.

    Tensors go to disk one by one, so that tensors mapped from another file need not fit into memory. Those of
    complex128, which the format lacks, are written as pairs of real numbers and listed in the metadata.

    Args:
        path: of the file.
        flat: tensors by name.
        about: JSON beside them.
        private: whether the file is readable by its owner alone, as those of sites and servers are.
    """
    pairs = sorted(name for name, leaf in flat.items() if leaf.dtype == torch.complex128)
    known = {**(about or {}), **({_PAIRS: pairs} if pairs else {})}
    fields = fields_of(tuple((name, leaf.dtype, leaf.shape) for name, leaf in flat.items()))
    header = make_file_header(fields, json.dumps(known, allow_nan=False) if known else None, "0" * files.DIGITS)
    hashed = hashlib.sha256(header[:DIGEST_AT] + header[DIGEST_AT + files.DIGITS :])
    with files.replacing(path, private=private) as file:
        file.write(header)
        for field in fields.order:
            numbers = wire.as_bytes(flat[field.name])
            hashed.update(numbers)
            file.write(numbers)
        file.seek(DIGEST_AT)
        file.write(hashed.hexdigest().encode())


def read(path: Path | str, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Read the tensors of a file of `write`, or the `wanted` ones, into separate memory.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: the file is damaged, by a bit or altogether, or not one of `write`.
    """
    with opened(path) as content:
        return {name: content.tensor(name).clone() for name in content.names if wanted(name)}


@contextmanager
def opened(path: Path | str, *, foreign: bool = False) -> Iterator[TensorFile]:
    """Open a file of `write`, after all of it was compared with its digest, block by block.

    Args:
        path: of the file.
        foreign: whether to accept files of other programs, which have no digest.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: the file is damaged, by a bit or altogether, or one of another program.
    """
    if Path(path).is_dir():
        raise ValueError(f"Expected a safetensors file in {path}, but got a folder; pass the path of a file in it")
    with Path(path).open("rb") as binary:
        checked = has_digest(binary.read(DIGEST_AT))
        if checked and not files.digest_fits(binary, DIGEST_AT):
            raise ValueError(
                f"Expected a safetensors file in {path} as it was written, but its content does not fit the SHA-256 in "
                "its header: it is damaged; take another copy or an earlier file, or begin anew"
            )
        binary.seek(0)
        length = int.from_bytes(binary.read(LENGTH), "little")
        header = binary.read(min(length, _LONGEST_HEADER))
    if not checked and not foreign:
        raise _without_digest(path)
    read_header(header, functools.partial(_damaged, path))
    try:
        with safe_open(str(path), "pt") as file:
            known = file.metadata() or {}
            if not checked and known.keys() & {"fedtorch", "sha256"}:
                raise _without_digest(path)
            yield TensorFile(file, json.loads(known.get("fedtorch", "{}")), checked)
    except SafetensorError as error:
        raise _damaged(path, "a file that safetensors reads", error) from None


def _damaged(path: Path | str, expected: str, got: object) -> ValueError:
    return ValueError(
        f"Expected a safetensors file in {path}, but got a damaged or another one: expected {expected}, but got {got}"
    )


def _without_digest(path: Path | str) -> ValueError:
    return ValueError(
        f"Expected a safetensors file in {path} with the SHA-256 that fedtorch writes in its header, but it has none "
        "there: it is damaged, or an earlier version or another program has written it; take another copy, or let this "
        "version write it anew"
    )


def read_run(path: Path | str) -> dict[str, Tensor]:
    """Read the tensors of a run, from its own file or from the checkpoint of a Trainer of a `Federation`.

    Raises:
        ValueError: `path` is empty or a folder, or the file is damaged or of another kind.
    """
    if not str(path) or Path(path).is_dir():
        raise ValueError(
            f"Expected the path of a checkpoint, but got {str(path)!r}; a ModelCheckpoint has one in best_model_path "
            "when something has been saved"
        )
    with Path(path).open("rb") as file:
        zipped = file.read(4) == b"PK\3\4"
    if not zipped:
        return read(path)
    from fedtorch.checkpoint_io import PlainCheckpointIO  # imports Lightning

    content = PlainCheckpointIO().load_checkpoint(path)
    flat = content.get("state_dict", {}).get("_extra_state") if isinstance(content, dict) else None
    if not isinstance(flat, dict):
        raise ValueError(
            f"Expected the checkpoint of a federation in {path}, but got that of another module; load it with its "
            "class's load_from_checkpoint"
        )
    return flat


def describe(value: Any) -> str:
    """Describe a value as text that is the same in every process; functions by name and closure.

    A long text is abbreviated to its beginning and the digest of all of it.
    """
    text = _described(value, 0)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]}… ({len(text)} characters of digest {_digest(text.encode())})"


def _digest(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()[:16]


def _described(value: Any, depth: int) -> str:
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"tensor {tuple(value.shape)} of digest {_digest(numbers)}"
    if isinstance(value, nn.Module):
        layers = functional.layers(value)
        settings = {name: setting for name, setting in layers.pop("").items() if name != "class"}
        fixed = {
            n: functional.checksum(leaf) for n, leaf in functional.tensors(value).items() if not leaf.requires_grad
        }
        return f"{type(value).__qualname__}({_described({**settings, **layers, **fixed}, depth)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_described(part, depth)}" for name, part in value.items()) + "}"
    if hasattr(value, "__dataclass_fields__") or hasattr(value, "_asdict"):
        fields = value._asdict() if hasattr(value, "_asdict") else vars(value)
        return f"{type(value).__qualname__}({_described(fields, depth)})"
    if isinstance(value, tuple) and value and all(isinstance(part, str) for part in value):
        return f"{len(value)} names of digest {_digest(json.dumps(value).encode())}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_described(part, depth) for part in value) + ")"
    if isinstance(value, functools.partial):
        return f"{_described(value.func, depth)}({_described((value.args, value.keywords), depth)})"
    if hasattr(value, "__code__"):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        inner = _described((_constants(value), held, value.__defaults__), depth + 1) if depth < _DEEPEST else ""
        return f"{value.__module__}.{value.__qualname__}{inner}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    return type(value).__qualname__ if not isinstance(value, type) else value.__qualname__


def _constants(function: Any) -> list[Any]:
    """Return the numbers and texts in a function's code, except its docstring."""
    code = function.__code__
    constants = [c for c in code.co_consts if isinstance(c, (int, float, str)) and c != function.__doc__]
    # Since Python 3.14 small integers are part of the instructions.
    return constants + [each.arg for each in dis.get_instructions(code) if each.opname == "LOAD_SMALL_INT"]


def check_fingerprint(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse a state of another run, with the first difference between the two."""
    for name in {**mine, **theirs}:
        if theirs.get(name) != mine.get(name):
            raise ValueError(
                f"Expected a checkpoint of a run with {name} {mine.get(name)}, but got one with {theirs.get(name)}; "
                f"pass {ANYWAY}"
            )


def check_structure(state: Mapping[str, Tensor], mine: Mapping[str, Tensor], of_any_shape: str | None = None) -> None:
    """Refuse a state of another structure than `mine`; the clients that have taken part may differ.

    Args:
        state: flat.
        mine: flat, in the expected structure.
        of_any_shape: prefixes of the names of tensors whose shapes are not compared.
    """
    loose = (
        "history.",
        "recorders.",
        "fingerprint",
        "module",
        "clients.record",
        "rows.",
        "ended",
        "design",
    )  # which check their own
    missing, other = mine.keys() - state.keys(), state.keys() - mine.keys()
    if any(not name.startswith(loose) for name in missing | other):
        raise ValueError(
            f"Expected a checkpoint of this algorithm, with {sorted(missing)}, but got one with {sorted(other)} instead"
        )
    for name, leaf in mine.items():
        if name.startswith(loose):
            continue
        rows = name.startswith("clients.")
        want, got = leaf.shape[rows:], state[name].shape[rows:]
        if of_any_shape is not None and name.startswith(of_any_shape):
            want = got
        if want != got or leaf.dtype != state[name].dtype:
            raise ValueError(
                f"Expected {name} in the checkpoint to be {leaf.dtype} of shape {tuple(want)}, but got "
                f"{state[name].dtype} of shape {tuple(got)}"
            )


def pack(state: Any) -> dict[str, Tensor]:
    """Convert a nested state, such as `Optimizer.state_dict()`, to flat tensors, with other values as the bytes of
    JSON.

    Raises:
        TypeError: a value is not a tensor, number, text, list or dict.
    """
    flat: dict[str, Tensor] = {}
    text = json.dumps(_packed(state, "value", flat))
    return {**flat, _STRUCTURE: torch.tensor(list(text.encode()), dtype=torch.uint8)}


def unpack(flat: Mapping[str, Tensor]) -> Any:
    """Return the nested state given to `pack`."""
    return _unpacked(json.loads(bytes(flat[_STRUCTURE].tolist())), flat)


def _packed(value: Any, name: str, flat: dict[str, Tensor]) -> Any:
    """Return JSON with a kind before every value; put tensors into `flat`, and name them."""
    if isinstance(value, Tensor):
        flat[name] = value
        return ["tensor", name]
    if isinstance(value, dict):
        return ["dict", [[key, _packed(part, f"{name}.{key}", flat)] for key, part in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_packed(part, f"{name}.{i}", flat) for i, part in enumerate(value)]]
    return ["plain", value]


def _unpacked(described: Any, flat: Mapping[str, Tensor]) -> Any:
    kind, value = described
    if kind == "tensor":
        return flat[value].clone()
    if kind == "dict":
        return {key: _unpacked(part, flat) for key, part in value}
    if kind == "plain":
        return value
    parts = [_unpacked(part, flat) for part in value]
    return tuple(parts) if kind == "tuple" else parts


def below(prefix: str, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of `flat` with a prefix in their names, without it."""
    return {name.removeprefix(prefix): leaf for name, leaf in flat.items() if name.startswith(prefix)}
