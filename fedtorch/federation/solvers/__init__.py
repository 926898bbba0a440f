"""Local solvers: minimisation of a client's own loss plus a `Quadratic`."""
