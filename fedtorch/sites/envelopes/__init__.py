"""Sealed messages between sites, which the server carries and cannot read, and keys of a run."""
