from .identity import make_server as make_server, make_site as make_site, read as read
from .key_directory import sign_roster as sign_roster
