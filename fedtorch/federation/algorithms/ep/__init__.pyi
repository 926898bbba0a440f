from .algorithm import ep as ep
from .correction import Corrected as Corrected, corrected as corrected
from .devices import devices as devices
from .fitting import settled as settled
from .posterior import posterior as posterior
