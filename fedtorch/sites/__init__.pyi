from . import (
    enrolment as enrolment,
    flower as flower,
    identity as identity,
    secure as secure,
    streams as streams,
    vertical as vertical,
)
from .audit.audit import AuditRecord as AuditRecord
from .carry import masked as masked, plain as plain, sealed as sealed
from .formulas.agreement import agree as agree
from .identity.roster import Roster as Roster
from .rounds.configuration import SiteConfiguration as SiteConfiguration
from .rounds.policy import Policy as Policy
from .rounds.population import Remote as Remote
from .rounds.site import join as join
from .streams.grpc_streams import connect as connect, serve as serve
from .streams.hub import Hub as Hub
