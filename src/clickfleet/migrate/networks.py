"""PaddleRec's networks: whose folder picks which of our models, and what their keys mean there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clickfleet.errors import ConfigError
from clickfleet.find import closest
from clickfleet.migrate.keys import Keys
from clickfleet.schema import Bucket, Dense, KeyRule, Schema, Slot

H = "hyper_parameters."
MOST_COLUMNS = 65_536
GUIDE = "networks of your own are ported, not run: see docs/migration.md, Porting a model of your own"


@dataclass(frozen=True)
class Network:
    """One of the originals."""

    model: str
    padding: bool = False
    """The row of key 0 is always zero."""
    settings: tuple[tuple[str, str], ...] = (("fc_sizes", "hidden"),)
    """Its key of hyper_parameters -> ours of `model`."""
    more: Callable[[Keys, int], None] | None = field(default=None, compare=False)
    """Takes further keys; given the width of a field."""
    slots_only: bool = False
    """Many multi-valued slots, no dense values, the row's first weight beside its factors (slot_dnn)."""


def _dcn_v2(keys: Keys, dim: int) -> None:
    if keys.has(H + "is_Stacked"):
        stacked = keys.truth(H + "is_Stacked")
        keys.to(H + "is_Stacked", "model.structure", "stacked" if stacked else "parallel")
    mixture = keys.truth(H + "use_low_rank_mixture")
    keys.used(H + "use_low_rank_mixture", "model.rank and model.experts" if mixture else "model.rank=null")
    for key, ours in (("low_rank", "rank"), ("num_experts", "experts")):
        if mixture:
            keys.to(H + key, f"model.{ours}", keys.whole(H + key, {"rank": 32, "experts": 4}[ours]))
        else:
            keys.skip(H + key, "use_low_rank_mixture is off")


def _dlrm(keys: Keys, dim: int) -> None:
    bottom, top = (
        keys.widths(H + "bot_layer_sizes", [512, 256, 64, dim]),
        keys.widths(H + "top_layer_sizes", [512, 256, 2]),
    )
    if bottom[-1] != dim:
        raise keys.wrong(H + "bot_layer_sizes", f"must end with sparse_feature_dim, {dim}")
    if top[-1] != 2:
        raise keys.wrong(H + "top_layer_sizes", "must end with the 2 classes")
    keys.to(H + "bot_layer_sizes", "model.bottom", bottom[:-1], "its last layer has the width of a field")
    keys.to(H + "top_layer_sizes", "model.top", top[:-1], "its last layer are the two classes")


def _xdeepfm(keys: Keys, dim: int) -> None:
    keys.skip(H + "fc_sizes", "the original never used it: layer_sizes_dnn are the widths")


NETWORKS = {
    "dnn": Network("dnn"),
    "fm": Network("fm", settings=()),
    "ffm": Network("ffm", settings=()),
    "gatenet": Network(
        "gate_dnn",
        settings=(
            ("fc_sizes", "hidden"),
            ("use_embedding_gate", "embedding_gate"),
            ("use_hidden_gate", "hidden_gate"),
        ),
    ),
    "deepfm": Network("deepfm", padding=True),
    "wide_deep": Network("wide_deep"),
    "dcn": Network("dcn", padding=True, settings=(("fc_sizes", "hidden"), ("cross_num", "layers"))),
    "dcn_v2": Network("dcn_v2", padding=True, settings=(("fc_sizes", "hidden"), ("cross_num", "layers")), more=_dcn_v2),
    "deepfefm": Network("deepfefm", padding=True),
    "dlrm": Network("dlrm", settings=(), more=_dlrm),
    "xdeepfm": Network("xdeepfm", settings=(("layer_sizes_cin", "cin"), ("layer_sizes_dnn", "hidden")), more=_xdeepfm),
    "slot_dnn": Network("slot_dnn", padding=True, slots_only=True),
}
ALIASES = {"gate_dnn": "gatenet", "gatednn": "gatenet", "gate": "gatenet", "dcnv2": "dcn_v2", "widedeep": "wide_deep"}
ALIASES |= {"ctr_dnn": "dnn", "ctr-dnn": "dnn", "slotdnn": "slot_dnn"}
FLAGS = ("use_embedding_gate", "use_hidden_gate")
UNUSED = {"fm": ("fc_sizes",), "ffm": ("fc_sizes",), "dlrm": ("fc_sizes",)}


