from .site import app as app
from .transport import serve as serve
