"""A server as the image runs it: without the packages that only training needs."""

import os
import subprocess
import sys
from pathlib import Path

from clickfleet.serve.client import Client
from images import OF_TRAINING


def test_a_server_starts_without_what_the_image_lacks(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {sorted(OF_TRAINING)}:\n    sys.modules[name] = None  # an import of it fails\n"
    )
    command = "from clickfleet.cli import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-c", command, "serve", str(artifact), "--port", "0", "--grpc-port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert server.stdout is not None
    try:
        said = []
        for line in server.stdout:
            said.append(line)
            if line.startswith("ready:"):
                break
        else:
            raise AssertionError("".join(said))
        with Client(line.split()[1].rstrip(",")) as client:
            assert client.predict([{"user": "v1"}]).shape == (1,)
    finally:
        server.terminate()
        server.communicate(timeout=60)
