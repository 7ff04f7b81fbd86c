"""Replays prompts through vLLM's scheduler and our connector's, with a node's core as the store."""
