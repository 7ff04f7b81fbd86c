"""Kills real processes and a real Redis at random times: `scripts/crash-loop`."""
