"""Features that reveal little about a private attribute."""
