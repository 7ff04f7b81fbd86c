"""Real processes and a real Redis, killed at random times: `scripts/crash-loop`."""
