"""A Redis of our own, for a machine where nobody gave a URL."""
