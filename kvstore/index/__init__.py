"""Maps keys to records: the index says where blocks are and holds none of them."""
