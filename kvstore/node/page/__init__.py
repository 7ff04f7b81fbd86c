"""Follows the cluster by what nodes announce, and shows it to browsers on a node's HTTP port."""
