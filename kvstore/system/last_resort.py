"""Names kvstore in what is logged where a program has configured no logging.

Python shows warnings then by its handler of last resort, which prints the message alone: in the
output of an engine nobody could tell whose line that is.
"""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Of the commands as well."""


class LastResort(logging.Handler):
    """Prints warnings of the store to standard error, unless anybody else handles them."""

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        try:
            print(self.format(record), file=sys.stderr)
        except (OSError, ValueError):  # closed, or full
            self.handleError(record)


def name_our_lines() -> None:
    """Have the loggers below `kvstore` say their name where nobody has configured logging."""
    logger = logging.getLogger("kvstore")
    if not any(isinstance(handler, LastResort) for handler in logger.handlers):
        shown = LastResort(logging.WARNING)
        shown.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(shown)
