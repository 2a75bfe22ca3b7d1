"""Downloads against a server on this machine that can break off, lie and forget."""

import io
import json
import re
import shutil
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.config import recipes
from clickfleet.data.logs.fetch import Archive, Dataset, clean, dataset, download, fetch
from clickfleet.errors import ConfigError, DataError
from originals import project, slot_lines


@dataclass
class Site:
    """What the server has, and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    break_after: list[int] = field(default_factory=list)
    """Bytes after which the next connections break off."""
    ranges: bool = True
    etag: str = '"1"'
    status: int = 0
    asked: list[str | None] = field(default_factory=list)
    """The Range header of each request."""
    url: str = ""
    length: str | None = None
    """The Content-Length to announce instead of the true one."""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.headers.get("Range"))
            content = state.files.get(self.path)
            if content is None or state.status:
                self.send_error(state.status or 404)
                return
            start = 0
            same = self.headers.get("If-Range") in (None, state.etag)
            if state.ranges and same and (wanted := self.headers.get("Range")):
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", state.length or str(len(content) - start))
            self.send_header("ETag", state.etag)
            self.end_headers()
            stop = start + state.break_after.pop(0) if state.break_after else len(content)
            self.wfile.write(content[start:stop])

        def log_message(self, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, *args: Any) -> None: ...  # a client that hangs up is part of the game

    server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


CONTENT = bytes(range(256)) * 4000


def get(site: Site, to: Path, **options: Any) -> int:
    return download(f"{site.url}/file", to, pause_s=0.001, **options)


def test_a_broken_connection_goes_on_where_it_stopped(site: Site, tmp_path: Path) -> None:
    site.files["/file"] = CONTENT
    site.break_after = [300_000, 1, 400_000]
    assert get(site, tmp_path / "file", size=len(CONTENT)) == len(CONTENT)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert site.asked[0] is None
    assert site.asked[-1] == "bytes=700001-"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize("length", ["many", "-1", "9" * 5000])
def test_a_length_that_is_none_is_ignored(site: Site, tmp_path: Path, length: str) -> None:
    site.files["/file"], site.length = CONTENT, length
    assert get(site, tmp_path / "file") == len(CONTENT)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_an_interrupted_call_is_taken_up_by_the_next(site: Site, tmp_path: Path) -> None:
    site.files["/file"] = CONTENT
    site.break_after = [500_000, *[0] * 9]
    with pytest.raises(DataError, match=r"are kept; the next call continues") as told:
        get(site, tmp_path / "file", retries=2)
    assert "--mirror" in str(told.value)
    assert not (tmp_path / "file").exists()
    site.break_after, site.asked = [], []
    get(site, tmp_path / "file")
    assert site.asked == ["bytes=500000-"]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_file_replaced_meanwhile_is_never_mixed(site: Site, tmp_path: Path) -> None:
    site.files["/file"] = CONTENT
    site.break_after = [500_000, *[0] * 9]
    with pytest.raises(DataError):
        get(site, tmp_path / "file", retries=1)
    site.files["/file"], site.etag, site.break_after = CONTENT[::-1], '"2"', []
    get(site, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT[::-1]


def test_a_server_without_ranges_sends_all_again(site: Site, tmp_path: Path) -> None:
    site.files["/file"], site.ranges, site.break_after = CONTENT, False, [1000]
    get(site, tmp_path / "file", size=len(CONTENT))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_too_much_of_the_file_starts_over(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"x" * (len(CONTENT) + 5))
    site.files["/file"] = CONTENT
    get(site, tmp_path / "file", size=len(CONTENT))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_part_that_is_whole_is_only_renamed(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    (tmp_path / "file.part.tag").write_text(site.etag)
    site.files["/file"] = CONTENT
    assert get(site, tmp_path / "file") == len(CONTENT)
    assert site.asked == [f"bytes={len(CONTENT)}-"]


def test_a_wrong_size_is_refused_before_the_download(site: Site, tmp_path: Path) -> None:
    site.files["/file"] = CONTENT
    with pytest.raises(DataError, match=r"offers 1,024,000 bytes, expected 77"):
        get(site, tmp_path / "file", size=77)
    assert not (tmp_path / "file").exists()


def test_what_is_there_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    assert get(site, tmp_path / "file", size=len(CONTENT)) == len(CONTENT)
    assert site.asked == []


def test_a_full_disk_is_noticed_first(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files["/file"] = CONTENT
    free = type("Usage", (), {"free": 2_000_000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(DataError, match=r"2 MB free, but 3.07 MB are needed"):
        get(site, tmp_path / "file", room=3.0)


@pytest.mark.parametrize(("status", "message"), [(404, "the server replied 404"), (503, "cannot fetch")])
def test_a_refusal_is_told(site: Site, tmp_path: Path, status: int, message: str) -> None:
    site.files["/file"], site.status = CONTENT, status
    with pytest.raises(DataError, match=message):
        get(site, tmp_path / "file", retries=2)


def test_no_internet_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DataError, match=r"cannot fetch http://127.0.0.1:9/file[^\n]*\n  check the internet connection"):
        download("http://127.0.0.1:9/file", tmp_path / "file", retries=1, pause_s=0.001)
    with pytest.raises(DataError, match="not an http"):
        download("ftp://127.0.0.1/file", tmp_path / "file")


def tar(files: dict[str, bytes], links: tuple[str, ...] = ()) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
    return buffer.getvalue()


CRITEO = {
    **{f"raw_data/part-{i}": b"0\tx\n" * (i + 1) for i in range(4)},
    "test_data/part-220": b"1\ty\n" * 5,
    "test_data/part-221": b"1\ty",
    "README": b"ignored",
}


def criteo(site: Site, content: bytes, size: int | None = None) -> Dataset:
    site.files["/ctr_data.tar.gz"] = content
    known = dataset("criteo", [f"{site.url}/ctr_data.tar.gz"])
    archive = Archive(known.archives[0].url, known.archives[0].folders, size)
    return Dataset("criteo", "", (archive,), known.quick)


def test_fetch_unpacks_and_makes_the_quick_folders(site: Site, tmp_path: Path) -> None:
    said: list[str] = []
    packed = tar(CRITEO)
    data = criteo(site, packed, len(packed))
    made = fetch(data, tmp_path / "c", said.append, pause_s=0.001)
    rows = {"train_data_full": 10, "test_data_full": 6, "train_data": 3, "test_data": 5}
    assert made == {"rows": 16, "out": str(tmp_path / "c"), "folders": rows, "archives": ["ctr_data.tar.gz"]}
    assert sorted(path.name for path in (tmp_path / "c/train_data").iterdir()) == ["part-0", "part-1"]
    assert [path.name for path in (tmp_path / "c/test_data").iterdir()] == ["part-220"]
    assert (tmp_path / "c/train_data_full/part-3").read_bytes() == CRITEO["raw_data/part-3"]
    assert any(line.startswith("train_data: 3 rows in 2 files in") for line in said)
    site.asked = []
    assert fetch(data, tmp_path / "c", pause_s=0.001) == made
    assert site.asked == []


def test_the_command(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.files["/ctr.tar.gz"] = tar(CRITEO)
    argv = ["fetch", "criteo", "--url", f"{site.url}/ctr.tar.gz", "--out", str(tmp_path / "c"), "--json"]
    assert run(build(), argv) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 16
    assert run(build(), [*argv, "--clean"]) == 0
    assert f"removed {tmp_path / 'c/ctr.tar.gz'}" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_fetch_repairs_a_folder_that_was_removed(site: Site, tmp_path: Path) -> None:
    import shutil

    data = criteo(site, tar(CRITEO))
    fetch(data, tmp_path, pause_s=0.001)
    shutil.rmtree(tmp_path / "train_data_full")
    fetch(data, tmp_path, pause_s=0.001)
    assert len(list((tmp_path / "train_data_full").iterdir())) == 4


def test_slot_archives_go_to_the_folders_of_paddlerec(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config_bigdata.yaml in PaddleRec's tree trains on what was fetched, unchanged."""
    site.files["/slot_train_data_full.tar.gz"] = tar(
        {"slot_train_data_full/part-0": slot_lines(40, 1).encode(), "slot_train_data_full/.x": b""}
    )
    site.files["/slot_test_data_full.tar.gz"] = tar({"slot_test_data_full/part-9": slot_lines(20, 2).encode()})
    monkeypatch.chdir(tmp_path)
    argv = ["fetch", "criteo-slots", "--mirror", site.url, "--out", "datasets/criteo", "--json"]
    assert run(build(), argv) == 0
    assert json.loads(capsys.readouterr().out)["folders"] == {
        "slot_train_data_full": 40,
        "slot_test_data_full": 20,
        "slot_train_data": 40,
        "slot_test_data": 20,
    }
    home = tmp_path / "datasets/criteo"
    assert [path.name for path in (home / "slot_test_data").iterdir()] == ["part-9"]
    data = "../../../datasets/criteo/slot_{}_data_full"
    config = project(
        tmp_path / "models/rank", "dnn", train_data_dir=data.format("train"), test_data_dir=data.format("test")
    )
    assert run(build(), ["train", "-m", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 80  # two epochs

    (home / "slot_train_data_full").rename(home / "train_data_full")
    (home / ".slot_train_data_full.tar.gz.json").write_text('{"train_data_full": 40}')  # by an older version
    assert run(build(), argv) == 0
    assert (home / "slot_train_data_full/part-0").is_file()
    assert run(build(), [*argv, "--clean"]) == 0
    assert [path.name for path in home.iterdir()] == ["train_data_full"]


def test_the_one_billion_words_become_vectors(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An archive of the same layout, with a small text that has planted analogies; then the commands of the recipe."""
    monkeypatch.chdir(tmp_path)
    assert run(build(), ["words", "synth", "made", "--words", "200000", "--vocabulary", "600", "--topics", "12"]) == 0
    text = Path("made/text.txt").read_bytes().splitlines(keepends=True)
    top = "1-billion-word-language-modeling-benchmark-r13output"
    half = len(text) // 2
    files = {
        f"{top}/README": b"about",
        f"{top}/.svn/entries": b"12",
        f"{top}/training-monolingual.tokenized.shuffled/.svn/entries": b"12",
        f"{top}/training-monolingual.tokenized.shuffled/news.en-00001-of-00100": b"".join(text[:half]),
        f"{top}/training-monolingual.tokenized.shuffled/news.en-00002-of-00100": b"".join(text[half:]),
        f"{top}/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": b"".join(text[:9]),
    }
    site.files[f"/{top}.tar.gz"] = tar(files)
    site.files["/test_dir.tar"] = tar({"data/test_dir/questions.txt": Path("made/questions.txt").read_bytes()})
    urls = ["--url", f"{site.url}/{top}.tar.gz", "--url", f"{site.url}/test_dir.tar"]
    capsys.readouterr()
    assert run(build(), ["fetch", "one-billion-words", *urls, "--json"]) == 0
    questions = len(Path("made/questions.txt").read_text().splitlines())
    assert json.loads(capsys.readouterr().out)["folders"] == {
        "training": len(text),
        "heldout": 9,
        "questions": questions,
    }
    assert len(list(Path("one-billion-words/training").iterdir())) == 2

    commands = re.findall(r"^#   clickfleet (.*)$", recipes.find("one_billion_words").text, re.MULTILINE)
    assert [line.split()[0] for line in commands] == ["fetch", "words", "train", "evaluate"]
    for line in commands[1:3]:
        more = ["table.dim=32", "train.epochs=3"] if line.startswith("train") else []
        assert run(build(), [*line.split(), *more]) == 0
    capsys.readouterr()
    assert run(build(), [*commands[3].split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["accuracy"] > 0.5
    assert run(build(), ["fetch", "one-billion-words", *urls, "--clean"]) == 0
    assert not Path("one-billion-words").exists()


def test_clean_removes_what_fetch_made_and_nothing_else(site: Site, tmp_path: Path) -> None:
    data = criteo(site, tar(CRITEO))
    fetch(data, tmp_path / "c", pause_s=0.001)
    (tmp_path / "c/mine.txt").write_text("kept")
    removed = clean(data, tmp_path / "c")["removed"]
    assert str(tmp_path / "c/ctr_data.tar.gz") in removed
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["mine.txt"]
    (tmp_path / "c/mine.txt").unlink()
    clean(data, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar({"raw_data/../../evil": b"x", "test_data/p": b""}), "cannot unpack 'raw_data/../../evil'"),
        (tar({"/raw_data/evil": b"x"}), "cannot unpack"),
        (tar(CRITEO, links=("raw_data/link",)), "cannot unpack 'raw_data/link'"),
        (tar(CRITEO)[:-60], "is damaged"),
        (b"not a tar at all", "is damaged"),
        (tar({"raw_data/part-0": b"x\n"}), "contains no files for test_data_full"),
    ],
)
def test_a_bad_archive_leaves_nothing_half_done(site: Site, tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fetch(criteo(site, content), tmp_path / "in/c", pause_s=0.001)
    assert not (tmp_path / "in/c/train_data_full").exists()
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "in/evil").exists()


def test_sources_are_named_clearly() -> None:
    assert dataset("criteo").archives[0].size == 4_041_125_592
    assert dataset("criteo", mirror="http://x/y/").archives[0].url == "http://x/y/ctr_data.tar.gz"
    with pytest.raises(ConfigError, match="unknown dataset"):
        dataset("avazu")
    with pytest.raises(ConfigError, match="pass --url 2 times"):
        dataset("criteo-slots", ["http://x"])
    with pytest.raises(ConfigError, match="exclude each other"):
        dataset("criteo", ["http://x"], "http://y")
