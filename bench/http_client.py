"""A load generator in a process of its own: requests from standard input, when their tokens came to standard output.

Each request streams over a connection of its own, begun at the time that was drawn for it. What comes is kept with its
time and read after the last answer, so that this process takes little of the machine meanwhile.
"""

import asyncio
import json
import sys
import time
from typing import Any

import uvloop


async def ask(host: str, port: int, started: float, wanted: dict[str, Any]) -> dict[str, Any]:
    """Sends one request at its time, and returns when each token came, in seconds from the start."""
    await asyncio.sleep(max(0.0, wanted["at"] - (time.perf_counter() - started)))
    body = json.dumps(wanted["body"] | {"stream": True}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {wanted['path']} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    pieces: list[tuple[float, bytes]] = []
    while piece := await reader.read(1 << 16):
        pieces.append((time.perf_counter() - started, piece))
    writer.close()
    return {"due": wanted["at"], "pieces": pieces}


def token_times(pieces: list[tuple[float, bytes]]) -> list[float]:
    """Returns when each token of a streamed answer came; ends the program where the server tells of an error."""
    status = pieces[0][1].split(maxsplit=2)[1].decode() if pieces else "nothing"
    if status != "200":
        raise SystemExit(f"the server answers {status}")
    times, rest = [], b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            told = json.loads(line[6:])
            if "error" in told:
                raise SystemExit(f"the server answers {told['error']['message']}")
            choices = told.get("choices")
            if choices is None:  # llama.cpp's own endpoint, which holds back tokens that end within a character
                new = told["tokens_predicted"] - len(times)
            else:
                new = sum(len(one["token_ids"]) for one in choices)
            times += [at] * new
    return times


async def run(host: str, port: int, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sends all of them."""
    started = time.perf_counter()
    return await asyncio.gather(*(ask(host, port, started, one) for one in requests))


def main() -> None:
    """Sends what standard input asks for, and prints the times."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))
    print(json.dumps([{"due": one["due"], "times": token_times(one["pieces"])} for one in found]))


if __name__ == "__main__":
    main()
