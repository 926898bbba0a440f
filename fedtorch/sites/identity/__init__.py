"""Identities between organisations: certificates, the roster that an authority signs, keys of a run, envelopes."""
