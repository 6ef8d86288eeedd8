"""The tree of errors a caller may meet. `assert` is for our own invariants and never reaches a caller.

    MotetError
    ├── InvalidRequest (ValueError)     the request can never work as written        400
    │   ├── ContextLengthExceeded       prompt + output do not fit the model         400
    │   ├── UnsupportedParameter        known word, not supported by this route      400
    │   └── DuplicateRequest            this request id is already running           409
    ├── ModelNotFound                   no such model here                           404
    ├── ModelLoadError (ValueError)     weights, config or tokenizer are unusable    503
    ├── Overloaded                      queue full; try again later                  429
    ├── Unavailable                     draining, loading or restarting              503
    ├── EngineDead                      the host process ended under the request     503
    └── InternalError                   our fault                                    500

The table from these classes to HTTP lives in streaming/protocol.py. Messages name what was expected and what came;
they never hold file contents, addresses or prompts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorInfo:
    """An error as it travels between processes and onto the wire. No msgspec here: models import this file anywhere."""

    kind: str  # the name of a class in this file
    message: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None


class MotetError(Exception):
    """Root of the tree. `code` is a stable word for programs, `param` names the offending field."""

    code = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        return ErrorInfo(
            kind=type(self).__name__,
            message=self.message,
            code=self.code,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


class InvalidRequest(MotetError, ValueError):
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class DuplicateRequest(InvalidRequest):
    code = "duplicate_request_id"


class ModelNotFound(MotetError):
    code = "model_not_found"


class ModelLoadError(MotetError, ValueError):
    code = "model_load_failed"


class Overloaded(MotetError):
    code = "server_overloaded"


class Unavailable(MotetError):
    code = "unavailable"


class EngineDead(MotetError):
    code = "engine_dead"


class InternalError(MotetError):
    code = "internal_error"


_KINDS: dict[str, type[MotetError]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequest,
        ContextLengthExceeded,
        UnsupportedParameter,
        DuplicateRequest,
        ModelNotFound,
        ModelLoadError,
        Overloaded,
        Unavailable,
        EngineDead,
        InternalError,
    )
}


def from_info(info: ErrorInfo) -> MotetError:
    """The exception an `ErrorInfo` stands for; an unknown kind becomes `InternalError`."""
    cls = _KINDS.get(info.kind, InternalError)
    return cls(info.message, param=info.param, code=info.code, retry_after_s=info.retry_after_s)


def to_info(error: BaseException) -> ErrorInfo:
    """What may be told about any exception: ours whole, a foreign one only by its class."""
    if isinstance(error, MotetError):
        return error.info()
    return ErrorInfo(kind="InternalError", message=f"internal error ({type(error).__name__})", code="internal_error")
