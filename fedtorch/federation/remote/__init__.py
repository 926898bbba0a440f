"""Clients of other organisations: the server's population `Remote`, and what a site runs to take part, `join`.

A site is like a rank of `Distributed`: it holds clients and their states, runs them stacked, and answers with a partial
aggregate. Unlike a rank it is nobody's servant: it runs what it offers by name, within limits of its own, and may come
late, fail, or leave, and the run goes on.
"""

from fedtorch.federation.remote.audit import AuditRecord as AuditRecord
from fedtorch.federation.remote.offer import Offer as Offer, read_offer as read_offer
from fedtorch.federation.remote.population import Remote as Remote
from fedtorch.federation.remote.sealed import sealed as sealed
from fedtorch.federation.remote.site import Visit as Visit, deliver as deliver, join as join
from fedtorch.federation.remote.terms import Terms as Terms
