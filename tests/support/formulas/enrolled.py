"""A server and three sites that the commands have enrolled, whose processes join over gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtorch import checkpoint, cli, tree
from fedtorch.sites import Hub, Roster, serve
from fedtorch.sites.enrolment import EnrolmentServer
from fedtorch.sites.identity import identity
from support.processes import TESTS, Process

NAMES = ["a", "b", "c"]


class Place:
    """A folder with a server and three sites, enrolled by the commands for it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.sites = folder, dict[str, Process]()
        authority = str(folder / "authority")
        assert cli.main(["authority", authority, "--server", str(folder / "server")]) == 0
        self.roster = Roster(folder / "server" / "roster.json")
        enrolling = EnrolmentServer(authority, "127.0.0.1:0", self.roster)
        for name in NAMES:
            capsys.readouterr()
            assert cli.main(["invite", name, "--authority", authority, "--at", f"127.0.0.1:{enrolling.port}"]) == 0
            token = capsys.readouterr().out.strip()
            assert cli.main(["enrol", token, "--identity", str(folder / name)]) == 0
        enrolling.close()

    def serve(self) -> Hub:
        """In this process."""
        return serve("127.0.0.1:0", identity.read(self.folder / "server"), self.roster)

    def join(self, name: str, port: int, brings: str = "my_data.py", **environment: str) -> None:
        """A site's process begins."""
        folder = self.folder / name
        own = TESTS / "support" / "scripts" / brings
        command = ["-m", "fedtorch.cli", "join", f"127.0.0.1:{port}", "--data", str(own)]
        command += ["--identity", str(folder), "--save", str(folder / "models.safetensors"), "--timeout", "120"]
        self.sites[name] = Process(command, SITE=name, **environment)

    def kill(self, name: str) -> None:
        """A site's process ends at once."""
        self.sites[name].kill()
        self.sites[name].communicate()

    def models(self) -> tree.Tree:
        """What sites have saved, once their processes have ended, `(6, ...)`."""
        rows = []
        for i, name in enumerate(NAMES):
            said = self.sites[name].communicate(timeout=60)
            assert self.sites[name].returncode == 0, said[-3000:]
            flat = checkpoint.read(self.folder / name / "models.safetensors")
            for k in (2 * i, 2 * i + 1):
                rows.append({part: flat[f"client {k}.{part}"] for part in ("weight", "bias")})
        return tree.stack(rows)
