from .federated_party import FederatedParty as FederatedParty
from .remote import over_hub as over_hub, over_link as over_link
