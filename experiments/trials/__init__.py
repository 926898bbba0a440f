"""Results that others published, at their settings: ours beside theirs."""
