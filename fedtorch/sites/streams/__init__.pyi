from . import memory as memory
