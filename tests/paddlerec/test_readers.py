"""Readers made for PaddleRec run as they are, with names of paddle's where it is not installed, and nothing else of it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clickfleet import paddlerec
from clickfleet.cli import build
from clickfleet.cli.frame import run
from clickfleet.data.formats import load
from clickfleet.data.reader import Reader
from clickfleet.errors import ConfigError, DataError
from clickfleet.paddlerec import original, translation
from clickfleet.paddlerec.paddle_names import is_installed
from lines import read
from originals import DENSE, QUEUE_READER, READER, SLOTS, project, slot_lines

pytestmark = pytest.mark.skipif(importlib.util.find_spec("paddle") is not None, reason="the real paddle is installed")
SAME = ["train.deterministic=true", "train.threads=1", "run.report=false"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def same(a: Any, b: Any) -> None:
    for part in ("labels", "dense", "keys", "offsets"):
        np.testing.assert_array_equal(getattr(a, part), getattr(b, part))


def with_reader(folder: Path, text: str = READER, network: str = "dnn", **runner: Any) -> Path:
    path = project(folder, network, **runner)
    (path.parent / "reader.py").write_text(text)
    return path


def test_a_rec_dataset_reads_what_our_parser_reads(tmp_path: Path) -> None:
    path = with_reader(tmp_path)
    translated = translation.translate(original.read(path))
    form = {"name": str(path.parent / "reader.py"), "config": original.read(path).for_readers}
    data = path.parent / "data" / "train"
    same(read(data, form, translated.schema)[0], read(data, "slots", translated.schema)[0])
    assert "paddle" not in sys.modules
    assert not is_installed()


def test_reading_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = with_reader(tmp_path, rows=1300)
    schema = translation.translate(original.read(path)).schema
    form = {"name": str(path.parent / "reader.py"), "config": original.read(path).for_readers}
    whole = Reader(path.parent / "data" / "train", schema, form, 100, require_labels=True)
    batches = iter(whole)
    for _ in range(6):
        next(batches)
    state = whole.state()
    rest = list(batches)
    again = Reader(path.parent / "data" / "train", schema, form, 100)
    again.restore(state)
    for a, b in zip(rest, again, strict=True):
        same(a, b)


def test_inference_leaves_the_label_out(tmp_path: Path) -> None:
    path = with_reader(tmp_path)
    schema = translation.translate(original.read(path)).schema
    config = {**original.read(path).for_readers, "runner.inference": True}
    form = {"name": str(path.parent / "reader.py"), "config": config}
    assert read(path.parent / "data" / "train", form, schema)[0].labels is None


@pytest.mark.parametrize("text", [READER, QUEUE_READER], ids=["RecDataset", "pipe_command"])
def test_training_with_a_reader_equals_training_without(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    piped = {"reader_type": "QueueDataset", "pipe_command": "python3.7 reader.py"} if text == QUEUE_READER else {}
    path = with_reader(tmp_path, text, **piped)
    assert run(build(), ["train", str(path), *SAME, "--json"]) == 0
    mine = json.loads(capsys.readouterr().out.splitlines()[-1])
    (path.parent / "reader.py").unlink()
    path.write_text(path.read_text().replace("QueueDataset", "DataLoader"))
    assert run(build(), ["train", str(path), "-o", "runner.model_save_path=plain", *SAME, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (mine["train_auc"], mine["test_auc"]) == (plain["train_auc"], plain["test_auc"])


def test_evaluate_and_predict_ask_the_reader_that_the_file_names_for_them(tmp_path: Path) -> None:
    path = with_reader(tmp_path, epochs=1, infer_end_epoch=1, infer_reader_path="other")
    (path.parent / "other.py").write_text(READER.replace("found = {}", "found = {}; open('asked', 'a').close()"))
    assert run(build(), ["train", str(path), *SAME]) == 0
    assert run(build(), ["evaluate", str(path)]) == 0
    assert run(build(), ["predict", str(path), "--out", "scores.txt"]) == 0
    assert len(Path("scores.txt").read_text().splitlines()) == 40
    assert Path("asked").exists()


def test_native_is_taken_where_rows_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_reader(tmp_path)
    assert run(build(), ["migrate", "paddlerec", str(path), "--native"]) == 0
    assert "both return the same first" in capsys.readouterr().out
    (path.parent / "reader.py").unlink()
    other = with_reader(tmp_path / "b", READER.replace('.astype("float32")', '.astype("float32") + 1'))
    assert run(build(), ["migrate", "paddlerec", str(other), "--native"]) == 1
    assert "different dense for row 1" in capsys.readouterr().err


def test_generators_of_both_kinds_and_places(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text(slot_lines(5))
    schema = translation.translate(original.read(project(tmp_path, "dnn"))).schema
    for number, (place, kind) in enumerate(
        [
            ("from paddle.fluid.incubate.data_generator import MultiSlotDataGenerator as Base", "int"),
            ("import paddle.fluid.incubate.data_generator as dg\nBase = dg.MultiSlotStringDataGenerator", "str"),
            ("import paddle\nfrom paddle.distributed import fleet\nBase = fleet.MultiSlotStringDataGenerator", "str"),
        ]
    ):
        file = tmp_path / f"reader{number}.py"
        file.write_text(
            f"{place}\n\n\nclass Mine(Base):\n    def generate_sample(self, line):\n        def samples():\n"
            f"            tokens = [token.split(':') for token in line.split()]\n"
            f"            names = list(dict.fromkeys(name for name, _ in tokens))\n"
            f"            number = {kind} if {kind} is str else lambda v: float(v) if '.' in v else int(v)\n"
            f"            yield [(n, [number(v) for m, v in tokens if m == n]) for n in names]\n        return samples\n"
        )
        same(read(lines, str(file), schema)[0], read(lines, "slots", schema)[0])


@pytest.mark.parametrize(
    ("line", "what", "todo"),
    [
        ("import paddle.nn as nn", "paddle.nn needs paddle", "porting a model"),
        ("from paddle.io import DataLoader", "paddle.io.DataLoader needs paddle", "data.batch_size"),
        ("import paddle\npaddle.seed(1)", "paddle.seed needs paddle", "np.random.seed"),
        (
            "import paddle.distributed.fleet as fleet\nfleet.init()",
            "paddle.distributed.fleet.init needs paddle",
            "clickfleet launch",
        ),
        ("import paddle\npaddle.unheard_of()", "paddle.unheard_of needs paddle", "or install paddle"),
    ],
)
def test_any_other_use_is_refused_with_its_line(line: str, what: str, todo: str, tmp_path: Path) -> None:
    path = with_reader(tmp_path, "# a reader\n" + line + "\n" + READER)
    number = 2 + line.count("\n")
    with pytest.raises(ConfigError) as error:
        load({"name": str(path.parent / "reader.py"), "config": {}})
    assert f"reader.py:{number}: {what}" in str(error.value)
    assert todo in str(error.value)
    assert "paddle" not in sys.modules


def test_use_while_reading_is_refused_too(tmp_path: Path) -> None:
    text = READER.replace("import numpy as np", "import numpy as np\nimport paddle").replace(
        "        for file in self.file_list:",
        "        paddle.io.get_worker_info()\n        for file in self.file_list:",
    )
    path = with_reader(tmp_path, text)
    translated = translation.translate(original.read(path))
    form = {"name": str(path.parent / "reader.py"), "config": original.read(path).for_readers}
    with pytest.raises(ConfigError, match="each reader receives its own files"):
        read(path.parent / "data" / "train", form, translated.schema)


def test_a_reader_that_fails_or_yields_nonsense_is_named(tmp_path: Path) -> None:
    path = with_reader(tmp_path)
    translated = translation.translate(original.read(path))
    data = path.parent / "data" / "train"
    form = {"name": str(path.parent / "reader.py"), "config": original.read(path).for_readers}
    (data / "part-0").write_text(slot_lines(3) + "click:1 nonsense\n")
    with pytest.raises(DataError, match=r"the reader failed after 2 samples: ValueError: .*reader.py:\d+"):
        read(data, form, translated.schema)
    (data / "part-0").write_text(slot_lines(3))
    wide = {**form, "config": {**form["config"], "hyper_parameters.sparse_inputs_slots": SLOTS + 3}}
    with pytest.raises(DataError, match=f"{SLOTS + 4} arrays per sample, but the network has {SLOTS} slots"):
        read(data, wide, translated.schema)
    (data / "part-0").write_text(slot_lines(1).replace("dense_feature", "dense_feature:0 dense_feature", 1))
    with pytest.raises(DataError, match=f"{DENSE + 1} dense values, but the network has {DENSE}"):
        read(data, form, translated.schema)


def test_as_a_program_a_reader_prints_multislot(tmp_path: Path) -> None:
    path = project(tmp_path, "dnn")
    reader = path.parent / "queue.reader.py"
    reader.write_text(QUEUE_READER)
    helpers = Path(paddlerec.__file__).parent / "helpers"
    argv = [sys.executable, "-m", "clickfleet.paddlerec.paddle_names", reader, path, helpers]
    done = subprocess.run(list(map(str, argv)), input=slot_lines(1), capture_output=True, text=True, check=True)
    assert done.stdout.startswith(("1 0 1 ", "1 1 1 "))
    reader.write_text("import paddle.nn\n")
    done = subprocess.run(list(map(str, argv)), input="", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "queue.reader.py:1: paddle.nn needs paddle" in done.stderr


HASHING = """
import {module} as data_generator


