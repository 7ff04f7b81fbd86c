"""The same calls for asyncio: nothing blocks the loop."""

import asyncio

from kvstore import AsyncClient


async def main() -> None:
    async with AsyncClient() as store:
        await asyncio.gather(*(store.put(f"key {i}", str(i).encode()) for i in range(8)))
        values = await asyncio.gather(*(store.get(f"key {i}") for i in range(8)))
        print(values)


asyncio.run(main())
