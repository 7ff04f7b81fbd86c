"""The node's end of streams: who may connect, a thread for each who did, and what it does."""
