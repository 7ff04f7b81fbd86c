"""The lookup buffer's index: key -> record. It says where blocks are and holds none."""
