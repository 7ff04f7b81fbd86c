"""Put values, get them, see a miss. Another process that does this meanwhile shares them."""

from kvstore import Client

with Client() as store:
    result = store.put("greeting", b"hello")
    print(result.status)  # stored or exists; differs or rejected: result.reason says why
    print(store.get("greeting"))  # b'hello'
    print(store.get("nobody put this"))  # None: a miss is a value, not an error
    store.put_many({"a": b"1", "b": b"2"})
    print(store.get_many(["a", "b", "c"]))  # [b'1', b'2', None]
    store.delete("a")
    print(store.exists("a"))  # False
