"""A federation's round over sites: the server's population, and what a site answers."""
