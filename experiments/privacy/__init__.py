"""Privacy: what it costs, and what attacks learn without it."""
