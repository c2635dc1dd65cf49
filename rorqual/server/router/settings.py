"""Which replica gets a request, and what happens when one is lost, as options. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rorqual.config import StrictModel
from rorqual.server.settings import Seconds


class RoutingSettings(StrictModel):
    """How requests are shared by replicas."""

    on_failure: Literal["retry", "fail"] = "retry"
    """What becomes of a request whose replica is lost, or answers 503, before the client has got a byte. retry: another
    replica gets it; fail: the client gets the error. One for which no connection could be made goes to another in any
    case."""
    cache_threshold: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Part of a prompt's beginning, 0 to 1, that must have been sent to a replica before to count as cached there."""
    balance_abs_threshold: Annotated[int, Field(ge=0)] = 16
    """A replica with the prompt in its cache is passed over if it has more than so many requests above the least busy
    one, and more than balance_rel_threshold times its requests."""
    balance_rel_threshold: Annotated[float, Field(ge=1)] = 1.5
    """See balance_abs_threshold."""
    prefix_index_blocks: Annotated[int, Field(ge=1)] = 65536
    """Blocks of 128 characters or 32 token ids that are remembered per replica, the newest ones: about what its KV
    cache holds, or more."""
    health_check_path: Annotated[str, Field(pattern="^/[!-~]*$")] = "/ready"
    """What replicas are asked for their health: 200 is well."""
    health_check_interval: Seconds = 1.0
    """Seconds from a health check to the next."""
    health_check_timeout: Seconds = 5.0
    """Seconds that an answer to a health check, or a connection, may take."""
    health_check_failures: Annotated[int, Field(ge=1)] = 3
    """Health checks in a row without any answer after which a replica counts as lost, and its requests end. New ones
    go elsewhere from the first on."""
