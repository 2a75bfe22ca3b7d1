"""Every example runs, is cut into cells and is named in the list of examples."""

from pathlib import Path

import pytest

from examples import NAMES, ON_THE_CLUSTER, ROOT, run


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_THE_CLUSTER])
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, tmp_path, monkeypatch)


def test_each_is_a_notebook_and_listed() -> None:
    listed = (ROOT / "README.md").read_text()
    for name in NAMES:
        text = (ROOT / name / f"{name}.py").read_text()
        assert text.startswith("# %% [markdown]\n# # ")
        assert text.count("\n# %%") >= 4
        assert f"({name}/{name}.py)" in listed
