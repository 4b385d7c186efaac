"""What a client is told when its request cannot be answered."""

from __future__ import annotations


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: the HTTP status code.
        text: the message for the client.
        retry_after_s: seconds after which to try again, if that may help.
    """

    def __init__(self, status: int, text: str, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.retry_after_s = status, text, retry_after_s


def invalid(text: str) -> RequestError:
    """Return the error for a request with a mistake."""
    return RequestError(400, f"Invalid request: {text}")
