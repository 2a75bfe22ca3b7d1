"""The data that a configuration names."""

import numpy as np
import pytest

from clickfleet.config.load import load
from clickfleet.data.dataset import open_source, schema_of
from clickfleet.data.schema import preset
from clickfleet.errors import ConfigError


@pytest.mark.parametrize("settings", [(), ("data.preset=criteo-slots",)])
def test_the_key_rule_of_the_configuration_replaces_that_of_the_schema(settings: tuple[str, ...]) -> None:
    base = preset("criteo-slots" if settings else "criteo")
    assert schema_of(load(None, settings)) == base
    assert schema_of(load(None, [*settings, "data.keys=py2 mod 1000001"])) == base.with_keys("py2 mod 1000001")
    with pytest.raises(ConfigError, match="cannot read the key rule ''"):
        schema_of(load(None, [*settings, "data.keys=''"]))


def test_a_format_without_a_schema_asks_for_one() -> None:
    with pytest.raises(ConfigError, match="the format csv has no default schema"):
        schema_of(load(None, ["data.format=csv", "data.keys=hash64"]))


def test_data_in_memory_needs_a_schema() -> None:
    arrays = {"click": np.array([0.0, 1.0])}
    with pytest.raises(ConfigError, match="data in memory needs a schema"):
        open_source(load(None), arrays, None)
    source = open_source(load(None, ["data.preset=criteo", "data.keys=raw"]), arrays, None)
    assert source.schema == preset("criteo").with_keys("raw")
