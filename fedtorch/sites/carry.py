"""Ways to carry messages, for `carry=` of populations and of a site's policy: `plain`, `masked` sums, `sealed`."""

from fedtorch.federation.exchanges.carry import plain as plain
from fedtorch.sites.envelopes.sealed import sealed as sealed
from fedtorch.sites.secure.masked import masked as masked
