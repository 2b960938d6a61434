"""Ray's classes of this project's actors, one of each in a process.

Ray keeps every class that `ray.remote` returns: in its head, and with the signatures of all methods
in every process that gets a handle to an actor of it. A class for each replaced worker would make
the router and the ingresses grow for as long as they live.
"""

from functools import cache
from typing import Any

import ray


@cache
def actor_class(of: type[Any]) -> Any:
    """Returns Ray's actor class of a plain class."""
    return ray.remote(of)
