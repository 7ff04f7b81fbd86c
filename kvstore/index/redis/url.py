"""Parses the URL of a Redis.

    redis://[user:password@]host[:port][/db]         plain TCP
    rediss://...?ssl_ca_certs=/path/ca.pem           TLS; ssl_* options as in redis-py
    unix://[user:password@]/path/redis.sock[?db=1]   Unix socket
    redis+sentinel://host:port,host:port/service[/db]    the master that Sentinel names
    redis+cluster://host:port,host:port              Redis Cluster, from any of these nodes

`rediss+sentinel` and `rediss+cluster` are the same over TLS, and `valkey` may stand for `redis` in
all of them. A cluster is named by its scheme only: nothing is guessed from what the server says.
Sentinels that have a password of their own take it from
`?sentinel_username=...&sentinel_password=...`.
User name and password are percent-encoded where they hold any of `:/?#[]@%`. A password that
changes is in a file, `?password_file=/path` (`sentinel_password_file`), or given by a function
(`RedisUrl`): both are asked at each new connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvstore.errors import UsageError
from kvstore.index.redis.password import AskedPassword, Password, password_in

PORT_DEFAULT = 6379
SENTINEL_PORT_DEFAULT = 26379
HOSTS_MAX = 64
DB_MAX = 16383

_SCHEMES: dict[str, tuple[Literal["single", "sentinel", "cluster"], bool]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("single", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_SCHEMES |= {re.sub("^redis", "valkey", name): meaning for name, meaning in list(_SCHEMES.items())}
_TLS_TEXT = {
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_cert_reqs",
}
_OPTIONS = _TLS_TEXT | {
    "ssl_check_hostname",
    "db",
    "username",
    "password",
    "sentinel_username",
    "sentinel_password",
    "password_file",
    "sentinel_password_file",
}
_BARE = re.compile(r"[A-Za-z0-9_.-]+(:\d{1,5})?(/\d{1,3})?")
"""A host named without a scheme: nothing in it can be a password."""
_FALSE = {"0", "f", "false", "n", "no"}

Host = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parsed URL. Its repr shows no password."""

    kind: Literal["single", "sentinel", "cluster"]
    hosts: tuple[Host, ...] = ()
    """The server, the sentinels or the nodes to start from; empty for a Unix socket."""
    path: str = ""
    service: str = ""
    db: int = 0
    username: str = ""
    password: Password = field(default="", repr=False)
    sentinel_username: str = ""
    sentinel_password: Password = field(default="", repr=False)
    tls: bool = False
    tls_options: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def label(self) -> str:
        """Return the name of the target in messages: without user name and password."""
        if self.path:
            return f"unix:{self.path}"
        shown = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{shown}/{self.service}" if self.service else shown


class RedisUrl(str):
    """A URL whose password is what a function returns, for tokens that live for minutes. It is
    called in a thread of its own when a connection is opened, at most once in 5 s."""

    asked: AskedPassword

    def __new__(cls, url: str, password: Callable[[], str]) -> RedisUrl:
        made = super().__new__(cls, url)
        made.asked = AskedPassword(password)
        return made


def redacted(url: str) -> str:
    """Return the scheme and hosts of `url`; less where it is unclear what is a password."""
    scheme, mark, rest = url.partition("://")
    if not mark and _BARE.fullmatch(url):
        return url
    if not mark or not scheme.replace("+", "").isalnum():
        return "(no scheme)"
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in rest and (rest.count("@") > 1 or "@" not in authority):
        return f"{scheme}://..."
    return f"{scheme}://{authority.rpartition('@')[2]}"


def parse_url(url: str) -> Target:
    """Return the target that `url` names; `UsageError` names the field that is wrong."""
    if not isinstance(url, str) or not url:
        raise UsageError("url", type(url).__name__, "must be a URL such as redis://host:6379/0")
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
    except ValueError:  # its text may quote the password
        raise _wrong(url, "cannot be read as a URL") from None
    if parts.scheme not in _SCHEMES:
        raise _wrong(url, f"its scheme must be one of {', '.join(_SCHEMES)}{_meant(url)}")
    for name in options:
        if name not in _OPTIONS:
            # With an @ behind the ?, this may be the rest of a password that is not encoded.
            shown = "" if "@" in parts.query else f" {name!r}"
            known = ", ".join(sorted(_OPTIONS))
            raise _wrong(url, f"unknown option{shown}; known are {known}")
    return _target(url, parts, options)


