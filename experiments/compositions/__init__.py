"""Compositions of parts of the package, each beside the best of its parts; `table` runs all of them."""
