"""Decides per engine step what is loaded and saved, looks it up, explains why requests missed."""
