"""Origin checks for requests without a key: of all web pages, only the gateway's own may send such requests.

A request without a key is admitted if its client runs as the gateway's account or as root. A browser of such an account
also sends requests for other web pages: through a name that the page's owner points at this machine, through a form or
script of another origin, or through a link. Another user of the machine can serve such a page on a port of the machine.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.requests import Request

from lips.gateway.errors import ApiError

_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::([0-9]{1,5}))?")
"""Authority of RFC 3986, without userinfo. Names consist only of letters, digits, dots and hyphens."""
_PROXIES = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


def check_is_own(request: Request) -> None:
    """Check the origin of a request. ApiError 403: a page of another origin or a client behind a proxy sent it."""
    for proxy in _PROXIES:
        if proxy in request.headers:
            raise _refused(f"no clients behind a proxy ({proxy})")
    hosts = request.headers.getlist("host")
    if len(hosts) != 1 or (host := authority(hosts[0])) is None or not is_local(host[0]):
        raise _refused(f"to its machine's own names, not to {', '.join(hosts)[:60]!r}")
    site = request.headers.get("sec-fetch-site", "none")
    if site not in {"none", "same-origin"}:
        raise _refused(f"no pages of another origin (Sec-Fetch-Site: {site[:20]})")
    for origin in request.headers.getlist("origin"):
        scheme, _, rest = origin.partition("://")
        if scheme not in {"http", "https"} or authority(rest) != host:
            raise _refused(f"no pages of {origin[:60]}")


def _refused(what: str) -> ApiError:
    return ApiError(403, f"without a key this server answers {what}")


def authority(text: str) -> tuple[str, int | None] | None:
    """Return the host in lower case and the port of an authority; None: the text is not an authority."""
    match = _AUTHORITY.fullmatch(text)
    if match is None or (match[3] and int(match[3]) >= 1 << 16):
        return None
    return (match[1] or match[2]).lower(), int(match[3]) if match[3] else None


def is_local(name: str) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
