"""What all sections of a config have in common."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

NotNegative = Annotated[float, Meta(ge=0)]
NotNegativeInt = Annotated[int, Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: an unknown key is an error."""
