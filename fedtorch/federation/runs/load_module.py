"""A checkpoint's model as an ordinary module, without the algorithm, the population and the rows of its run."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fedtorch import checkpoint, functional
from fedtorch.federation.runs.server_module import SavedModule, read

_NAMED = 3  # tensors in a message


def load_module(path: Path | str, module: nn.Module) -> nn.Module:
    """Return a copy of `module` with the server's tensors of a checkpoint, as `global_module` of its run did.

    Files are read as plain tensors; nothing in them is executed. Tensors that training does not change (frozen
    parameters, and buffers such as class weights) come from the given module and must equal those of training: pass the
    same pretrained base.

    Args:
        path: file of `Run.save`, or of a Trainer of a `Federation`, such as `ModelCheckpoint.best_model_path`.
        module: made like the trained one; it is not changed.

    Raises:
        ValueError: the file is no checkpoint of a federation, the server holds no whole model, or the module has other
            tensors, by name, shape or, where frozen, by value.

    Example:
        >>> import tempfile, torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor(y)) for y in ([1.0, 2.0], [3.0, 4.0])])
        >>> local = ft.least_squares(torch.nn.Linear(2, 1, bias=False))
        >>> run = ft.run(ft.fedavg(local), ft.InProcess(data), rounds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run.save(f"{folder}/run.safetensors")
        ...     module = ft.load_module(f"{folder}/run.safetensors", torch.nn.Linear(2, 1, bias=False))
        >>> module(torch.eye(2)).detach().round(decimals=3)
        tensor([[2.],
                [3.]])
    """
    if not isinstance(module, nn.Module):
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(
            f"Expected a module made as for training, but got {got}; a checkpoint holds tensors and no code: "
            "ft.load_module(path, Net(...))"
        )
    saved = read(checkpoint.read_run(path))
    saved.holds.check_whole(module)
    _check_module(saved, module)
    return functional.load(module, saved.holds.tensors)


def _check_module(saved: SavedModule, module: nn.Module) -> None:
    """Refuse a module whose tensors differ from those of training."""
    named, known = functional.tensors(module), {*saved.holds.tensors, *saved.own}
    if named.keys() != known:
        more, less = sorted(named.keys() - known)[:_NAMED], sorted(known - named.keys())[:_NAMED]
        differ = " and ".join(
            text for names, text in ((more, f"with {more} besides"), (less, f"without {less}")) if names
        )
        raise ValueError(
            f"Expected a module with the tensors of the {saved.kind} that was trained, but got {type(module).__name__} "
            f"{differ}; make it as for training, adapters included"
        )
    for name, number in saved.own.items():
        if number is not None and number != functional.checksum(named[name]):
            raise ValueError(
                f"Expected {name!r}, which was not trained and is not in the checkpoint, with the values and dtype "
                "that it had in training, but got others; start from the same pretrained base or seed"
            )
