"""Other people's modules, losses, metrics and data in awkward situations, held against plain loops."""
