"""Events of files: seen at once where the system tells them, and never missed for good where it does not."""

import os
import threading

import pytest

from clickfleet.store import file_events
from clickfleet.store.atomic import append, write_file
from clickfleet.store.file_events import FileEvents

pytestmark = pytest.mark.skipif(file_events.inotify() is None, reason="needs inotify")
LONG_S = 60.0


def test_an_append_a_rename_and_a_new_folder_are_events(tmp_path):
    with FileEvents([tmp_path]) as events:
        assert events.active
        assert not events.wait(0.0)
        append(tmp_path / "LOG.jsonl", b"line\n", durable=True)
        assert events.wait(LONG_S)
        assert not events.wait(0.0)  # all of them were taken
        write_file(tmp_path / "version.json", b"{}")
        assert events.wait(LONG_S)
        (tmp_path / "folder").mkdir()
        assert events.wait(LONG_S)
        (tmp_path / "folder/inside").touch()
        assert not events.wait(0.0)
        assert events.add(tmp_path / "folder")
        (tmp_path / "folder/inside").unlink()
        assert events.wait(LONG_S)


def test_only_named_files_count(tmp_path):
    with FileEvents([tmp_path], ["LOG.jsonl"]) as events:
        (tmp_path / "other").write_text("x")
        assert not events.wait(0.01)
        (tmp_path / "LOG.jsonl").write_text("x")
        assert events.wait(LONG_S)


def test_a_waiting_thread_is_woken(tmp_path):
    with FileEvents([tmp_path]) as events:
        woken = []
        thread = threading.Thread(target=lambda: woken.append(events.wait(LONG_S)))
        thread.start()
        (tmp_path / "file").write_text("x")
        thread.join(LONG_S)
        assert woken == [True]


def test_a_folder_that_does_not_exist_or_goes_is_not_active_until_it_is_added_again(tmp_path):
    folder = tmp_path / "later"
    with FileEvents([folder]) as events:
        assert not events.active
        folder.mkdir()
        assert events.add(folder)
        assert events.active
        folder.rmdir()
        assert events.wait(LONG_S)
        assert not events.active
        folder.mkdir()
        assert events.add(folder)
        (folder / "file").touch()
        assert events.wait(LONG_S)
        events.keep_only([])
        (folder / "file").unlink()
        events.take()
        assert not events.wait(0.0)


def test_without_inotify_a_caller_is_woken_by_its_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(file_events, "inotify", lambda: None)
    with FileEvents([tmp_path]) as events:
        assert not events.active
        assert not events.add(tmp_path)
        (tmp_path / "file").touch()
        assert not events.wait(0.01)
        assert not events.take()


def test_its_descriptor_is_closed(tmp_path):
    events = FileEvents([tmp_path])
    fd = events.fileno()
    events.close()
    events.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert not events.wait(0.0)
