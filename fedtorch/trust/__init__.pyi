from fedtorch.federation.exchanges import robust as robust
from fedtorch.sites import secure as secure

from . import (
    attacks as attacks,
    drift as drift,
    explain as explain,
    fairness as fairness,
    privacy as privacy,
    record as record,
)
