"""Federations: the contract of algorithms, and who computes what, who hears whom, where it runs, round by round."""
