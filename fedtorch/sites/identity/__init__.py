"""Identities between organisations: certificates, the roster that an authority signs, keys of a run, envelopes."""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
