from . import secure as secure
from .audit.audit import AuditRecord as AuditRecord
from .carry import masked as masked, plain as plain, sealed as sealed
from .identity.identity import Identity as Identity
from .identity.roster import Roster as Roster
from .rounds.offer import Offer as Offer, read_offer as read_offer
from .rounds.population import Remote as Remote
from .rounds.site import deliver as deliver, join as join
from .rounds.terms import Terms as Terms
from .rounds.visit import Visit as Visit
from .streams.grpc_streams import connect as connect, serve as serve
from .streams.hub import Hub as Hub, Limits as Limits, Link as Link
