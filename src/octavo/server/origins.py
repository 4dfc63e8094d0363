"""Rejection of requests from other sites' web pages, for a server without an API key.

A browser lets any web page send requests to its machine. Two headers, which a page cannot set, identify them:

| header   | content                                | refused                                                          |
|----------|----------------------------------------|------------------------------------------------------------------|
| `Origin` | site of the page; programs send none   | an origin other than `Host`: another site's page                 |
| `Host`   | host name in the requested URL         | a name that is not loopback: a foreign name that resolves to     |
|          |                                        | 127.0.0.1, so that its page has the server's origin (DNS         |
|          |                                        | rebinding)                                                       |

A server that other machines can reach has names unknown to it, so its `Host` is not checked.
Sources: RFC 6454, section 7; Fetch, "Origin header"; RFC 9110, section 7.2.
"""

import ipaddress
import re

from starlette.datastructures import Headers

from octavo.server.error_responses import CLOSE, ResponseError

__all__ = ["check_origin", "is_loopback"]

NAME = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?")  # a Host header; the port is ignored


def is_loopback(host: str) -> bool:
    """Return True for "localhost" and loopback addresses; other names are not resolved.

    Example:
        >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "example.org")]
        [True, True, True, False, False]
    """
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_origin(headers: Headers, *, host: str) -> None:
    """Refuse a request from another site's web page.

    Args:
        headers: headers of the request.
        host: address the server listens at.

    Raises:
        ResponseError: 403.
    """
    requested, origin = headers.get("host", ""), headers.get("origin")
    if is_loopback(host) and not is_loopback(_name_of(requested)):
        raise _forbidden(f"it accepts only the hosts localhost, 127.0.0.1 and [::1], not {ascii(requested)[:80]}")
    # Either scheme is the server's own origin: a proxy may add TLS.
    if origin is not None and origin.lower() not in {f"{scheme}://{requested.lower()}" for scheme in ("http", "https")}:
        raise _forbidden(f"it accepts no requests from other sites' web pages, such as {ascii(origin)[:80]}")


def _name_of(host: str) -> str:
    match = NAME.fullmatch(host)
    return "" if match is None else match[1] or match[2] or ""


def _forbidden(reason: str) -> ResponseError:
    message = f"this server has no key, so {reason}; start it with --api-key-file to allow this"
    return ResponseError(403, message, headers=CLOSE)
