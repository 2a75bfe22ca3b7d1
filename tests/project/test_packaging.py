"""What people install: the source distribution is whole, images and manifests say what the code does."""

import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from clickfleet.config.load import Config, checked
from images import OF_TRAINING

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
MANIFESTS = list(yaml.safe_load_all((ROOT / "deploy/kuberay.yaml").read_text()))


def manifest(kind: str) -> dict[str, Any]:
    (found,) = (one for one in MANIFESTS if one["kind"] == kind)
    return found


def test_the_source_distribution_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not in a clone")
    from scikit_build_core.build import build_sdist

    monkeypatch.chdir(ROOT)
    name = build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        inside = {member.name.partition("/")[2] for member in archive if member.isfile()}
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    there = {file for file in tracked if (ROOT / file).exists()}
    assert not {file for file in there if not file.startswith(".ci/")} - inside
    assert not {file for file in inside if file.endswith((".so", ".pyc")) or file.startswith("build/")}
    assert "PKG-INFO" in inside


def test_wheels_are_for_the_pythons_and_systems_we_name() -> None:
    wanted = PROJECT["tool"]["cibuildwheel"]
    listed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert wanted["build"] == [f"cp{version.replace('.', '')}-*" for version in listed]
    assert {*wanted["linux"]["archs"]} == {"x86_64", "aarch64"}
    assert {"linux", "macos", "windows"} <= wanted.keys()


def test_all_versions_are_pinned() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts/pins"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_image() -> None:
    """Small, without root, pinned, and what it copies is there."""
    steps = re.sub(r"\\\n", " ", DOCKERFILE)
    lines = [line for line in steps.splitlines() if line and not line.startswith("#")]
    stages = [re.split(r"^FROM ", part, flags=re.MULTILINE)[-1] for part in re.split(r"(?=^FROM )", steps, flags=re.M)]
    ends = {stage.split()[2]: stage for stage in stages if " AS " in stage.partition("\n")[0]}
    assert list(ends) == ["wheel", "base", "train", "serve"]  # the last one is built by default
    words = {
        "ARG",
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "ENV",
        "STOPSIGNAL",
        "ENTRYPOINT",
        "USER",
        "CMD",
        "EXPOSE",
        "HEALTHCHECK",
    }
    assert {line.split()[0] for line in lines if not line.startswith(" ")} <= words
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, f"{source} does not reach the build"
        if line.startswith("FROM ") and line.split()[1] != "base":
            assert re.search(r":3\.\d+-slim", line), "a small base with a version"
        if "apt-get install" in line:
            assert "--no-install-recommends" in line
            assert "rm -rf /var/lib/apt/lists" in line
        for part in re.findall(r"pip (?:install|wheel) [^&]*", line):
            hashed = "--require-hashes -r " in part
            ours = "--no-deps /wheels/clickfleet-" in part or "--no-deps --no-build-isolation" in part
            torch = "-c /etc/clickfleet/constraints.txt" in part and part.split()[-1] == "torch"
            assert hashed or ours or torch, f"{part} could install anything"
    for name in ("train", "serve"):
        assert re.search(r"^USER 10001$", ends[name], re.MULTILINE)
        assert ends[name].rindex("USER") > ends[name].rindex("RUN"), "nothing runs as another user after it"
    command = yaml.safe_load(re.findall(r"^CMD (\[.*\])$", ends["serve"], re.MULTILINE)[0])
    assert command[:2] == ["serve", "/model"]
    _options_exist(command)
    assert f"EXPOSE {command[command.index('--port') + 1]}" in ends["serve"]


