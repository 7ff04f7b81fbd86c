"""Defines what each kind of user may do in Redis.

`tests/index/redis/test_redis_acl.py` records what clients, nodes and the command line
really send and compares it with this, both ways. Redis 6 has no read-only key
patterns, so that a client cannot write follows from its commands alone.
"""

from __future__ import annotations

import enum
import re
from hashlib import sha256

from kvstore.errors import UsageError
from kvstore.index.redis.key_space import check_prefix

USER_CHARS_MAX = 64
_USER = re.compile(rf"[A-Za-z0-9_.:-]{{1,{USER_CHARS_MAX}}}")
_HASH = re.compile(r"[0-9a-f]{64}")


class AclRole(enum.StrEnum):
    """The kind of user that connects to Redis."""

    CLIENT = "client"
    """Engines and programs, which look blocks and nodes up. It only reads."""
    NODE = "node"
    """Memory nodes, which publish and remove the records of their own blocks."""
    OPERATOR = "operator"
    """People with `kvstore stat`, `doctor`, ..., who read and see which nodes there are."""


_EVERYONE = ("ping", "select", "cluster|slots", "asking")
"""Commands of every role: `select` for a db other than 0, the last two for a Redis Cluster."""
COMMANDS: dict[AclRole, tuple[str, ...]] = {
    AclRole.CLIENT: (*_EVERYONE, "mget", "smembers"),
    AclRole.NODE: (
        *_EVERYONE,
        *("mget", "get", "set", "mset", "del", "watch", "unwatch", "multi", "exec", "info"),
        *("sadd", "srem", "smembers", "pexpire"),
    ),
    AclRole.OPERATOR: (*_EVERYONE, "mget", "smembers", "info"),
}

TRANSACTIONS = ("watch", "unwatch", "multi", "exec")
"""Commands with which a node removes records."""
SCRIPTS = ("evalsha", "script|load")
"""Commands in place of `TRANSACTIONS`, for nodes that may be trusted with all who share the Redis:
a script can keep it busy without end. With them a record is removed in a quarter of the time, on a
Redis Cluster in less."""
SWEEPS = ("scan",)
"""Commands for nodes that remove what dead nodes left (node/publishing/dead_records.py). They show
the names of all keys, other tenants' too."""

_NODE_ID = "[0-9a-f]" * 16
_BLOCKS, _NODES = ("{*",), ("nodes", f"node:{_NODE_ID}")
_EPOCHS = ("epoch", "epoch:[0-9]*")
"""Key patterns under the prefix. Never `PREFIX:*`: that would include each tenant whose prefix
begins with this one."""
KEYS: dict[AclRole, tuple[str, ...]] = {
    AclRole.CLIENT: (*_BLOCKS, *_NODES),
    AclRole.NODE: (*_BLOCKS, *_NODES, *_EPOCHS),
    AclRole.OPERATOR: (*_BLOCKS, *_NODES, *_EPOCHS),
}


def password_hash(password: str) -> str:
    """Return the hash that Redis keeps: SHA-256 in hex. Passwords are long and random, so it needs
    no salt."""
    return sha256(password.encode()).hexdigest()


def acl_rules(
    role: AclRole,
    key_prefix: str,
    hashed: str | None,
    *,
    scripts: bool = False,
    sweep: bool = False,
) -> str:
    """Return the words after `ACL SETUSER name`, or after `user name` in an ACL file. With
    `scripts` a node has the right to `SCRIPTS` in place of `TRANSACTIONS`, with `sweep` to `SWEEPS`
    too.

    Everything the user had is taken away first, except, with `hashed` None, its passwords. Raises
    `UsageError` for a prefix or a hash that is none.
    """
    check_prefix(key_prefix)
    if hashed is not None and not _HASH.fullmatch(hashed):
        raise UsageError("password hash", hashed, "must be 64 lower-case hex digits (SHA-256)")
    words = ["on", "resetkeys", "resetchannels", "-@all"]
    if hashed is not None:
        words += ["resetpass", f"#{hashed}"]
    words += [f"~{key_prefix}:{pattern}" for pattern in KEYS[role]]
    names = COMMANDS[role]
    if scripts and role is AclRole.NODE:
        names = (*(name for name in names if name not in TRANSACTIONS), *SCRIPTS)
    names = (*names, *SWEEPS) if sweep and role is AclRole.NODE else names
    words += [f"+{name}" for name in names]
    return " ".join(words)


def check_user(name: str) -> str:
    """Return `name` if it can be a user's; else raise `UsageError`."""
    if not _USER.fullmatch(name) or name == "default":
        raise UsageError(
            "user", name, f"1 to {USER_CHARS_MAX} of A-Z a-z 0-9 _ . : -, and not 'default'"
        )
    return name
