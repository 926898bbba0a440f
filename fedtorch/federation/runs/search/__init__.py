"""Search of settings: a grid of whole runs, and studies of Optuna that end the worse ones early."""
