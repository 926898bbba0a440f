"""Who computes what, who hears whom, and where it runs."""
