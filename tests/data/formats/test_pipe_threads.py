"""Several commands of a pipe at once: all of them run, every row is read once, and scoring keeps the order of rows."""

from pathlib import Path
from typing import Any

import pytest

from clickfleet.config.check import configure
from clickfleet.config.load import Config
from clickfleet.data.dataset import for_scoring, open_source
from clickfleet.paddlerec import original, translation
from originals import QUEUE_READER, project

FILES, ROWS = 4, 6
MEET = """
import os, sys, time
folder = sys.argv[1]
open(os.path.join(folder, f"here-{os.getpid()}"), "w").close()
limit = time.monotonic() + 60
while len([name for name in os.listdir(folder) if name.startswith("here")]) < int(sys.argv[2]):
    if time.monotonic() > limit:
        sys.exit("nobody came")
    time.sleep(0.02)
for line in sys.stdin:
    print(line, end="")
"""


def settings(folder: Path, command: str, threads: int, **more: Any) -> Config:
    (folder / "schema.yaml").write_text("label: click\nslots: [a]\nkeys: raw\n")
    files = []
    for number in range(FILES):
        path = folder / f"part-{number}"
        path.write_text("".join(f"1 {100 * number + row} 1 {row % 2}\n" for row in range(ROWS)))
        files.append(str(path))
    form = {"name": "pipe", "command": command, "order": ["a", "click"]}
    data = {"train": files, "format": form, "schema": str(folder / "schema.yaml"), "batch_size": 1, "threads": threads}
    return configure({"data": {**data, **more}})


def keys(config: Config) -> list[int]:
    return [int(batch.keys[0]) for batch in open_source(config, config.data.train, None)]


def test_commands_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command waits until three others run: one after another they would never end."""
    (tmp_path / "meet.py").write_text(MEET)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    config = settings(tmp_path, f"python {tmp_path / 'meet.py'} {meeting} {FILES}", FILES)
    monkeypatch.setattr("clickfleet.data.dataset.check_repeatable", lambda *_: None)  # it would come to the meeting
    found = keys(config)
    assert sorted(found) == sorted(100 * number + row for number in range(FILES) for row in range(ROWS))
    assert len(list(meeting.iterdir())) == FILES


def test_scoring_keeps_the_order_of_rows(tmp_path: Path) -> None:
    config = settings(tmp_path, "cat", 3)
    in_order = [100 * number + row for number in range(FILES) for row in range(ROWS)]
    assert keys(for_scoring(config)) == in_order
    assert keys(settings(tmp_path, "cat", 1)) == in_order
    assert keys(settings(tmp_path, "cat", 3, interleave=1)) == in_order
    assert sorted(keys(config)) == in_order
    assert keys(config) == keys(config)


def test_thread_num_of_paddlerec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    path = project(tmp_path, "dnn", reader_type="QueueDataset", pipe_command="python reader.py", thread_num=3)
    (path.parent / "reader.py").write_text(QUEUE_READER)
    assert translation.translate(original.read(path)).config.data.threads == 3
    assert translation.translate(original.read(path, ["runner.num_workers=2"])).config.data.threads == 2
