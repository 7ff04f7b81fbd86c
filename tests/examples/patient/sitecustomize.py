"""On PYTHONPATH of the examples: nothing is late because the machine of the tests is busy."""

from kvstore import Limits

_defaults = Limits.__init__.__kwdefaults__ or {}
for _name in ("redis_timeout_s", "request_timeout_s", "stream_timeout_s"):
    _defaults[_name] = 10.0
