import json
import shlex
import subprocess
import sys

import pytest
import typer

import clickfleet
from clickfleet import cli
from clickfleet.cli import frame
from clickfleet.errors import ConfigError


def run(*argv: str) -> int:
    return frame.run(cli.build(), list(argv))


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"clickfleet {clickfleet.__version__}\n"


def test_doctor_says_what_is_there(capsys):
    assert run("doctor") == 0
    out = capsys.readouterr().out
    assert "training: numpy" in out


def test_json_is_the_last_line_of_stdout_and_all_else_goes_to_stderr(capsys):
    assert run("doctor", "--json") == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert json.loads(captured.out)["ok"] is True
    assert "training" in captured.err


def test_wrong_usage_is_2(capsys):
    assert run("no-such-command") == 2
    assert run("doctor", "--no-such-option") == 2
    assert "no-such-option" in capsys.readouterr().err


def failing(error: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @frame.command(app)
    def fail() -> None:
        raise error

    @frame.command(app)
    def other() -> None: ...

    return app


def test_a_users_error_is_one_message_and_1(capsys):
    assert frame.run(failing(ConfigError("unknown key a.b", "did you mean a.c?")), ["fail"]) == 1
    assert capsys.readouterr().err == "error: unknown key a.b\n  did you mean a.c?\n"


def test_our_fault_is_3(capsys):
    assert frame.run(failing(ZeroDivisionError()), ["fail"]) == 3
    assert "bug in clickfleet" in capsys.readouterr().err


def test_an_interrupt_is_130(capsys):
    assert frame.run(failing(KeyboardInterrupt()), ["fail"]) == 130
    capsys.readouterr()


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{shlex.quote(sys.executable)} -c 'from clickfleet.cli import main; main([\"doctor\"])' | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_results_are_strict_json():
    assert (
        frame.to_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": None}})
        == '{"a": null, "b": [null, 1.5], "c": {"d": null}}'
    )


HEAVY = [
    "torch",
    "numpy",
    "pyarrow",
    "pandas",
    "polars",
    "ray",
    "zmq",
    "pydantic",
    "yaml",
    "rich",
    "onnx",
    "onnxruntime",
    "scipy",
    "sklearn",
    "uvicorn",
    "grpc",
]


@pytest.mark.parametrize(
    "use", ["import clickfleet", "from clickfleet.cli import main; main(['--help'])"], ids=["import", "help"]
)
def test_the_start_is_light(use):
    code = f"import sys, atexit; atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules])); {use}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


def test_help_tells_of_every_command(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert "..." not in out.replace("[ARGS]...", "")
    for name in ("train", "evaluate", "predict", "report", "doctor", "synth"):
        assert f"  {name} " in out
