"""Send requests at fixed times, however slowly the server replies, and print the results as JSON.

python _open_loop.py URL BODY RATE SECONDS [ROUTE]
"""

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


async def open_loop(
    url: str, body: bytes, rate: float, seconds: float, route: str = "/v1/predict", connections: int = 16
) -> dict[str, Any]:
    """Send requests at fixed times. Latency counts from the time a request was due."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    for _ in range(connections):
        free.put_nowait(await asyncio.open_connection(host, int(port)))
    times: list[float] = []
    replies: list[tuple[int, float]] = []
    failed = 0

    async def one(due: float) -> None:
        nonlocal failed
        reader, writer = await free.get()
        try:
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"content-length: (\d+)", answer)[1])  # type: ignore[index]
            content = await reader.readexactly(length)
            if not answer.startswith(b"HTTP/1.1 200"):
                failed += 1
            else:
                found = json.loads(content)
                score = found["ranked"][0]["score"] if "ranked" in found else found["scores"][0]
                replies.append((found["sequence"], score))
            times.append(time.perf_counter() - due)
        except (OSError, asyncio.IncompleteReadError):
            failed += 1
        finally:
            free.put_nowait((reader, writer))

    begin = time.perf_counter()
    tasks = set()
    for n in range(int(rate * seconds)):
        due = begin + n / rate
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(one(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    while not free.empty():
        free.get_nowait()[1].close()
    p50, p99 = np.percentile(np.array(times) * 1e3, [50, 99]).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "failed": failed, "replies": replies}


if __name__ == "__main__":
    url, body, rate, seconds, *route = sys.argv[1:]
    print(json.dumps(asyncio.run(open_loop(url, Path(body).read_bytes(), float(rate), float(seconds), *route))))
