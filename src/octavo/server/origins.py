"""``check_origin``: no web page but the server's own may use a server that asks for no key.

A browser lets the pages of everybody ask the machine that it runs on. Two headers tell, which no page can choose:

| header   | says                                   | refused                                                          |
|----------|----------------------------------------|------------------------------------------------------------------|
| `Origin` | whose page asks; programs send none    | another than the `Host` it asks: a page of somebody else         |
| `Host`   | the name by which the server was found | no loopback name: somebody's own, pointed at 127.0.0.1 so that   |
|          |                                        | their page counts as the server's (DNS rebinding)                |

A server that other machines may ask has names that it does not know, so there `Host` is not looked at.
Sources: RFC 6454, section 7; Fetch, "Origin header"; RFC 9110, section 7.2.
"""

import ipaddress
import re

from starlette.datastructures import Headers

from octavo.server.refusals import CLOSE, Refusal

__all__ = ["check_origin", "is_loopback"]

NAME = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?")  # of a Host header, whose port does not count


def is_loopback(host: str) -> bool:
    """Whether this machine alone is meant; of a name other than "localhost" nobody knows.

    Example:
        >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "example.org")]
        [True, True, True, False, False]
    """
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_origin(headers: Headers, *, host: str) -> None:
    """Refuse another's page.

    Args:
        headers: of a request.
        host: where the server listens.

    Raises:
        Refusal: with 403.
    """
    named, origin = headers.get("host", ""), headers.get("origin")
    if is_loopback(host) and not is_loopback(_name_of(named)):
        raise _refusal(f"it is asked as localhost, 127.0.0.1 or [::1] alone, not as {ascii(named)[:80]}")
    # A proxy may speak TLS for the server, so either scheme is its own.
    if origin is not None and origin.lower() not in {f"{scheme}://{named.lower()}" for scheme in ("http", "https")}:
        raise _refusal(f"no web page but its own may ask it, and this one is of {ascii(origin)[:80]}")


def _name_of(named: str) -> str:
    found = NAME.fullmatch(named)
    return "" if found is None else found[1] or found[2] or ""


def _refusal(reason: str) -> Refusal:
    message = f"this server has no key, so {reason}; start it with --api-key-file to ask otherwise"
    return Refusal(403, message, headers=CLOSE)
