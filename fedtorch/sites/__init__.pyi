from . import secure as secure
from .audit.audit import AuditRecord as AuditRecord
from .carry import masked as masked, plain as plain, sealed as sealed
from .identity.identity import Identity as Identity
from .identity.roster import Roster as Roster
from .rounds.configuration import SiteConfiguration as SiteConfiguration, read_configuration as read_configuration
from .rounds.policy import Policy as Policy
from .rounds.population import Remote as Remote
from .rounds.session import SiteSession as SiteSession
from .rounds.site import deliver as deliver, join as join
from .streams.grpc_streams import connect as connect, serve as serve
from .streams.hub import Hub as Hub, Limits as Limits, Link as Link
