from .remote import over_hub as over_hub, over_link as over_link
from .resuming import resuming_over_hub as resuming_over_hub, resuming_over_link as resuming_over_link
