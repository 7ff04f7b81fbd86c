from __future__ import annotations

import re

import pytest
from each_input import each
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.errors import UsageError
from kvstore.index.redis.index import open_index
from kvstore.index.redis.url import parse_url, redacted


@each(
    "rest",
    [
        "://u:p@h:1/2",
        "s://h?ssl_check_hostname=no",
        "+sentinel://a,b:2/main/5",
        "s+sentinel://a/main",
        "+cluster://a:1,b",
        "s+cluster://a",
    ],
)
def test_a_url_may_say_valkey(rest: str) -> None:
    assert parse_url(f"valkey{rest}") == parse_url(f"redis{rest}")


@each(
    ("url", "expected"),
    [
        ("redis://", {"kind": "single", "hosts": (("localhost", 6379),), "db": 0}),
        ("redis://h:1/3", {"hosts": (("h", 1),), "db": 3}),
        ("redis://h?db=4", {"db": 4}),
        ("redis://u:p%40%2F@h", {"username": "u", "password": "p@/"}),
        ("redis://:p@h", {"username": "", "password": "p"}),
        ("redis://h?username=u&password=p", {"username": "u", "password": "p"}),
        ("redis://[::1]:7", {"hosts": (("::1", 7),)}),
        ("rediss://h", {"tls": True, "tls_options": {"ssl_check_hostname": True}}),
        ("rediss://h?ssl_check_hostname=no", {"tls_options": {"ssl_check_hostname": False}}),
        ("unix:///run/r.sock?db=2", {"kind": "single", "path": "/run/r.sock", "db": 2}),
        ("unix://u:p@/run/r%20.sock", {"username": "u", "path": "/run/r .sock", "hosts": ()}),
        (
            "redis+sentinel://a,b:2/main/5?sentinel_password=sp",
            {
                "kind": "sentinel",
                "hosts": (("a", 26379), ("b", 2)),
                "service": "main",
                "db": 5,
                "sentinel_password": "sp",
            },
        ),
        ("rediss+sentinel://a/main", {"kind": "sentinel", "tls": True}),
        ("redis+cluster://a:1,b:2", {"kind": "cluster", "hosts": (("a", 1), ("b", 2))}),
    ],
)
def test_each_form_says_where_redis_is(url: str, expected: dict[str, object]) -> None:
    target = parse_url(url)
    assert {name: getattr(target, name) for name in expected} == expected


@each(
    ("url", "why"),
    [
        ("", "must be a URL"),
        ("localhost:6379", "scheme"),
        ("http://h", "scheme"),
        ("redis://h:0", "port"),
        ("redis://h:70000", "port"),
        ("redis://h:x", "port"),
        ("redis://a,b", "at most 1"),
        ("redis://h/x", "db"),
        ("redis://h/1/2", "path"),
        ("redis://h?db=-1", "db"),
        ("redis://h?socket_timeout=9", "unknown option 'socket_timeout'"),
        ("redis://h?ssl_ca_certs=/x", "needs a rediss:// scheme"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs"),
        ("unix://host/x", "unix:///absolute/path"),
        ("unix://", "unix:///absolute/path"),
        ("redis+sentinel://h", "service"),
        ("redis+cluster://h/1", "no db but 0"),
        ("redis://[::1", "cannot be read"),
    ],
)
def test_a_wrong_url_is_refused_with_the_field_and_the_reason(url: str, why: str) -> None:
    with pytest.raises(UsageError, match="url=") as raised:
        parse_url(url)
    assert why in str(raised.value)


@each(
    "url",
    [
        "http://user:hunter2@h",
        "redis://user:hunter2@h:x",
        "redis://user:hun?ter2@h",
        "redis://user:hunter2@h?db=x",
        "redis://h/x?password=hunter2",
        "redis://h/x?password=hunter2@",
        "user:hunter2@h",
        "redis://u:hunter2@[::1",
        "redis://u:hunter2@h\N{FULLWIDTH SOLIDUS}x",
    ],
)
def test_no_error_shows_the_password(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_url(url)
    assert "hunter2" not in str(raised.value)
    assert "ter2" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("localhost:6379", "redis://localhost:6379"),
        ("cache.example.org", "redis://cache.example.org"),
        ("reddis://h:1", "redis://h:1"),
        ("redis+clutser://h:1", "redis+cluster://h:1"),
    ],
)
def test_what_was_mistyped_is_named_with_what_was_meant(url: str, meant: str) -> None:
    with pytest.raises(
        UsageError, match=f"^url='{re.escape(url)}'.*did you mean {re.escape(meant)}"
    ):
        parse_url(url)


@given(st.text(alphabet="aZ0/?#@:%&=[],", max_size=30))
@example("@/?@")
def test_whatever_is_in_a_password_is_not_shown(rest: str) -> None:
    assert "hunter2" not in redacted(f"redis://user:hunter2{rest}@host/1")


def test_the_repr_of_a_target_shows_no_password() -> None:
    shown = repr(parse_url("redis+sentinel://u:hunter2@h/main?sentinel_password=hunter3"))
    assert "hunter" not in shown


@each("prefix", ["", "a{b}", "a b", "a*", "k" * 129, "a\r\nb", None])
def test_a_key_prefix_that_would_not_keep_keys_apart_is_refused(prefix: object) -> None:
    with pytest.raises(UsageError, match="key_prefix="):
        open_index("redis://h", key_prefix=prefix)


@pytest.mark.parametrize("field", ["timeout_s", "publish_timeout_s", "lookup_links_max"])
def test_settings_out_of_range_are_refused_by_name(field: str) -> None:
    for value in (0, -1, 1e9, float("nan")):
        with pytest.raises(UsageError, match=f"^{field}="):
            open_index("redis://h", **{field: value})
