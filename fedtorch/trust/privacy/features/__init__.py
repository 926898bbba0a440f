"""Choose features that tell little of what is private."""
