"""PaddleRec projects for tests: a folder named after a network, with its configuration, click logs, and readers."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from clickfleet.store import checkpoint

SLOTS, DENSE, DIM = 5, 3, 4

HYPER: dict[str, dict[str, Any]] = {
    "dnn": {},
    "fm": {},
    "ffm": {},
    "gatenet": {"use_embedding_gate": True, "use_hidden_gate": True},
    "deepfm": {},
    "wide_deep": {},
    "dcn": {"cross_num": 2, "l2_reg_cross": 0.00005, "clip_by_norm": 100.0, "is_sparse": True, "dnn_use_bn": False},
    "dcn_v2": {
        "cross_num": 2,
        "is_Stacked": True,
        "use_low_rank_mixture": True,
        "low_rank": 3,
        "num_experts": 2,
    },
    "deepfefm": {},
    "dlrm": {"bot_layer_sizes": [6, DIM], "top_layer_sizes": [5, 2], "num_field": SLOTS},
    "xdeepfm": {"layer_sizes_cin": [4, 3], "layer_sizes_dnn": [6, 5]},
    "difm": {
        "sparse_field_num": SLOTS,
        "sparse_feature_num": 60,
        "dense_feature_dim": DENSE,
        "att_factor_dim": 3,
        "att_head_num": 2,
        "fen_layers_size": [6, SLOTS + 1],
        "dense_layers_size": [5, DIM],
    },
    "fat_deepffm": {"layer_sizes_dnn": [6, 5]},
}

READER = '''
import numpy as np
from paddle.io import IterableDataset


class RecDataset(IterableDataset):
    """Slot text, a value of 0 where a slot does not come."""

    def __init__(self, file_list, config):
        super(RecDataset, self).__init__()
        self.file_list = file_list
        self.count = config["hyper_parameters.sparse_inputs_slots"] - 1
        self.width = config["hyper_parameters.dense_input_dim"]
        self.inference = config.get("runner.inference", False)

    def __iter__(self):
        for file in self.file_list:
            with open(file) as lines:
                for line in lines:
                    found = {}
                    for token in line.strip().split(" "):
                        name, value = token.split(":")
                        found.setdefault(name, []).append(value)
                    names = [str(i) for i in range(1, self.count + 1)]
                    out = [] if self.inference else [np.array(found["click"]).astype("int64")]
                    out += [np.array(found.get(name, ["0"])).astype("int64") for name in names]
                    yield out + [np.array(found["dense_feature"]).astype("float32")]
'''

QUEUE_READER = """
import sys
import paddle.distributed.fleet as fleet


class Reader(fleet.MultiSlotDataGenerator):
    def init(self, config):
        self.count = config.get("hyper_parameters.sparse_inputs_slots") - 1

    def generate_sample(self, line):
        def samples():
            found = {}
            for token in line.strip().split(" "):
                name, value = token.split(":")
                found.setdefault(name, []).append(float(value) if name == "dense_feature" else int(value))
            names = ["click"] + [str(i) for i in range(1, self.count + 1)] + ["dense_feature"]
            yield [(name, found.get(name, [0])) for name in names]

        return samples


if __name__ == "__main__":
    sys.path.append(sys.argv[2])
    import common_ps

    reader = Reader()
    reader.init(common_ps.YamlHelper().load_yaml(sys.argv[1]))
    reader.run_from_stdin()
"""


def slot_lines(rows: int, seed: int = 0) -> str:
    """Slot text whose clicks follow the first slot."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(rows):
        ids = [int(rng.integers(1, 9)) + 10 * slot for slot in range(SLOTS)]
        click = int(rng.random() < (0.8 if ids[0] % 2 else 0.2))
        dense = " ".join(f"dense_feature:{x:.4f}" for x in rng.random(DENSE))
        out.append(f"click:{click} {dense} " + " ".join(f"{s + 1}:{key}" for s, key in enumerate(ids)))
    return "\n".join(out) + "\n"


