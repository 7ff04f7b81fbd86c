"""Which files this process has open."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path


def open_files() -> Counter[str]:
    """Return each open file's path, and by how many descriptors."""
    found = Counter[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            path = str(descriptor.readlink())
            if path.startswith("/") and not path.startswith(("/proc/", "/dev/null")):
                found[path] += 1
    return found