def find_network(folder: Path, wanted: str | None) -> tuple[str, Network]:
    """The network of a configuration: by the name of its folder, unless a model of ours was asked for."""
    name = wanted or folder.resolve().name
    key = ALIASES.get(name.lower(), name.lower())
    for theirs, network in NETWORKS.items():
        if key in (theirs, network.model):
            return theirs, network
    asked = "model.name" if wanted else f"the folder {folder.resolve()}"
    raise ConfigError(
        f"{asked} names the network {name!r}, and PaddleRec's own are {', '.join(NETWORKS)}{closest(key, NETWORKS) if wanted else ''}",
        f"{GUIDE}; or name one of ours: model.name=dnn",
    )


def take_network(keys: Keys, name: str, network: Network) -> Schema:
    """The section `model` and the width of rows; the schema of its data."""
    keys.set("model.name", network.model)
    keys.set("model.paddlerec", True)
    dim = keys.whole(H + "sparse_feature_dim", keys.whole(H + "emb_dim", 9))
    if network.slots_only:
        keys.to(
            H + "sparse_feature_dim", "table.dim", dim - 1, "one weight of the width is the row's first-order weight"
        )
        keys.to(H + "emb_dim", "table.dim", dim - 1, "as sparse_feature_dim")
        widths = H + ("fc_sizes" if keys.has(H + "fc_sizes") else "layer_sizes")
        if keys.has(widths):
            keys.to(widths, "model.hidden", keys.widths(widths))
    else:
        keys.to(H + "sparse_feature_dim", "table.dim", dim)
        for key, ours in network.settings:
            if keys.has(H + key):
                taken = (
                    keys.truth(H + key)
                    if key in FLAGS
                    else keys.whole(H + key)
                    if key == "cross_num"
                    else keys.widths(H + key)
                )
                keys.to(H + key, f"model.{ours}", taken)
        for key in UNUSED.get(name, ()):
            keys.skip(H + key, "this network has no MLP of that name")
    if network.more is not None:
        network.more(keys, dim)
    if network.padding:
        keys.set("table.padding_key", 0)
    return _slot_schema(keys) if network.slots_only else _criteo_schema(keys, name)


def _criteo_schema(keys: Keys, name: str) -> Schema:
    """click, the slots 1 … n and a group of dense values, ids as they are."""
    slots, dense = (
        keys.whole(H + "sparse_inputs_slots", 27, least=2, most=MOST_COLUMNS) - 1,
        keys.whole(H + "dense_input_dim", 13, least=0, most=MOST_COLUMNS),
    )
    keys.used(H + "sparse_inputs_slots", f"the schema: {slots} slots and the label")
    keys.used(H + "dense_input_dim", f"the schema: {dense} dense columns")
    if keys.has(H + "num_field"):
        keys.used(H + "num_field", "the schema", "it follows from the slots and dense columns")
    columns = tuple(Dense(f"I{i}", source="dense_feature") for i in range(1, dense + 1))
    fields = [Slot(str(i)) for i in range(1, slots + 1)]
    if name == "deepfefm":
        # id = trunc(1e5·x + 1e6 + 2), which float32 rounds to sixteenths before it is cut: hence the shift by 1/32.
        shift = 2**-5 / 1e5
        fields += [
            Slot(f"D{i}", bucket=Bucket(f"I{i}", -shift, 1 - shift, 100_000, offset=1_000_002))
            for i in range(1, dense + 1)
        ]
    return Schema(columns, tuple(fields), label="click", keys=KeyRule("raw"))


def _slot_schema(keys: Keys) -> Schema:
    count = keys.whole(H + "slot_num", 300, most=MOST_COLUMNS)
    keys.used(H + "slot_num", f"the schema: slots 2 … {count + 1}")
    return Schema((), tuple(Slot(str(i), multi=True) for i in range(2, count + 2)), label="1", keys=KeyRule("raw"))
