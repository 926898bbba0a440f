"""Search of settings: a grid of whole runs, and successive halving over rounds."""
