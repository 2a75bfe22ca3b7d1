"""Tables of single slots in PaddleRec's table_parameters become `table.slots`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from clickfleet.errors import ConfigError
from clickfleet.paddlerec import exporting, original, translation
from clickfleet.store.rules import rule
from clickfleet.training.learner import Learner


def translated(folder: Path, tables: dict[str, Any]) -> translation.Translated:
    home = folder / "slot_dnn"
    home.mkdir(parents=True, exist_ok=True)
    config = {
        "runner": {"train_data_dir": "data", "train_batch_size": 8, "epochs": 1, "model_save_path": "output"},
        "hyper_parameters": {"sparse_feature_dim": 3, "slot_num": 2, "fc_sizes": [3]},
        "table_parameters": {name: {"accessor": accessor} for name, accessor in tables.items()},
    }
    (home / "config.yaml").write_text(yaml.safe_dump(config))
    return translation.translate(original.read(home / "config.yaml"))


SHARED = {"embedx_dim": 2, "embedx_threshold": 10, "embedx_sgd_param": {"name": "SparseAdaGradSGDRule"}}


def test_a_table_named_like_a_slot_is_the_table_of_that_slot(tmp_path: Path) -> None:
    own = {
        "embedx_dim": 5,
        "embedx_threshold": 0,
        "embedx_sgd_param": {"name": "SparseAdamSGDRule", "adam": {"learning_rate": 0.02}},
    }
    found = translated(tmp_path, {"embedding": SHARED, "3": own})
    assert found.config.table.dim == 2
    assert found.config.table.slots["3"].dim == 5
    table = Learner(found.config, found.schema).table
    assert [one.factors for one in table.classes] == [2, 5]
    assert [str(one.admission) for one in table.classes] == ["score(10.0)", "birth"]
    assert table.classes[0].rule.name == "adagrad"
    assert table.classes[1].rule.name == "adam"
    assert dict(table.classes[1].rule.settings)["lr"] == pytest.approx(0.02)
    assert table.classes[1].rule != rule("adam")
    text = found.report.markdown("report")
    assert "table.slots.3.dim" in text
    assert "table.slots.3.admission" in text
    with pytest.raises(ConfigError, match="cannot be written as a table of PaddleRec"):
        exporting.TextLayout(Learner(found.config, found.schema))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"embedding": SHARED, "other": SHARED}, "several tables .embedding, other."),
        ({"embedding": SHARED, "3": {"ctr_accessor_param": {"show_click_decay_rate": 0.9}}}, "table of all slots"),
        (
            {
                "embedding": SHARED,
                "3": {"embedx_sgd_param": {"name": "SparseAdaGradSGDRule", "adagrad": {"initial_range": 0.1}}},
            },
            "same initial values",
        ),
    ],
)
def test_what_a_slot_cannot_have_is_refused(tables: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        translated(tmp_path, tables)
