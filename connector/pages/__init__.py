"""Keeps pages that an engine names and lays out itself: SGLang's and LMCache's."""
