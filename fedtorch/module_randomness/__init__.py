"""Random operations inside a user's module, drawn from the clients' keys."""
