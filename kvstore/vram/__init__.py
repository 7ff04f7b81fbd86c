"""Runs nodes in VRAM inside the process that saves to them, and moves their blocks down."""
