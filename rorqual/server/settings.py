"""The server's own options; each is a flag of `rorqual serve`. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ByteSize, Field, model_validator

from rorqual.config import StrictModel

Seconds = Annotated[float, Field(gt=0)]


class ListenerSettings(StrictModel):
    """How an address is listened on, and what every request to it is held to."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 is every one of this machine's; set the server's --api-key then."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port. 0 takes any free one, which the banner names."""
    uds: str | None = None
    """Listen on this Unix socket instead of host and port."""
    allowed_origins: tuple[str, ...] = ()
    """Origin whose web pages may use the API (CORS); "*" is every one. Default: only the server's own. Can be
    repeated."""
    root_path: str = ""
    """Path under which a proxy serves this server."""
    ssl_keyfile: str | None = None
    """Private key (PEM) for HTTPS."""
    ssl_certfile: str | None = None
    """Certificate (PEM) for HTTPS."""
    max_body_size: ByteSize = ByteSize(16 * 2**20)
    """Largest request body, e.g. 16MiB; a larger one gets 413. (default: 16MiB)"""
    body_timeout: Seconds = 30.0
    """Seconds within which a request's headers, and then its body, must have come."""
    drain_timeout: Annotated[float, Field(ge=0)] = 60.0
    """Seconds that running requests get after SIGTERM."""
    timeout_keep_alive: Annotated[int, Field(ge=1)] = 5
    """Seconds after which an idle connection is closed."""
    access_log: bool = False
    """Log a line per HTTP request."""
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "warning"
    """Log level of the HTTP server."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile go together: give both for HTTPS, or none")
        return self


class ServerSettings(ListenerSettings):
    """How the HTTP server behaves. Options of the engine are `EngineConfig`'s."""

    served_model_name: tuple[str, ...] = ()
    """Name under which clients ask for the model. Default: the model as it was given. Can be repeated; answers carry
    the first."""
    api_key: tuple[str, ...] = ()
    """Key that clients must send as "Authorization: Bearer KEY". Default: none is asked for. Can be repeated."""
    tool_call_parser: str = "auto"
    """Format of the model's tool calls. auto: found from its chat template; none: they stay text."""
    reasoning_parser: str = "auto"
    """Format of the model's thinking. auto: found from its chat template; none: it stays text."""
    default_chat_template_kwargs: Annotated[dict[str, Any], Field(default={})]
    """JSON object of variables for the chat template, under those of a request."""
    trust_request_chat_template: bool = False
    """Let requests bring chat templates of their own. They run in a sandbox, but can loop."""
    return_tokens_as_token_ids: bool = False
    """Name tokens in logprobs "token_id:123" instead of by their text."""
    enable_request_id_headers: bool = False
    """Take a request's X-Request-Id, or make one, and send it back."""
    enable_reset_prefix_cache: bool = False
    """Offer POST /reset_prefix_cache, for benchmarks."""
    max_queue: Annotated[int, Field(ge=0)] = 1024
    """Answers that may wait while max_num_seqs run; requests beyond get 503 with Retry-After."""
    request_timeout: Seconds | None = None
    """Seconds after which a request is ended with 504. Default: none."""
    health_timeout: Seconds = 60.0
    """Seconds without a word from the engine after which /health says 503. Must be longer than its longest step, which
    a large model's prompts may make long on a CPU."""
    enable_log_requests: bool = False
    """Log what each request asks for (never its prompt)."""
    disable_log_stats: bool = False
    """No line of statistics."""
    stats_interval: Seconds = 10.0
    """Seconds between two lines of statistics; there are none while nothing runs."""

    @model_validator(mode="after")
    def _keys_say_something(self) -> Self:
        if "" in self.api_key:
            raise ValueError("api_key must not be empty: leave it out to ask for none")
        return self