def _meant(url: str) -> str:
    """Return what may have been mistyped in `url`; empty where nothing is near."""
    import difflib  # 5 ms, which only a wrong URL costs

    if _BARE.fullmatch(url):
        return f"; did you mean redis://{url}?"
    scheme, _, rest = redacted(url).partition("://")
    near = difflib.get_close_matches(scheme, _SCHEMES, 1)
    return f"; did you mean {near[0]}://{rest}?" if near else ""


def _target(url: str, parts: SplitResult, options: dict[str, str]) -> Target:
    kind, tls = _SCHEMES[parts.scheme]
    user_info, _, hosts_text = parts.netloc.rpartition("@")
    username, _, password = user_info.partition(":")
    path = [unquote(step) for step in parts.path.split("/") if step]
    service = ""
    if parts.scheme == "unix":
        if hosts_text or not path:
            raise _wrong(url, "must be unix:///absolute/path")
        hosts: tuple[Host, ...] = ()
        db_text = options.get("db", "0")
    else:
        port = SENTINEL_PORT_DEFAULT if kind == "sentinel" else PORT_DEFAULT
        hosts = _hosts(url, hosts_text, port, many=kind != "single")
        if kind == "sentinel":
            if not path:
                raise _wrong(url, "must end in /service, the master's name in Sentinel")
            service = path.pop(0)
        if len(path) > 1:
            raise _wrong(url, "has too many path steps")
        db_text = path[0] if path else options.get("db", "0")
    if not (db_text.isdecimal() and int(db_text) <= DB_MAX):
        raise _wrong(url, f"its db must be a number from 0 to {DB_MAX}")
    if kind == "cluster" and int(db_text) != 0:
        raise _wrong(url, "a Redis Cluster has no db but 0")
    return Target(
        kind=kind,
        hosts=hosts,
        path=unquote(parts.path) if parts.scheme == "unix" else "",
        service=service,
        db=int(db_text),
        username=options.get("username") or unquote(username),
        password=_password(url, options, "password") or unquote(password),
        sentinel_username=options.get("sentinel_username", ""),
        sentinel_password=_password(url, options, "sentinel_password"),
        tls=tls,
        tls_options=_tls_options(url, options, tls=tls),
    )


def _password(url: str, options: Mapping[str, str], name: str) -> Password:
    if isinstance(url, RedisUrl) and name == "password":
        return url.asked
    file = options.get(f"{name}_file")
    return password_in(file) if file else options.get(name, "")


def _hosts(url: str, text: str, port_default: int, *, many: bool) -> tuple[Host, ...]:
    found: list[Host] = []
    for item in text.split(","):
        host, port = item, str(port_default)
        if item.startswith("["):
            host, _, rest = item[1:].partition("]")
            port = rest.removeprefix(":") or port
        elif ":" in item:
            host, _, port = item.rpartition(":")
        if not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise _wrong(url, "its port must be from 1 to 65535")
        found.append((unquote(host) or "localhost", int(port)))
    if len(found) > (HOSTS_MAX if many else 1):
        raise _wrong(url, f"at most {HOSTS_MAX if many else 1} host:port")
    return tuple(found)


def _tls_options(url: str, options: dict[str, str], *, tls: bool) -> dict[str, object]:
    given: dict[str, object] = {k: v for k, v in options.items() if k.startswith("ssl_")}
    if not tls:
        if given:
            raise _wrong(url, f"{next(iter(given))} needs a rediss:// scheme")
        return {}
    checks = str(given.get("ssl_check_hostname", "true")).lower()
    given["ssl_check_hostname"] = checks not in _FALSE
    if str(given.get("ssl_cert_reqs", "required")) not in ("none", "optional", "required"):
        raise _wrong(url, "ssl_cert_reqs must be none, optional or required")
    for name in ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"):
        if name in given and not Path(str(given[name])).exists():
            raise UsageError(name, given[name], "no such file")
    return given


def _wrong(url: str, must: str) -> UsageError:
    return UsageError("url", redacted(url), must)