def project(folder: Path, network: str, rows: int = 40, **runner: Any) -> Path:
    """The configuration of a network over slot text; relative model paths are of the current folder."""
    home = folder / network
    for part, seed in (("train", 1), ("test", 2)):
        (home / "data" / part).mkdir(parents=True)
        (home / "data" / part / "part-0").write_text(slot_lines(rows, seed))
    config = {
        "runner": {
            "train_data_dir": "data/train",
            "train_reader_path": "reader",
            "use_gpu": False,
            "use_auc": True,
            "train_batch_size": 8,
            "epochs": 2,
            "print_interval": 2,
            "model_save_path": "output",
            "test_data_dir": "data/test",
            "infer_reader_path": "reader",
            "infer_batch_size": 8,
            "infer_load_path": "output",
            "infer_start_epoch": 0,
            "infer_end_epoch": 2,
            "thread_num": 1,
            **runner,
        },
        "hyper_parameters": {
            "optimizer": {"class": "Adam", "learning_rate": 0.01, "strategy": "async"},
            "sparse_inputs_slots": SLOTS + 1,
            "sparse_feature_number": 60,
            "sparse_feature_dim": DIM,
            "dense_input_dim": DENSE,
            "fc_sizes": [6, 5],
            "distributed_embedding": 0,
            **HYPER.get(network, {}),
        },
    }
    path = home / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


ONLINE: dict[str, Any] = {
    "runner": {
        "train_data_dir": "days",
        "train_batch_size": 8,
        "model_save_path": "stream",
        "start_day": "20190720",
        "end_day": "20190720",
        "split_interval": 720,
        "split_per_pass": 1,
        "checkpoint_per_pass": 1,
        "save_delta_frequency": 1,
        "data_sleep_second": 0.05,
        "train_thread_num": 1,
        "prefetch": True,
        "reader_type": "InMemoryDataset",
    },
    "table_parameters": {
        "embedding": {
            "shard_num": 10,
            "accessor": {
                "accessor_class": "SparseAccessor",
                "fea_dim": 7,
                "embedx_dim": 4,
                "embedx_threshold": 2,
                "embed_sgd_param": {
                    "name": "SparseAdaGradSGDRule",
                    "adagrad": {
                        "learning_rate": 0.05,
                        "initial_g2sum": 3.0,
                        "initial_range": 0.0001,
                        "weight_bounds": [-10.0, 10.0],
                    },
                },
                "embedx_sgd_param": {
                    "name": "SparseAdaGradSGDRule",
                    "adagrad": {
                        "learning_rate": 0.04,
                        "initial_g2sum": 3.0,
                        "initial_range": 0.01,
                        "weight_bounds": [-9.0, 9.0],
                    },
                    "adam": {"learning_rate": 1.0},
                },
                "ctr_accessor_param": {"nonclk_coeff": 0.2, "show_click_decay_rate": 0.9, "base_threshold": 0.0},
            },
        }
    },
    "hyper_parameters": {
        "optimizer": {"class": "Adam", "learning_rate": "5e-6"},
        "emb_dim": 5,
        "sparse_feature_dim": 5,
        "slot_num": 3,
        "layer_sizes": [6],
    },
}
"""config_online.yaml of slot_dnn, over days of two folders."""


def write_slot_days(folder: Path, days: list[str], rows: int, parts: int = 1, done: str | None = None) -> None:
    """Days of two folders with logs of slot_dnn: a click, slots 2 and 4, and no slot 3."""
    rng = np.random.default_rng(3)
    for day in days:
        for split in ("0000", "1200"):
            (folder / day / split).mkdir(parents=True)
            for part in range(parts):
                lines = [
                    f"{rng.integers(2)}:1 {rng.integers(1, 9)}:2 {2**63 + int(rng.integers(9))}:4" for _ in range(rows)
                ]
                (folder / day / split / f"part-{part}").write_text("\n".join(lines) + "\n")
            if done:
                (folder / day / split / done).touch()


def write_pickle(path: Path, content: Any, protocol: int = 2) -> Path:
    """As paddle.save writes: a pickle, here by the module names of NumPy 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = pickle.dumps(content, protocol)
    path.write_bytes(data.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n") if protocol == 2 else data)
    return path


def rows_of(run: Path) -> dict[str, bytes]:
    """The rows and the network of a run's last checkpoint."""
    path = checkpoint.latest(run / "checkpoints")
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name.startswith(("rows-", "dense."))}
