"""Files of the package that a round goes through."""
