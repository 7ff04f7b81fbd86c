"""Loads what is written in C, where a compiler was there to build it; all of it has the same in
Python beside it."""
