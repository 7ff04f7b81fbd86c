"""Plans what is saved: what is full and not yet saved, what may not be, what is retained."""
