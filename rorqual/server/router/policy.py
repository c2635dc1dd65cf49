"""Which replica gets a request. No I/O; no torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Literal

from rorqual.server.http_client import HttpClient
from rorqual.server.router.prefix_index import SentPrefixes
from rorqual.server.router.prompt import Wanted
from rorqual.server.router.settings import RoutingSettings

Reason = Literal["response", "session", "prefix", "load"]
REASONS: tuple[Reason, ...] = ("response", "session", "prefix", "load")
"""The strongest first."""
MOST_SESSIONS = 100_000
MOST_RESPONSES = 100_000


class Replica:
    """A server, as the router knows it.

    Args:
        url: where it is, and its name in metrics.
        settings: of the router.
    """

    def __init__(self, url: str, settings: RoutingSettings) -> None:
        self.url = url
        self.client = HttpClient(url, max_idle_s=0.5, connect_s=settings.health_check_timeout)
        """Servers keep idle connections for longer than that."""
        self.prefixes = SentPrefixes(settings.prefix_index_blocks)
        self.is_healthy = self.has_been_healthy = False
        self.failure: str | None = "it has not been asked for its health yet"
        """Why it is not healthy."""
        self.failure_code: str | None = None
        """What the replica calls it, if it says so itself."""
        self.num_silent_checks = 0
        """Health checks in a row that got no answer."""
        self.num_running = 0
        """Requests that this router has sent there and that have not ended."""
        self.num_foreign = 0
        """Answers that run or wait there beside those, when it was last asked."""
        self.chosen_at = 0
        """The number of the choice that last fell on it."""
        self.choices: Counter[Reason] = Counter()
        self.num_errors = 0
        """Requests that it was lost for, or that it answered 500 or above."""
        self.num_retries = 0
        """Those of them that another replica got then."""

    @property
    def load(self) -> int:
        """Requests that run or wait there, as far as is known."""
        return self.num_running + self.num_foreign


class Balancer:
    """Chooses among replicas, and remembers what it has sent where.

    1. A request that needs a stored response goes to the replica that has it.
    2. One of a session goes where the session's last one went, while that replica is healthy.
    3. Of the replicas that are not much busier than the least busy one, the one that has seen most of the prompt's
       beginning gets it, if that is at least `cache_threshold` of it.
    4. Else the least busy one.

    Among equals, the less busy one, and then the one whose last choice is longest ago. A replica is much busier if it
    has more than `balance_abs_threshold` requests above the least busy one, and more than `balance_rel_threshold` times
    as many.
    """

    def __init__(self, replicas: Sequence[Replica], settings: RoutingSettings) -> None:
        self.replicas, self._settings = replicas, settings
        self._sessions: OrderedDict[str, Replica] = OrderedDict()
        self._responses: OrderedDict[str, Replica] = OrderedDict()
        self._num_choices = 0

    def choose(self, wanted: Wanted, *, without: Collection[Replica] = ()) -> Replica | None:
        """The replica for a request, which is counted as sent there; None if there is none.

        Args:
            wanted: the request.
            without: replicas that have failed at it.
        """
        there = [replica for replica in self.replicas if replica.is_healthy and replica not in without]
        if not there:
            return None
        replica, reason = self._choice(wanted, there)
        self._num_choices += 1
        replica.chosen_at = self._num_choices
        replica.choices[reason] += 1
        replica.prefixes.add(wanted.blocks)
        if wanted.session is not None:
            _remember(self._sessions, wanted.session, replica, MOST_SESSIONS)
        return replica

    def _choice(self, wanted: Wanted, there: Sequence[Replica]) -> tuple[Replica, Reason]:
        owner, last = self._responses.get(wanted.response_id or ""), self._sessions.get(wanted.session or "")
        if owner is not None and owner in there:
            return owner, "response"
        if last is not None and last in there:
            return last, "session"
        least = min(replica.load for replica in there)
        most = max(least + self._settings.balance_abs_threshold, least * self._settings.balance_rel_threshold)
        needed = max(1.0, self._settings.cache_threshold * len(wanted.blocks))
        matches = {replica: replica.prefixes.match(wanted.blocks) for replica in there if replica.load <= most}
        best = max(matches, key=lambda replica: (matches[replica], -replica.load, -replica.chosen_at))
        if matches[best] >= needed:
            return best, "prefix"
        return min(there, key=lambda replica: (replica.load, replica.chosen_at)), "load"

    def owner(self, response_id: str) -> Replica | None:
        """The replica that has a stored response, as far as is known."""
        return self._responses.get(response_id)

    def note_response(self, response_id: str, replica: Replica) -> None:
        """A replica has made a response, or has it."""
        _remember(self._responses, response_id, replica, MOST_RESPONSES)

    def forget(self, replica: Replica) -> None:
        """All that a replica held is gone."""
        replica.prefixes.clear()
        replica.num_foreign = 0
        for held in (self._sessions, self._responses):
            for key in [key for key, value in held.items() if value is replica]:
                del held[key]


def _remember(held: OrderedDict[str, Replica], key: str, replica: Replica, most: int) -> None:
    held[key] = replica
    held.move_to_end(key)
    if len(held) > most:
        held.popitem(last=False)
