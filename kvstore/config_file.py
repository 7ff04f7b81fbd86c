"""The operator's file: one TOML document, found by `KVSTORE_CONFIG`, a table for each reader.

`[limits]` and `[security]` hold for every process of the store that is started with the variable,
`[node]` for `kvstore node`, `[connector]` and `[transfer]` for engines. What a program, a command
line or a variable of one setting says wins over it. docs/settings.md lists every name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvstore.limits import Limits
from kvstore.settings.reader import check_settings, read_settings
from kvstore.settings.toml_file import read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityFiles:
    """Files of secrets and certificates. Secrets themselves have no place in this document."""

    secret_file: Path | None = None
    """File of the secret that both ends of a stream know, one line or two; KVSTORE_SECRET and
    KVSTORE_SECRET_FILE win over it."""
    signing_key_file: Path | None = None
    """File of the key that signs index records; KVSTORE_SIGNING_KEY and KVSTORE_SIGNING_KEY_FILE
    win over it."""
    salt_file: Path | None = None
    """File of the salt that goes into every key; KVSTORE_SALT and KVSTORE_SALT_FILE win over it."""
    disk_keys_file: Path | None = None
    """File of the keys that disks are encrypted with, one a line (docs/disk.md);
    KVSTORE_DISK_KEYS_FILE wins over it."""
    tls_ca: Path | None = None
    """File of the authorities that may have signed the other side's certificate; KVSTORE_TLS_CA
    wins over it."""
    tls_cert: Path | None = None
    """This side's certificate, PEM; KVSTORE_TLS_CERT wins over it."""
    tls_key: Path | None = None
    """The certificate's key, PEM; KVSTORE_TLS_KEY wins over it."""

    def __post_init__(self) -> None:
        check_settings(self, inside="security.")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The tables of one file, empty where there is none."""

    path: Path | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def table(self, name: str) -> Mapping[str, Any]:
        """Return names and values of one table, as they stand in the file."""
        return self.tables.get(name, {})

    def where(self, name: str) -> str:
        """Return how messages call the table `name`."""
        return f"{self.path} [{name}]"

    def limits(self, over: Mapping[str, object] | None = None) -> Limits:
        """Return the node's limits: what `over` says, else `[limits]`, else the defaults.

        Raises `UsageError` for a name or a value that cannot be.
        """
        limits = read_settings(Limits, self.table("limits"), where=self.where("limits"))
        return read_settings(Limits, over or {}, where="limits", besides=asdict(limits))

    def security(self) -> SecurityFiles:
        """Return the table `[security]`. Raises `UsageError` for a name or a value that cannot
        be."""
        return read_settings(SecurityFiles, self.table("security"), where=self.where("security"))


def read_config(path: str | Path | None = None) -> ConfigFile:
    """Return the file at `path`, else the one that KVSTORE_CONFIG names, else an empty one.

    Raises `UsageError` when it cannot be read, is no TOML, or has a table that nobody reads.
    """
    return ConfigFile(*read_toml(path))
