"""Local solvers: how a client works on its own problem, given what the others think (`Quadratic`)."""
