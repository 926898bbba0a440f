"""Sites over Flower's deployment engine."""
