"""One file over HTTP, whatever happens on the way: goes on where it stopped, and is whole or not there."""

import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clickfleet.errors import DataError
from clickfleet.progress import Bar, amount, progress

_BITE = 1 << 18
_BROKEN = (http.client.HTTPException, OSError)  # URLError, timeouts and resets are OSErrors


def download(
    url: str, to: Path, size: int | None = None, *, room: float = 1.0, retries: int = 5, pause_s: float = 1.0
) -> int:
    """Fetches `url` into the file `to` and returns its size, which must be `size` where that is given.

    What has come so far is kept in `to` + ".part". `room` is how many times the file's size must be free on the disk.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"{url} is not an http or https address")
    if to.exists() and (size is None or to.stat().st_size == size):
        return to.stat().st_size
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(to.name + ".part")
    tries = 0
    with progress(f"fetching {to.name}", size, "bytes") as bar:
        while True:
            before = _size(part)
            try:
                whole = _go_on(url, part, size, room, bar)
                break
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500:
                    raise DataError(
                        f"{url}: the server answers {error.code} {error.reason}", "check the address"
                    ) from None
                reason: Exception = error
            except _BROKEN as error:
                reason = error
            tries = 0 if _size(part) > before else tries + 1
            if tries >= retries:
                raise _unreachable(url, to, part, reason) from None
            time.sleep(pause_s * 2 ** max(tries - 1, 0))
    os.replace(part, to)
    _tag(part).unlink(missing_ok=True)
    return whole


def _go_on(url: str, part: Path, size: int | None, room: float, bar: Bar) -> int:
    """One connection's worth; raises when it breaks before the end."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "clickfleet", "Accept-Encoding": "identity"})
    tag = _tag(part).read_text() if _tag(part).exists() else ""
    if have and (tag or size is not None):
        request.add_header("Range", f"bytes={have}-")
        if tag:
            request.add_header("If-Range", tag)  # a file replaced meanwhile comes whole, never mixed
    try:
        reply = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{have}" and size in (None, have):
            return have  # all of it was there
        part.unlink()
        raise ConnectionError("the file changed on the server") from None
    with reply:
        going_on = reply.status == 206
        whole = _whole(reply, have if going_on else 0)
        if size is not None and whole is not None and whole != size:
            raise DataError(
                f"{url}: the server offers {whole:,} bytes, expected {size:,}",
                "the file was replaced, or a proxy answers in its place; name another source with --mirror or --url",
            )
        whole = size if whole is None else whole
        _tag(part).write_text(reply.headers.get("ETag", ""))
        _check_room(part, whole, have if going_on else 0, room)
        bar.expect(whole)
        bar.advance((have if going_on else 0) - bar.done)
        with part.open("ab" if going_on else "wb") as file:
            while data := reply.read(_BITE):
                file.write(data)
                bar.advance(len(data))
    got = _size(part)
    if whole is not None and got != whole:
        if got > whole:
            part.unlink()
            raise DataError(f"{url}: the server sent more than the {whole:,} bytes it announced")
        raise ConnectionError(f"the connection closed after {got:,} of {whole:,} bytes")
    return got


def _whole(reply: Any, have: int) -> int | None:
    """The size of the whole file as the server states it."""
    if reply.status == 206:
        start, _, total = reply.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if start.split("-")[0] != str(have):
            raise ConnectionError(f"asked for bytes from {have}, the server sends {start!r}")
        return int(total) if total.isdigit() else None
    length = reply.headers.get("Content-Length")
    return int(length) if length is not None else None


def _check_room(part: Path, whole: int | None, have: int, room: float) -> None:
    if whole is None:
        return
    need, free = int(whole * room) - have, shutil.disk_usage(part.parent).free
    if need > free:
        raise DataError(
            f"{part.parent} has {amount(free, 'bytes')} free and this needs {amount(need, 'bytes')}",
            "make room, or choose another disk with --out",
        )


def _unreachable(url: str, to: Path, part: Path, reason: Exception) -> DataError:
    host = urlsplit(url).netloc
    why = getattr(reason, "reason", None) or reason
    kept = f" ({amount(_size(part), 'bytes')} are kept, the next call goes on from there)" if _size(part) else ""
    return DataError(
        f"cannot fetch {url} from {host}: {why}{kept}",
        f"is there internet here? a proxy is taken from https_proxy; --mirror names another source; "
        f"or bring the file yourself and put it at {to}",
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tag(part: Path) -> Path:
    return part.with_name(part.name + ".tag")
