"""Speed of this checkout beside another one's, in one run."""
