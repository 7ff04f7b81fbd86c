"""Defines how log lines look, also where a program has configured no logging.

Python shows warnings then by its handler of last resort, which prints the message alone: in the
output of an engine nobody could tell whose line that is.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""The format of log lines, of commands as well."""


class JsonLines(logging.Formatter):
    """Writes each record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def start_log(level: int, *, as_json: bool) -> None:
    """Log to standard error, where nobody has configured logging."""

    def ours(record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] != "kvstore":  # asyncio's, say
            record.name = f"kvstore.{record.name}"
        return True

    shown = logging.StreamHandler()
    shown.setFormatter(JsonLines() if as_json else logging.Formatter(FORMAT))
    shown.addFilter(ours)
    logging.basicConfig(level=level, handlers=[shown])


def as_logged(logger: str, line: str) -> str:
    """Return a line that a command itself says between those of the log, in the log's format."""
    formats = (handler.formatter for handler in logging.getLogger().handlers)
    if not any(isinstance(one, JsonLines) for one in formats):
        return line
    return JsonLines().format(logging.LogRecord(logger, logging.INFO, "", 0, line, (), None))


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
