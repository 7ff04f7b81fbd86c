"""Looks up, reads and saves on a machine that is overloaded: `scripts/starved`."""
