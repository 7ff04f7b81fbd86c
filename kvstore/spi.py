"""What authors of engines, connectors and routers use besides the names of `kvstore`.

`BlockSession` saves and loads blocks, `Locator` and `Residency` tell a router where blocks are,
`VramPool` owns device memory. `connector` uses these names and those of `kvstore`, and nothing
else of the store. They may change with a minor version (docs/compatibility.md).
"""

from typing import TYPE_CHECKING

from kvstore.lazy import on_first_use

if TYPE_CHECKING:
    from kvstore.batches import in_batches
    from kvstore.client.base import (
        AnyReservation,
        BlockRef,
        BlockStore,
        BlockView,
        DeviceReservation,
        HostBlockStore,
        LookupResult,
        MissQuery,
        PoolMapping,
        PrefixMatch,
        Reservation,
    )
    from kvstore.client.engine_socket import EngineSocket
    from kvstore.client.explanation import FieldDifference, Missing
    from kvstore.client.locator import Holder, HolderRun, HolderRuns, Holders, Locator
    from kvstore.client.nodes.saving.vram_saver import VramSaver
    from kvstore.client.residency.listener import Residency
    from kvstore.client.session import BlockSession
    from kvstore.config_file import read_config
    from kvstore.cuda.base import Buffer, CudaDevice, DeviceRange
    from kvstore.cuda.bindings import open_device as cuda_device
    from kvstore.errors import (
        DeviceError,
        IndexRefusedError,
        IndexUnavailableError,
        NodeUnavailableError,
    )
    from kvstore.keys import chained_hashes
    from kvstore.segment.copying import copy as copy_bytes
    from kvstore.settings.reader import (
        ItemsMax,
        NumberRange,
        check_settings,
        known_names,
        read_settings,
    )
    from kvstore.system.descriptors import raise_limit as raise_open_files_limit
    from kvstore.system.descriptors import share as open_files_share
    from kvstore.system.last_resort import start_log
    from kvstore.system.threads import DaemonThreads
    from kvstore.system.waiting import Waiting
    from kvstore.transport.cuda_memory import DeviceBlock
    from kvstore.types import Key, Tier
    from kvstore.vram.owner import vram_for_saves
    from kvstore.vram.pool import VramPool

__all__ = ["BlockSession", "BlockStore", "HostBlockStore", "LookupResult", "MissQuery"]
__all__ += ["BlockView", "BlockRef", "PrefixMatch", "Missing", "FieldDifference", "Tier"]
__all__ += ["EngineSocket", "start_log"]
__all__ += ["Reservation", "DeviceReservation", "AnyReservation", "PoolMapping"]
__all__ += ["Locator", "Holder", "HolderRun", "HolderRuns", "Holders", "Residency"]
__all__ += ["Key", "chained_hashes", "in_batches", "Buffer", "copy_bytes"]
__all__ += ["VramPool", "VramSaver", "vram_for_saves"]
__all__ += ["DeviceBlock", "DeviceRange", "CudaDevice", "cuda_device"]
__all__ += ["read_config", "read_settings", "check_settings", "known_names"]
__all__ += ["NumberRange", "ItemsMax"]
__all__ += ["DaemonThreads", "Waiting", "raise_open_files_limit", "open_files_share"]
__all__ += ["IndexUnavailableError", "IndexRefusedError", "NodeUnavailableError", "DeviceError"]

_IMPORTS = {
    "batches": "in_batches",
    "client.base": (
        "AnyReservation, BlockRef, BlockStore, BlockView, DeviceReservation, HostBlockStore, "
        "LookupResult, MissQuery, PoolMapping, PrefixMatch, Reservation"
    ),
    "client.nodes.saving.vram_saver": "VramSaver",
    "client.locator": "Holder, HolderRun, HolderRuns, Holders, Locator",
    "client.engine_socket": "EngineSocket",
    "client.explanation": "FieldDifference, Missing",
    "client.residency.listener": "Residency",
    "client.session": "BlockSession",
    "config_file": "read_config",
    "cuda.base": "Buffer, CudaDevice, DeviceRange",
    "cuda.bindings": "open_device as cuda_device",
    "errors": "DeviceError, IndexRefusedError, IndexUnavailableError, NodeUnavailableError",
    "keys": "chained_hashes",
    "segment.copying": "copy as copy_bytes",
    "settings.reader": "ItemsMax, NumberRange, check_settings, known_names, read_settings",
    "system.descriptors": "raise_limit as raise_open_files_limit, share as open_files_share",
    "system.last_resort": "start_log",
    "system.threads": "DaemonThreads",
    "system.waiting": "Waiting",
    "transport.cuda_memory": "DeviceBlock",
    "types": "Key, Tier",
    "vram.owner": "vram_for_saves",
    "vram.pool": "VramPool",
}
"""Where these names are: modules below `kvstore`, and what to import from each."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _IMPORTS)
