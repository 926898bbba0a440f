"""Choose features that reveal little of a private attribute."""
