"""Files of one node's parameters."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fedtorch import wire

__all__ = ["Saved"]


class Saved(nn.Module):
    """A node's part of a split network, which it saves and loads by itself."""

    name: str

    def save(self, file: str | Path) -> None:
        """Writes this node's parameters, and nobody else's, as safetensors."""
        Path(file).write_bytes(wire.encode(self.state_dict(), {"party": self.name}))

    def load(self, file: str | Path) -> None:
        """Reads what `save` wrote.

        Raises:
            ValueError: the file is another node's, or of a network of another shape.
        """
        payload = Path(file).read_bytes()
        name = wire.metadata(payload, client=self.name).get("party")
        if name != self.name:
            raise ValueError(f"Expected parameters of party {self.name!r}, but got those of {name!r}")
        self.load_state_dict(wire.decode(payload, like=self.state_dict(), client=self.name))
