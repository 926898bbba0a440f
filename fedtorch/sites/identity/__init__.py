"""Identities between organisations: certificates, the roster that an authority signs, and keys of a run."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
