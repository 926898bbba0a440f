from .bulyan import bulyan as bulyan
from .clipping import centred_clipping as centred_clipping, norm_bounding as norm_bounding
from .fltrust import fltrust as fltrust
from .geometric_median import geometric_median as geometric_median
from .krum import krum as krum
from .median import median as median
from .mixing import nearest_neighbour_mixing as nearest_neighbour_mixing
from .rules import Rule as Rule
from .trimmed_mean import trimmed_mean as trimmed_mean
from .wrapper import rule as rule
