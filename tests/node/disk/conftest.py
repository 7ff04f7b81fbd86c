"""File systems of a test's own."""

from mounts import mounts as mounts