def test_the_serving_image_has_what_serving_needs() -> None:
    listed = {
        line for line in (ROOT / "deploy/serve-requirements.txt").read_text().splitlines() if not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    texts = [*PROJECT["project"]["dependencies"], *extras["serve"], *extras["redis"]]
    assert listed == {Requirement(text).name for text in texts} - OF_TRAINING


@pytest.mark.parametrize("name", ["build", "serve", "train"])
def test_the_images_install_files_with_these_hashes_only(name: str) -> None:
    """`scripts/pins --check` compares the versions with constraints.txt."""
    text = (ROOT / f"deploy/{name}.lock").read_text()
    for line in text.replace("\\\n", " ").splitlines()[1:]:
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+(\s+--hash=sha256:[0-9a-f]{64}){1,2} *", line), line
    assert f"--require-hashes -r {'' if name == 'build' else '/etc/clickfleet/'}{name}.lock" in DOCKERFILE
    assert not re.search(r"^torch==", text, re.MULTILINE)


def test_the_manifest_trains_what_we_can_train() -> None:
    job = manifest("RayJob")["spec"]
    words = shlex.split(job["entrypoint"])
    assert words[:2] == ["clickfleet", "train"]
    config = checked(Config, yaml.safe_load(manifest("ConfigMap")["data"]["config.yaml"]), source="deploy/kuberay.yaml")
    assert config.cluster.address == "auto"
    cluster = job["rayClusterSpec"]
    pinned = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert [cluster["rayVersion"]] == pinned
    assert cluster.keys() <= {
        "rayVersion",
        "authOptions",
        "headGroupSpec",
        "workerGroupSpecs",
        "enableInTreeAutoscaling",
    }
    assert job.keys() <= {
        "entrypoint",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
        "rayClusterSpec",
        "suspend",
    }
    (group,) = cluster["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    cpus = group["replicas"] * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert cpus >= config.cluster.shards + config.cluster.workers * config.cluster.threads
    for pod in (cluster["headGroupSpec"]["template"]["spec"], group["template"]["spec"]):
        _check_pod(pod, "clickfleet-train")
        paths = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
        for path in (words[2], config.run.dir, *config.data.train):
            assert any(path.startswith(f"{mounted}/") for mounted in paths), f"{path} is on no volume"


def test_the_manifest_serves() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    _check_pod(pod, "clickfleet-serve")
    (container,) = pod["containers"]
    _options_exist(container["args"])
    routes = (ROOT / "src/clickfleet/serve/http.py").read_text() + (
        ROOT / "src/clickfleet/serve/json_api.py"
    ).read_text()
    names = {port["name"] for port in container["ports"]}
    for probe in ("readinessProbe", "livenessProbe"):
        assert f'"{container[probe]["httpGet"]["path"]}"' in routes
        assert container[probe]["httpGet"]["port"] in names
    assert {port["targetPort"] for port in manifest("Service")["spec"]["ports"]} <= names
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Service")["spec"]["selector"].items() <= labels.items()


def test_the_compose_file_names_what_is_there() -> None:
    services = COMPOSE["services"]
    assert COMPOSE.keys() == {"name", "services", "volumes"}
    known = {"image", "build", "command", "init", "restart", "stop_grace_period", "shm_size", "depends_on", "ports"}
    for service in services.values():
        assert service.keys() <= known | {"volumes"}
        assert f"-t {service['image']} " in DOCKERFILE
        if "build" in service:
            assert f" AS {service['build']['target']}\n" in DOCKERFILE
            assert (ROOT / "deploy" / service["build"]["context"] / "Dockerfile").is_file()
        assert all(isinstance(word, str) for word in service["command"])
        _options_exist(service["command"])
        assert set(service.get("depends_on", {})) <= set(services)
        for mounted in service["volumes"]:
            source = mounted.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / "deploy" / source).is_file(), source
    built = {service["image"] for service in services.values() if "build" in service}
    assert built == {service["image"] for service in services.values()}
    server = services["server"]
    assert server["volumes"] == ["shared:/shared:ro"]
    for option, port in zip(("--port", "--grpc-port"), server["ports"], strict=True):
        number = server["command"][server["command"].index(option) + 1]
        assert port == f"127.0.0.1:{number}:{number}"  # for this machine only
    assert "install --directory --owner 10001 /shared" in DOCKERFILE  # or the volume would belong to root


def test_the_page_on_docker_names_what_is_there() -> None:
    """There is no Docker engine here, so that its commands are only looked up."""
    page = (ROOT / "docs/docker.md").read_text()
    commands = re.findall(r"^\$ (docker .*)$", page, re.MULTILINE)
    assert len(commands) >= 10
    reference = (ROOT / "docs/reference/cli.md").read_text()
    for line in commands:
        words = shlex.split(line)
        if words[1] == "build":
            target = words[words.index("--target") + 1] if "--target" in words else "serve"
            assert words[words.index("-t") + 1] == f"clickfleet-{target}"
            assert f" AS {target}\n" in DOCKERFILE
            for argument in re.findall(r"--build-arg (\w+)=", line):
                assert f"ARG {argument}=" in DOCKERFILE
        elif words[1] == "compose":
            assert (ROOT / words[words.index("-f") + 1]).is_file()
            assert set(words[words.index("logs") + 2 :] if "logs" in words else []) <= set(COMPOSE["services"])
        else:
            image = next(i for i, word in enumerate(words) if re.fullmatch("clickfleet-(train|serve)", word))
            if command := words[image + 1 :]:
                assert f"\n## {command[0]}\n" in reference
                _options_exist(command)


def _check_pod(pod: dict[str, Any], image: str) -> None:
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"-t {image} " in DOCKERFILE
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert container["image"].startswith(f"{image}:")
        assert {"requests", "limits"} <= container["resources"].keys()
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == [manifest("PersistentVolumeClaim")["metadata"]["name"]]


def _options_exist(words: list[str]) -> None:
    """Every option of a command line is one that the command has."""
    reference = (ROOT / "docs/reference/cli.md").read_text()
    section = reference[reference.index(f"\n## {words[0]}\n") :].partition("\n## ")[2].partition("\n## ")[0]
    for word in words:
        if word.startswith("--"):
            assert f"`{word}`" in section, word