class Reader(data_generator.MultiSlot{kind}DataGenerator):
    def generate_sample(self, line):
        def samples():
            label, *words = line.split()
            yield [("label", [label{number}])] + [(f"w{{i}}", [{hashed}]) for i, word in enumerate(words)]

        return samples


if __name__ == "__main__":
    Reader().run_from_stdin()
"""
WORDS = "label: label\nkeys: raw\nslots: [w0, w1]\n"


def hashing_reader(folder: Path, module: str = "paddle.fluid.incubate.data_generator", strings: bool = False) -> Path:
    hashed = "str(abs(hash(word)) % 100003)" if strings else "abs(hash(word)) % 100003"
    kind, number = ("String", "") if strings else ("", " == '1'")
    text = HASHING.format(module=module, kind=kind, number=number, hashed=hashed)
    (folder / "generator.py").write_text(text.replace("[label == '1']", "[int(label)]"))
    (folder / "words.yaml").write_text(WORDS)
    for part in range(2):
        (folder / f"part-{part}").write_text("".join(f"{i % 2} a{i % 7} b{i % 5}\n" for i in range(300)))
    return folder / "generator.py"


def rows_of(run_folder: str) -> int:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "clickfleet"), "inspect", run_folder, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(json.loads(done.stdout.splitlines()[-1])["rows"])


@pytest.mark.parametrize(
    "form",
    ["{name: pipe, command: python generator.py, order: [label, w0, w1]}", "./generator.py"],
    ids=["pipe", "in this process"],
)
def test_a_reader_that_uses_hash_gives_the_same_ids_everywhere(form: str, tmp_path: Path) -> None:
    hashing_reader(tmp_path)
    train = [str(Path(sys.executable).parent / "clickfleet"), "train", "data.train=part-*", f"data.format={form}"]
    more = ["data.schema=words.yaml", "model=lr", "run.dir=run", "run.report=false"]
    done = subprocess.run([*train, *more], capture_output=True, text=True, env=unseeded())
    assert done.returncode == 0, done.stderr
    assert rows_of("run") == 12  # two files of the same seven and five words
    assert ("starts again with PYTHONHASHSEED=0" in done.stderr) == (form == "./generator.py")
    scores = []
    for name in ("a.txt", "b.txt"):
        predict = [
            str(Path(sys.executable).parent / "clickfleet"),
            "predict",
            "run",
            "part-0",
            "--out",
            name,
            "--trust",
        ]
        subprocess.run(predict, capture_output=True, check=True, env=unseeded())
        scores.append(Path(name).read_text())
    assert scores[0] == scores[1]
    assert len(set(scores[0].split())) > 2


def unseeded() -> dict[str, str]:
    return {
        key: value for key, value in os.environ.items() if key not in ("PYTHONHASHSEED", "CLICKFLEET_READER_CHECKED")
    }


def test_from_python_a_reader_that_uses_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import clickfleet

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delenv("CLICKFLEET_READER_CHECKED", raising=False)
    path = hashing_reader(tmp_path)
    data = {"train": "part-*", "format": str(path), "schema": "words.yaml"}
    with pytest.raises(DataError, match=r"uses hash\(\).*\n.*PYTHONHASHSEED=0"):
        clickfleet.train({"data": data, "model": "lr", "run": {"dir": "run"}}, quiet=True)
    assert not Path("run/checkpoints").exists()
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["state"] == "failed"


def test_a_command_whose_output_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import clickfleet

    monkeypatch.delenv("CLICKFLEET_READER_CHECKED", raising=False)
    hashing_reader(tmp_path)
    command = "awk -v n=$RANDOM$RANDOM '{print 1, $1, 1, n, 1, 5}'"
    form = {"name": "pipe", "command": command, "order": ["label", "w0", "w1"]}
    with pytest.raises(DataError, match="different rows for the same lines when it runs twice"):
        clickfleet.train(
            {"data": {"train": "part-*", "format": form, "schema": "words.yaml"}, "run": {"dir": "run"}}, quiet=True
        )


@pytest.mark.parametrize("module", ["paddle.fluid.incubate.data_generator", "paddle.distributed.fleet.data_generator"])
@pytest.mark.parametrize("strings", [False, True])
def test_a_shell_starts_an_old_reader_with_the_stand_in(
    module: str, strings: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clickfleet.paddlerec import paddle_names

    hashing_reader(tmp_path, module, strings)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    file = paddle_names.install()
    assert file.parent == tmp_path
    program = "import site, runpy; site.addsitedir('.'); runpy.run_path('generator.py', run_name='__main__')"
    lines = Path("part-0").read_text()
    done = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 300
    assert paddle_names.remove() == file
    assert not file.exists()


def test_a_real_paddle_takes_precedence_over_the_stand_in(tmp_path: Path) -> None:
    real = tmp_path / "site" / "paddle"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("version = 'real'\n")
    (real / "io.py").write_text("name = __name__\n")
    from clickfleet.paddlerec.paddle_names import STAND_IN

    program = "import paddle, paddle.io; print(paddle.version, paddle.io.name)"
    path = f"{STAND_IN}:{real.parent}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=unseeded() | {"PYTHONPATH": path}
    )
    assert done.stdout == "real paddle.io\n", done.stderr
