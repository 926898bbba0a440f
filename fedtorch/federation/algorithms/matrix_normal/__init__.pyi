from .algorithm import matrix_normal as matrix_normal
from .posterior import devices as devices
