# SPDX-License-Identifier: Apache-2.0
"""The header that tells a refused client when to come back."""

from http import HTTPStatus

#: Seconds.  A seat becomes free whenever any request ends, which nobody can foretell; clients that were told a second
#: and are refused again are to back off by themselves.
SECONDS = 1


def retry_after(status: int) -> dict[str, str] | None:
    """Headers of an error response with this status."""
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        return {"Retry-After": str(SECONDS)}
    return None
