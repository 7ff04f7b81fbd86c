"""Replays recorded prompts through the core that a node runs."""
