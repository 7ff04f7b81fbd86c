"""`kvstore acl` writes the rights of clients, nodes and operators, for Redis to take over.

It contacts nobody. Rules go to standard output and hold no password, only hashes;
passwords that were made here go to standard error, once.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from pathlib import Path

from kvstore.cli.options import KEY_PREFIX_DEFAULT, standard_input
from kvstore.errors import UsageError
from kvstore.index.redis.acl import AclRole, acl_rules, check_user, password_hash
from kvstore.index.redis.key_space import check_prefix

PASSWORD_BYTES = 32
PASSWORD_CHARS_MIN = 16
PASSWORD_FILE_BYTES_MAX = 4096


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--key-prefix",
        default=KEY_PREFIX_DEFAULT,
        metavar="PREFIX",
        help="of the tenant: its users reach no other keys (default: %(default)s)",
    )
    parser.add_argument(
        "--role",
        action="append",
        choices=[str(role) for role in AclRole],
        help="may be given several times (default: all)",
    )
    parser.add_argument(
        "--user",
        metavar="NAME",
        help="users are called NAME-client, NAME-node, ... (default: the prefix, with - for : / @)",
    )
    parser.add_argument(
        "--format",
        choices=("setuser", "file"),
        default="setuser",
        help="commands for redis-cli, or lines of an aclfile (default: %(default)s)",
    )
    parser.add_argument(
        "--scripts",
        action="store_true",
        help="nodes may run scripts in Redis, and remove records in a quarter of the time; only "
        "where all who share it trust them: a script can keep Redis busy without end",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="nodes may remove records of nodes that are gone for a day: the one case in which a "
        "node writes another's; SCAN shows them the names of all tenants' keys",
    )
    passwords = parser.add_mutually_exclusive_group()
    passwords.add_argument(
        "--passwords",
        metavar="FILE",
        help="lines `ROLE PASSWORD`; -: standard input (default: new ones are made and shown once)",
    )
    passwords.add_argument(
        "--keep-passwords", action="store_true", help="change the rights of users that exist"
    )


def run(args: argparse.Namespace) -> int:
    if args.keep_passwords and args.format == "file":
        raise UsageError("format", "file", "an aclfile holds the passwords too")
    name = args.user or re.sub("[:/@]", "-", check_prefix(args.key_prefix))
    roles = [role for role in AclRole if args.role is None or role in args.role]
    known = _read_passwords(args.passwords) if args.passwords else {}
    lines: list[str] = []
    made: list[str] = []
    for role in roles:
        user = check_user(f"{name}-{role}")
        hashed = None
        if not args.keep_passwords:
            password = known.get(role)
            if password is None:
                if args.passwords:
                    raise UsageError(
                        "passwords",
                        args.passwords,
                        f"has no password for {role}: add a line `{role} PASSWORD`",
                    )
                password = secrets.token_urlsafe(PASSWORD_BYTES)
                made.append(f"{user} {password}")
            hashed = password_hash(password)
        rules = acl_rules(role, args.key_prefix, hashed, scripts=args.scripts, sweep=args.sweep)
        lines.append(f"user {user} {rules}" if args.format == "file" else _setuser(user, rules))
    print("\n".join(lines))
    if made:
        print("kvstore: new passwords, shown this once (user, password):", file=sys.stderr)
        print("\n".join(made), file=sys.stderr)
    return 0


def _setuser(user: str, rules: str) -> str:
    """redis-cli reads words as a shell does, so that patterns go in quotes."""
    words = (f'"{word}"' if word[0] in "~#" else word for word in rules.split())
    return f"ACL SETUSER {user} {' '.join(words)}"


def _read_passwords(name: str) -> dict[AclRole, str]:
    try:
        if name == "-":
            text = standard_input("passwords").read(PASSWORD_FILE_BYTES_MAX + 1)
        else:
            with Path(name).open() as file:
                text = file.read(PASSWORD_FILE_BYTES_MAX + 1)
    except UsageError:
        raise
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or "not text"
        raise UsageError("passwords", name, f"cannot be read: {why}") from e
    if len(text) > PASSWORD_FILE_BYTES_MAX:
        raise UsageError(
            "passwords", name, f"the file may have at most {PASSWORD_FILE_BYTES_MAX} characters"
        )
    found: dict[AclRole, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2 or words[0] not in set(AclRole):
            # The line is not shown: it holds a password.
            raise UsageError("passwords", name, f"line {number} must be `ROLE PASSWORD`")
        if len(words[1]) < PASSWORD_CHARS_MIN:
            must = f"at least {PASSWORD_CHARS_MIN} characters, line {number} has fewer"
            raise UsageError("passwords", name, must)
        found[AclRole(words[0])] = words[1]
    return found
