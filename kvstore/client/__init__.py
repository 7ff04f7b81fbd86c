"""The callers' side: `Client` for people, `BlockSession` for connectors."""
