"""Multi-output Gaussian processes (FedMGP)."""
