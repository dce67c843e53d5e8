"""Names and versions of software, as others state them: text for people, compared and never parsed."""

from __future__ import annotations

from headway import __version__

OURS = f"headway {__version__}"
UNKNOWN = "unknown"
LONGEST = 200  # characters


def stated(value: object) -> str:
    """Return what somebody says of his software; UNKNOWN where it is no line of text of at most LONGEST characters."""
    good = isinstance(value, str) and 0 < len(value) <= LONGEST and value.isprintable() and not value.isspace()
    return str(value) if good else UNKNOWN
