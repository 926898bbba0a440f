"""Messages between sites that the server carries and cannot read: keys of a run, sealed messages."""
