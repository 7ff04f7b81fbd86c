"""Judges a KV connector by what real engines answer with it: `scripts/conformance`."""
