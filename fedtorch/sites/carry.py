"""Transports of messages, for `carry=` of populations and policies: `plain`, `masked` sums, `sealed` envelopes."""

from fedtorch.federation.exchanges.carry import plain as plain
from fedtorch.sites.envelopes.sealed import sealed as sealed
from fedtorch.sites.secure.masked import masked as masked
