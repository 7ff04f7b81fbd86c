"""Keeps what a node reports to others: index records, which blocks came and left, and why."""
