"""Every error that this server raises on purpose.

    AgentserveError
    ├── ClientError                 the request is wrong; 4xx in the client's dialect
    │   ├── InvalidRequest          400  malformed JSON, wrong types, values out of range
    │   ├── ContextTooLong          400  prompt beyond the model's context
    │   ├── Unauthorized            401
    │   ├── NotFound                404  unknown model, session or route
    │   ├── BodyTimeout             408  a body that does not arrive in time
    │   ├── BodyTooLarge            413
    │   ├── HeadTooLarge            431  request line and headers beyond what is read
    │   ├── UnsupportedMediaType    415  a body in a form that is not JSON, or a content coding that is not known
    │   └── Unsupported             400  a feature that the engine or the model does not have
    ├── Busy                        429  queue limits reached; carries Retry-After
    ├── TooManyConnections          503  more connections than files may be open; carries Retry-After
    ├── EngineError                 502  the engine misbehaved
    │   ├── EngineUnavailable       503  not reachable, died, or still starting
    │   │   └── ConnectionEnded     503  refused, reset or closed before anything had arrived
    │   └── EngineRefused           the engine said no; passed on with its message
    └── SetupError                  the process cannot start: a bad setting, folder, port, child process

A message says what to do. Ids and values from outside are shown as {value!r}.
"""

from __future__ import annotations


class AgentserveError(Exception):
    """Root of the tree. `status` is the HTTP status, `code` OpenAI's `error.code`, `param` the field at fault."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ClientError(AgentserveError):
    status = 400
    kind = "invalid_request_error"


class InvalidRequest(ClientError):
    pass


class ContextTooLong(ClientError):
    """The prompt leaves no room for an answer. Both figures in tokens."""

    code = "context_length_exceeded"

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your messages are {num_prompt_tokens} tokens. "
            "Shorten the messages.",
            param="messages",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class Unauthorized(ClientError):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class NotFound(ClientError):
    status = 404
    kind = "not_found_error"


class BodyTimeout(ClientError):
    """The client began a body and did not finish it in time."""

    status = 408
    kind = "timeout_error"


class BodyTooLarge(ClientError):
    status = 413
    code = "request_too_large"


class HeadTooLarge(ClientError):
    status = 431
    code = "request_header_fields_too_large"


class UnsupportedMediaType(ClientError):
    status = 415
    code = "unsupported_media_type"


class Unsupported(ClientError):
    code = "unsupported"


class Busy(AgentserveError):
    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class TooManyConnections(AgentserveError):
    status = 503

    def __init__(self, max_connections: int) -> None:
        super().__init__(
            f"This server has its {max_connections} connections, half of the files that it may open: try again soon, or raise `ulimit -n`."
        )


class EngineError(AgentserveError):
    status = 502
    kind = "engine_error"


class EngineUnavailable(EngineError):
    status = 503


class ConnectionEnded(EngineUnavailable):
    pass


class EngineRefused(EngineError):
    """The engine answered 4xx or 5xx to a request that this server accepted. Its 4xx and 503 are passed on, another 5xx is a 502.

    `retry_after_seconds`: how long it asks to wait, where it does.
    """

    def __init__(self, message: str, *, status: int, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status if status < 500 or status == 503 else EngineError.status
        self.kind = Busy.kind if status == Busy.status else "invalid_request_error" if status < 500 else EngineError.kind
        self.retry_after_seconds: float | None = None


class SetupError(AgentserveError):
    """Start-up failed; the command line prints the message and exits with 2."""
