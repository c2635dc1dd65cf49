"""How many prompt tokens a step may carry while somebody reads a stream, from what steps were measured to cost."""

from __future__ import annotations

import statistics
from collections import deque

STRETCH = 1.8
"""A step with prompt tokens should take at most so many times as long as one without. Below two, since the rule works
with estimates."""
FEWEST_TOKENS = 4
"""A prompt moves on by so many tokens whatever they cost, and by multiples of them: fewer say little about what one
costs."""
_REMEMBERED = 16


class Pacing:
    """Learns what a step costs without prompt tokens, and what each of these adds."""

    def __init__(self) -> None:
        self._alone: deque[float] = deque(maxlen=_REMEMBERED)
        self._per_token: deque[float] = deque(maxlen=_REMEMBERED)

    def record(self, *, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Tell of a step: sequences that got one token, tokens of prompts, and how long it took."""
        if num_decodes and not num_prompt_tokens:
            self._alone.append(seconds)
        elif num_prompt_tokens >= FEWEST_TOKENS:
            # Without a stream beside it a step reads the weights for its prompts alone: all of it is their cost.
            alone = statistics.median(self._alone) if num_decodes and self._alone else 0.0
            self._per_token.append(max(seconds - alone, 0.1 * seconds) / num_prompt_tokens)

    @property
    def prompt_limit(self) -> int | None:
        """Prompt tokens for a step beside streams; None until both costs are known."""
        if not self._alone or not self._per_token:
            return None
        tokens = (STRETCH - 1) * statistics.median(self._alone) / statistics.median(self._per_token)
        return max(FEWEST_TOKENS, int(tokens) // FEWEST_TOKENS * FEWEST_TOKENS)
