"""The sites that a server admits, with their keys and agreed row counts, in a file that is replaced as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from fedtorch import _files as files
from fedtorch.sites.identity.certificates import check_name, common_name
from fedtorch.sites.identity.identity import fingerprint

_SECONDS = 30.0  # longest wait for another process that writes the file


class Member(NamedTuple):
    """An entry of a `Roster`."""

    key: str  # fingerprint of its public key
    revoked: str = ""  # reason for revoking the key; "" if it is valid
    rows: int | None = None  # most rows that the site may report; None if nothing was agreed


class Roster:
    """The sites of a server, read from a file, again whenever it has changed.

    Args:
        path: path of the file; a missing file is an empty roster.

    Raises:
        ValueError: the file is not a roster.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> roster = Roster(f"{folder.name}/roster.json")
        >>> roster.add("ward 7", key="a1b2", rows=1000)
        >>> roster.sites["ward 7"] == Member("a1b2", rows=1000)
        True
        >>> roster.revoke("ward 7", "has left the study")
        >>> roster.check("ward 7", "a1b2")
        Traceback (most recent call last):
        PermissionError: The key of 'ward 7' has been revoked: has left the study
        >>> folder.cleanup()
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._seen: tuple[int, int] | None = None
        self._sites: dict[str, Member] = {}

    @property
    def sites(self) -> dict[str, Member]:
        """Return all sites by name, including revoked ones."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return {}
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._seen:
            self._sites, self._seen = self._read(), stamp
        return self._sites

    @property
    def rows(self) -> dict[str, int | None]:
        """Return the most rows that each site may report, None if nothing was agreed."""
        return {name: site.rows for name, site in self.sites.items()}

    def name_of(self, certificate: bytes) -> str:
        """Return the site's name in a PEM certificate by the authority.

        Raises:
            PermissionError: the site is not in the roster with this key, or is revoked.
        """
        name = common_name(x509.load_pem_x509_certificate(certificate))
        self.check(name, fingerprint(certificate))
        return name

    def check(self, name: str, key: str) -> None:
        """Raise PermissionError unless a site with this name and key fingerprint is admitted."""
        site = self.sites.get(name)
        if site is None:
            raise PermissionError(f"Expected a site of the roster, but {name!r} is not in it; enrol first")
        if site.revoked:
            raise PermissionError(f"The key of {name!r} has been revoked: {site.revoked}")
        if site.key != key:
            raise PermissionError(f"Expected {name!r} with the key of the roster, but got another; enrol anew")

    def add(self, name: str, key: str, rows: int | None = None) -> None:
        """Admit a site with the fingerprint of its key, which replaces an earlier one."""
        check_name(name)
        self._change(name, Member(key, "", rows))

    def revoke(self, name: str, reason: str) -> None:
        """Revoke a site's key; a connected site is disconnected at its next frame.

        Raises:
            ValueError: no such site.
        """
        if name not in self.sites:
            raise ValueError(f"Expected one of {sorted(self.sites)}, but got {name!r}")
        self._change(name, self.sites[name]._replace(revoked=reason or "no reason given"))

    def _change(self, name: str, site: Member) -> None:
        files.private_folder(self.path.parent)
        with files.private_lock(f"{self.path}.lock", timeout=_SECONDS):
            sites = {**(self._read() if self.path.exists() else {}), name: site}
            content = {each: sites[each]._asdict() for each in sorted(sites)}
            files.write_json(self.path, {"sites": content})

    def _read(self) -> dict[str, Member]:
        try:
            return {name: Member(**site) for name, site in files.read_json(self.path)["sites"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"Expected a roster in {self.path}, but got something else: {error}") from None
