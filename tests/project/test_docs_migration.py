"""The guide from PaddleRec names every key, network and rule there is; that its blocks run is tested with those of all pages."""

from pathlib import Path

from clickfleet.paddlerec.networks import NETWORKS, POLICY, RULES
from clickfleet.paddlerec.report import KNOWN

PAGE = (Path(__file__).parents[2] / "docs/migration.md").read_text(encoding="utf-8")


def test_every_key_and_network_is_named() -> None:
    for key in KNOWN:
        section, _, name = key.partition(".")
        assert f"`{name}`" in PAGE, key
        assert f"### {section}" in PAGE
    for name in (*NETWORKS, *RULES):
        assert f"`{name}`" in PAGE, name
    for name in POLICY:
        assert name in PAGE
