"""Exchanges: who hears whom, and how messages become an aggregate."""
