"""A load generator in a process of its own: requests from standard input, when their tokens came to standard output.

Each request streams over a connection of its own, begun at the time that was drawn for it.
"""

import asyncio
import json
import sys
import time
from typing import Any


async def ask(host: str, port: int, started: float, wanted: dict[str, Any]) -> dict[str, Any]:
    """Sends one request at its time, and returns when each token came, in seconds from the start."""
    await asyncio.sleep(max(0.0, wanted["at"] - (time.perf_counter() - started)))
    body = json.dumps(wanted["body"] | {"stream": True}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {wanted['path']} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    times: list[float] = []
    status = (await reader.readline()).split()[1].decode()
    async for line in reader:
        if line.startswith(b"data: {"):
            told = json.loads(line[6:])
            if "error" in told:
                raise SystemExit(f"the server answers {told['error']['message']}")
            choices = told.get("choices")  # llama.cpp's own endpoint has none
            new = len(told["tokens"]) if choices is None else sum(len(one["token_ids"]) for one in choices)
            times += [time.perf_counter() - started] * new
    writer.close()
    if status != "200":
        raise SystemExit(f"the server answers {status}")
    return {"due": wanted["at"], "times": times}


async def run(host: str, port: int, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sends all of them."""
    started = time.perf_counter()
    return await asyncio.gather(*(ask(host, port, started, one) for one in requests))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))))
