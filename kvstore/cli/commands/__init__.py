"""Holds one file per subcommand of `kvstore`, with its name: what it shares lies a folder above."""
