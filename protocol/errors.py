"""Errors that cross service boundaries.

Each carries what a caller needs to mend the input: a stable ``type``, the message, the offending
parameter and the HTTP status a service answers with. Services turn them into
``{"error": {"type", "message", "param"}}``; the stream writes them into its dead letters.
"""

from __future__ import annotations


class ErnieMultiError(Exception):
    """Base of all errors that a user or a peer can cause."""

    type = "internal_error"
    status = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def as_json(self) -> dict[str, dict[str, str | None]]:
        """The body of an error response, ``{"error": {"type", "message", "param"}}``."""
        return {"error": {"type": self.type, "message": self.message, "param": self.param}}


class InvalidInputError(ErnieMultiError, ValueError):
    """A request or sample that can never succeed as it is (HTTP 400)."""

    type = "invalid_input"
    status = 400


class InvalidMediaError(InvalidInputError):
    """A picture, sound or text that can't be decoded or holds impossible values (HTTP 422)."""

    type = "invalid_media"
    status = 422


class MediaTooLargeError(InvalidInputError):
    """A medium or message above a stated limit (HTTP 413)."""

    type = "media_too_large"
    status = 413


class UnsupportedMediaError(InvalidInputError):
    """A content type or modality that no tokenizer here takes (HTTP 415)."""

    type = "unsupported_media"
    status = 415


class WireError(InvalidInputError):
    """A wire message that is truncated, damaged, oversized or of another version (HTTP 400)."""

    type = "invalid_wire_message"


class TokenizerMismatchError(InvalidInputError):
    """Tokens of one tokenizer handed to another, or to a model trained with another (HTTP 409)."""

    type = "tokenizer_mismatch"
    status = 409


class AuthenticationError(ErnieMultiError):
    """A missing or wrong key (HTTP 401)."""

    type = "authentication_error"
    status = 401


class UnavailableError(ErnieMultiError):
    """A dependency that is down or overloaded; trying again later may succeed (HTTP 503)."""

    type = "unavailable"
    status = 503
