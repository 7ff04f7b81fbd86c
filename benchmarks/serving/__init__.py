"""Replays agents' sessions against real engines that share a store: suite `serve`."""
