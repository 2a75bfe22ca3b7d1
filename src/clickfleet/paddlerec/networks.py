"""PaddleRec's networks: the name of the folder selects one of our models, and the model determines the meaning of the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clickfleet.config.plugins import closest
from clickfleet.data.schema import Bucket, Dense, KeyRule, Schema, Slot
from clickfleet.errors import ConfigError
from clickfleet.paddlerec import field_networks as fields
from clickfleet.paddlerec import history_networks as events
from clickfleet.paddlerec import task_networks as tasks
from clickfleet.paddlerec.catalog import refusal
from clickfleet.paddlerec.keys import Keys

H, T = "hyper_parameters.", "table_parameters."
UNBOUNDED = [-3.4e38, 3.4e38]
RULES = {
    "SparseNaiveSGDRule": ("sgd", "naive"),
    "SparseAdaGradSGDRule": ("adagrad", "adagrad"),
    "StdAdaGradSGDRule": ("std_adagrad", "adagrad"),
    "SparseAdaGradV2SGDRule": ("adagrad_v2", "adagrad"),
    "SparseAdamSGDRule": ("adam", "adam"),
    "SparseSharedAdamSGDRule": ("shared_adam", "adam"),
}
SETTINGS = {
    "learning_rate": "lr",
    "initial_g2sum": "initial_g2sum",
    "beta1_decay_rate": "beta1",
    "beta2_decay_rate": "beta2",
    "ada_epsilon": "epsilon",
}
POLICY = {
    "nonclk_coeff": "nonclick_coeff",
    "click_coeff": "click_coeff",
    "base_threshold": "base_threshold",
    "delta_threshold": "delta_threshold",
    "delta_keep_days": "delta_keep_days",
    "show_click_decay_rate": "decay_rate",
    "delete_threshold": "delete_threshold",
    "delete_after_unseen_days": "delete_after_unseen_days",
}
POLICY_DEFAULTS = {"delta_keep_days": 16.0, "delete_after_unseen_days": 30.0}
"""PaddleRec's defaults for policies that have no default here."""


def take_optimizer(keys: Keys, name: str) -> None:
    """Translate the optimizer of the dense weights and of the rows."""
    kind = keys.text(H + "optimizer.class", NETWORKS[name].optimizer)
    rate = H + (
        "optimizer.learning_rate" if keys.has(H + "optimizer.learning_rate") else "optimizer.learning_rate_base_lr"
    )
    lr = keys.number(rate, 0.001)
    dense = {"sgd": "sgd", "adam": "adam", "adagrad": "adagrad", "adamw": "adamw"}.get(kind.lower())
    if dense is None:
        raise ConfigError(
            f"{keys.original.path}: {H}optimizer.class is {kind!r}{closest(kind, ['Adam', 'SGD', 'Adagrad', 'AdamW'])}"
        )
    always = NETWORKS[name].optimizer
    obeyed = always.lower() == dense or name == "deepfefm"
    note = "" if obeyed else f"takes effect here; PaddleRec always used {always}"
    rule: dict[str, object] = {"name": {"adagrad": "adagrad_v2", "adamw": "adam"}.get(dense, dense), "lr": lr}
    if dense == "adagrad":
        rule["scale"] = "batch"
        keys.set("dense.eps", 1e-6)
        note += ("; " if note else "") + "each row keeps one sum of squares"
    keys.map(H + "optimizer.class", "dense.optimizer", dense, note)
    keys.map(rate, "dense.lr", lr, "and table.rule.lr")
    keys.set("table.rule", {**rule, "bounds": UNBOUNDED})
    if keys.has(H + "reg"):
        if dense == "sgd":
            keys.map(H + "reg", "dense.weight_decay", keys.number(H + "reg"))
        else:
            keys.skip(
                H + "reg",
                "PaddleRec documents it as L2 for SGD but never uses it; train.loss.l2=… applies to any optimizer",
            )


def take_tables(keys: Keys, network: Network, schema: Schema) -> None:
    """Translate the settings of the table. A table with the name of a slot has those of the slot's rows."""
    names = sorted({key.split(".")[1] for key in keys.values if key.startswith(T) and key.count(".") >= 2})
    slots = {slot.name for slot in schema.slots}
    for name in names:
        if name in slots:
            _take_slot_table(keys, network, name)
    names = [name for name in names if name not in slots]
    if not names:
        return
    if len(names) > 1:
        raise ConfigError(
            f"{keys.original.path}: table_parameters has several tables ({', '.join(names)}), but a model has only one",
            "keep the table of the embedding; give the table of a single slot the name of the slot, and remove the others",
        )
    base = f"{T}{names[0]}.accessor."
    dim = keys.raw["table"]["dim"]
    if keys.has(base + "embedx_dim"):
        width = keys.integer(base + "embedx_dim", least=0)
        if width != dim + (0 if network.slots_only else -1):
            raise keys.wrong(
                base + "embedx_dim",
                f"must be {dim if network.slots_only else dim - 1} for an embedding of {dim + network.slots_only}",
            )
        keys.used(
            base + "embedx_dim",
            f"table.dim={dim}",
            "" if network.slots_only else "the width of the embedding, including the first-order weight",
        )
    if keys.has(base + "embedx_threshold"):
        score = keys.number(base + "embedx_threshold")
        keys.map(base + "embedx_threshold", "table.admission", f"score({score:g})" if score > 0 else "birth")
    for part, ours in (("embedx_sgd_param", "rule"), ("embed_sgd_param", "embed_rule")):
        _take_rule(keys, f"{base}{part}.", ours)
    if keys.has(base + "ctr_accessor_param.zero_init"):
        zero = keys.boolean(base + "ctr_accessor_param.zero_init")
        start = "zero" if zero else keys.raw["table"].get("init", {}).get("embed_range", "uniform(-0.0001, 0.0001)")
        keys.map(base + "ctr_accessor_param.zero_init", "table.init.embed", start)
    keys.raw["table"].get("init", {}).pop("embed_range", None)
    for theirs, ours in POLICY.items():
        key = f"{base}ctr_accessor_param.{theirs}"
        if keys.has(key):
            keys.map(key, f"table.{ours}", keys.number(key))
        elif ours in POLICY_DEFAULTS:
            keys.set(f"table.{ours}", POLICY_DEFAULTS[ours])


def _take_slot_table(keys: Keys, network: Network, slot: str) -> None:
    base, ours = f"{T}{slot}.accessor.", f"slots.{slot}"
    if keys.has(base + "embedx_dim"):
        width = keys.integer(base + "embedx_dim", least=0)
        keys.map(base + "embedx_dim", f"table.{ours}.dim", width + (0 if network.slots_only else 1))
    if keys.has(base + "embedx_threshold"):
        score = keys.number(base + "embedx_threshold")
        keys.map(base + "embedx_threshold", f"table.{ours}.admission", f"score({score:g})" if score > 0 else "birth")
    for part, rule in (("embedx_sgd_param", "rule"), ("embed_sgd_param", "embed_rule")):
        _take_rule(keys, f"{base}{part}.", f"{ours}.{rule}")
    for key in keys.values:
        if key.startswith(f"{base}ctr_accessor_param."):
            raise keys.wrong(key, "must stand in the table of all slots: rows of every slot live by the same rules")


def _take_rule(keys: Keys, base: str, ours: str) -> None:
    if not keys.has(base + "name"):
        return
    name = keys.text(base + "name")
    if name not in RULES:
        raise ConfigError(f"{keys.original.path}: {base}name is {name!r}{closest(name, RULES)}")
    rule, section = RULES[name]
    keys.map(base + "name", f"table.{ours}.name", rule)
    settings: dict[str, object] = {"name": rule}
    for key in [key for key in keys.values if key.startswith(base) and key != base + "name"]:
        group, _, setting = key.removeprefix(base).partition(".")
        if group != section:
            keys.skip(key, f"the rule {name} reads its settings from {section}")
        elif setting in SETTINGS and not (rule == "adagrad_v2" and setting == "initial_g2sum"):
            settings[SETTINGS[setting]] = keys.number(key)
            keys.used(key, f"table.{ours}.{SETTINGS[setting]}={keys.number(key):g}")
        elif setting == "initial_g2sum":
            settings["initial_g2sum"] = 0.0
            keys.skip(key, "this rule does not use it")
        elif setting == "initial_range" and ours not in ("rule", "embed_rule"):
            raise keys.wrong(
                key, "must stand in the table of all slots: rows of every slot have the same initial values"
            )
        elif setting == "initial_range":
            around = keys.number(key)
            start = f"uniform({-around:g}, {around:g})"
            keys.set("table.init." + ("embedx" if ours == "rule" else "embed_range"), start)
            keys.used(key, "table.init.embedx" if ours == "rule" else "table.init.embed if zero_init is off", start)
        elif setting == "weight_bounds":
            bounds = keys.values[key]
            if not isinstance(bounds, list) or len(bounds) != 2:
                raise keys.wrong(key, "must be two numbers")
            settings["bounds"] = [float(bounds[0]), float(bounds[1])]
            keys.used(key, f"table.{ours}.bounds")
    keys.set(f"table.{ours}", settings)


MOST_COLUMNS = 65_536
GUIDE = "port your own network: see docs/migration.md, Porting a model of your own"


@dataclass(frozen=True)
class Network:
    """One of PaddleRec's networks."""

    model: str
    padding: bool = False
    """Whether the row of key 0 is always zero."""
    settings: tuple[tuple[str, str], ...] = (("fc_sizes", "hidden"),)
    """Keys of hyper_parameters and the settings of `model` they map to."""
    more: Callable[[Keys, int], None] | None = field(default=None, compare=False)
    """Translates further keys; its second argument is the width of a field."""
    valued: bool = False
    """Whether every sample is one list of ids and one of values, for `num_field` fields (autoint, logistic_regression)."""
    original: bool = True
    """Whether `model` can compute the original formula (model.paddlerec)."""
    slots_only: bool = False
    """Whether the network has many multi-valued slots, no dense values, and a first-order weight in each row (slot_dnn)."""
    dim: str = "sparse_feature_dim"
    """The key of the width of an embedding."""
    schema: Callable[[Keys], Schema] | None = field(default=None, compare=False)
    """Returns the schema, if it is not that of Criteo-like data."""
    arrays: Callable[[Schema], list[Any]] | None = field(default=None, compare=False)
    """Returns what each array of a sample of its reader holds, if that is not the label, each slot, and dense values."""
    form: Callable[[Keys, Schema], dict[str, object]] | None = field(default=None, compare=False)
    """Returns our format for its data files, if they are not slot text."""
    runs_reader: bool = True
    """Whether its reader runs, if there is one. If not, our format reads the data."""
    optimizer: str = "Adam"
    """The optimizer that PaddleRec uses, whatever the configuration says."""
    files: str | None = None
    """Which files of a folder of data the reader gets, if it finds the others itself."""


def _dcn_v2(keys: Keys, dim: int) -> None:
    if keys.has(H + "is_Stacked"):
        stacked = keys.boolean(H + "is_Stacked")
        keys.map(H + "is_Stacked", "model.structure", "stacked" if stacked else "parallel")
    mixture = keys.boolean(H + "use_low_rank_mixture")
    keys.used(H + "use_low_rank_mixture", "model.rank and model.experts" if mixture else "model.rank=null")
    for key, ours in (("low_rank", "rank"), ("num_experts", "experts")):
        if mixture:
            keys.map(H + key, f"model.{ours}", keys.integer(H + key, {"rank": 32, "experts": 4}[ours]))
        else:
            keys.skip(H + key, "use_low_rank_mixture is off")


def _dlrm(keys: Keys, dim: int) -> None:
    bottom = keys.widths(H + "bot_layer_sizes", [512, 256, 64, dim])
    top = keys.widths(H + "top_layer_sizes", [512, 256, 2])
    if bottom[-1] != dim:
        raise keys.wrong(H + "bot_layer_sizes", f"must end with sparse_feature_dim, {dim}")
    if top[-1] != 2:
        raise keys.wrong(H + "top_layer_sizes", "must end with 2, the number of classes")
    keys.map(
        H + "bot_layer_sizes", "model.bottom", bottom[:-1], "the last layer, with the width of a field, is implied"
    )
    keys.map(H + "top_layer_sizes", "model.top", top[:-1], "the last layer, with the two classes, is implied")


def _xdeepfm(keys: Keys, dim: int) -> None:
    keys.skip(H + "fc_sizes", "PaddleRec never uses it; layer_sizes_dnn sets the widths")


def _autoint(keys: Keys, dim: int) -> None:
    widths = keys.widths(H + "attn_layer_sizes", [64, 64, 64])
    if len(set(widths)) > 1:
        raise keys.wrong(H + "attn_layer_sizes", "must be equal numbers: all attention layers have one width here")
    keys.map(H + "attn_layer_sizes", "model.width", widths[0], f"and model.layers={len(widths)}")
    keys.set("model.width", widths[0])
    keys.set("model.layers", len(widths))
    keys.map(H + "head_num", "model.heads", keys.integer(H + "head_num", 2))
    hidden = keys.values.get(H + "fc_sizes") or []
    keys.map(H + "fc_sizes", "model.hidden", keys.widths(H + "fc_sizes") if hidden else [])
    keys.set("model.hidden", hidden)
    if keys.has(H + "use_residual") and not keys.boolean(H + "use_residual"):
        raise keys.wrong(H + "use_residual", "must be true: attention layers always have a residual here")
    keys.used(H + "use_residual", "model.name=autoint", "always")
    keys.skip(H + "scaling", "the attention of the paper, which this model follows, is not scaled")
    keys.skip(H + "use_wide", "the model of the paper has no first-order weights; model.hidden adds an MLP beside it")


def _logistic_regression(keys: Keys, dim: int) -> None:
    keys.skip(H + "reg", "PaddleRec applies it as L1 to the rows; here the rule table.rule.name=ftrl has an L1 term")


_BY_ITS_PAPER = Network("", settings=(), original=False)
_LINES_OF_EVENTS = replace(
    _BY_ITS_PAPER,
    model="din",
    more=events.take_din,
    dim="item_emb_size",
    schema=events.din_schema,
    form=events.din_form,
    runs_reader=False,
    optimizer="SGD",
)
_CENSUS = replace(
    _BY_ITS_PAPER,
    model="share_bottom",
    more=tasks.take_share_bottom,
    schema=tasks.census_schema,
    arrays=tasks.census_arrays,
    form=tasks.census_form,
)
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
    "difm": Network("difm", settings=(), more=fields.take_difm),
    "fat_deepffm": Network("fat_deepffm", settings=(), more=fields.take_fat_deepffm),
    "flen": Network(
        "flen",
        settings=(),
        more=fields.take_flen,
        schema=fields.flen_schema,
        arrays=fields.flen_arrays,
        form=fields.flen_form,
        optimizer="Adagrad",
    ),
    "fgcnn": Network(
        "fgcnn",
        settings=(),
        more=fields.take_fgcnn,
        dim="feature_dim",
        schema=fields.fgcnn_schema,
        arrays=fields.fields_and_label,
    ),
    "autofis": Network(
        "autofis",
        settings=(),
        more=fields.take_autofis,
        dim="embedding_size",
        schema=fields.autofis_schema,
        form=fields.autofis_form,
        runs_reader=False,
    ),
    "sign": Network(
        "sign",
        settings=(),
        more=fields.take_sign,
        dim="dim",
        schema=fields.sign_schema,
        form=fields.sign_form,
        runs_reader=False,
        optimizer="Adagrad",
    ),
    "autoint": Network("autoint", settings=(), more=_autoint, valued=True, original=False),
    "logistic_regression": Network(
        "lr", padding=True, settings=(), more=_logistic_regression, valued=True, original=False
    ),
    "din": _LINES_OF_EVENTS,
    "dien": replace(_LINES_OF_EVENTS, model="dien", more=events.take_dien),
    "bst": replace(
        _LINES_OF_EVENTS,
        model="bst",
        more=events.take_bst,
        schema=events.bst_schema,
        form=events.bst_form,
        optimizer="Adagrad",
    ),
    "dmr": replace(
        _BY_ITS_PAPER,
        model="dmr",
        more=events.take_dmr,
        dim="main_embedding_size",
        schema=events.dmr_schema,
        arrays=events.dmr_arrays,
    ),
    "dsin": replace(
        _BY_ITS_PAPER,
        model="bst",
        more=events.take_dsin,
        dim="feat_embed_size",
        schema=events.dsin_schema,
        arrays=events.dsin_arrays,
        files="*_label.pkl",
    ),
    "share_bottom": _CENSUS,
    "mmoe": replace(_CENSUS, model="mmoe", more=tasks.take_mmoe),
    "ple": replace(_CENSUS, model="ple", more=tasks.take_ple),
    "esmm": replace(
        _BY_ITS_PAPER, model="esmm", more=tasks.take_esmm, schema=tasks.esmm_schema, arrays=tasks.esmm_arrays
    ),
    "aitm": replace(
        _BY_ITS_PAPER,
        model="aitm",
        more=tasks.take_aitm,
        dim="embedding_size",
        schema=tasks.aitm_schema,
        arrays=tasks.aitm_arrays,
    ),
}
ALIASES = {"gate_dnn": "gatenet", "gatednn": "gatenet", "gate": "gatenet", "dcnv2": "dcn_v2", "widedeep": "wide_deep"}
ALIASES |= {"ctr_dnn": "dnn", "ctr-dnn": "dnn", "slotdnn": "slot_dnn"}
FLAGS = ("use_embedding_gate", "use_hidden_gate")
UNUSED = dict.fromkeys(("fm", "ffm", "dlrm", "difm", "fat_deepffm", "flen"), ("fc_sizes",))


def find_network(folder: Path, wanted: str | None) -> tuple[str, Network]:
    """Return the network that the folder of a configuration names, or the one `wanted` by model.name."""
    name = wanted or folder.resolve().name
    key = ALIASES.get(name.lower(), name.lower())
    for theirs, network in NETWORKS.items():
        if key in (theirs, network.model):
            return theirs, network
    if wanted is None and (known := refusal(name)) is not None:
        raise ConfigError(known[0], f"{known[1]}; to port the network itself, see docs/migration.md")
    where = "in model.name" if wanted else f"from the name of the folder {folder.resolve()}"
    raise ConfigError(
        f"unknown network {name!r} {where}; networks that migrate: {', '.join(NETWORKS)}{closest(key, NETWORKS)}",
        f"{GUIDE}; if the folder only has another name, add the network: model.name=deepfm",
    )


def take_network(keys: Keys, name: str, network: Network) -> Schema:
    """Translate the section `model` and the width of rows. Return the schema of the data."""
    keys.set("model.name", network.model)
    if network.original:
        keys.set("model.paddlerec", True)
    width = H + ("embedding_dim" if keys.has(H + "embedding_dim") else "emb_dim")
    dim = keys.integer(H + network.dim, keys.integer(width, 9))
    if network.slots_only:
        keys.map(H + "sparse_feature_dim", "table.dim", dim - 1, "the first-order weight is not counted here")
        keys.map(H + "emb_dim", "table.dim", dim - 1, "same as sparse_feature_dim")
        widths = H + ("fc_sizes" if keys.has(H + "fc_sizes") else "layer_sizes")
        if keys.has(widths):
            keys.map(widths, "model.hidden", keys.widths(widths))
    else:
        keys.map(H + network.dim, "table.dim", dim)
        keys.map(H + "embedding_dim", "table.dim", dim)
        for key, ours in network.settings:
            if keys.has(H + key):
                taken = (
                    keys.boolean(H + key)
                    if key in FLAGS
                    else keys.integer(H + key)
                    if key == "cross_num"
                    else keys.widths(H + key)
                )
                keys.map(H + key, f"model.{ours}", taken)
        for key in UNUSED.get(name, ()):
            keys.skip(H + key, "this network does not use it")
    if network.more is not None:
        network.more(keys, dim)
    if network.padding:
        keys.set("table.padding_key", 0)
    if network.schema is not None:
        return network.schema(keys)
    if network.valued:
        return _valued_schema(keys)
    return _slot_schema(keys) if network.slots_only else _criteo_schema(keys, name)


def _criteo_schema(keys: Keys, name: str) -> Schema:
    """Return the schema of Criteo-like data: click, the slots 1 … n, a group of dense values, raw ids as keys."""
    slots = keys.integer(H + "sparse_inputs_slots", 27, least=2, most=MOST_COLUMNS) - 1
    dense = keys.integer(H + "dense_input_dim", 13, least=0, most=MOST_COLUMNS)
    keys.used(H + "sparse_inputs_slots", f"schema: {slots} slots and the label")
    keys.used(H + "dense_input_dim", f"schema: {dense} dense columns")
    if keys.has(H + "num_field"):
        keys.used(H + "num_field", "schema", "follows from the slots and dense columns")
    columns = tuple(Dense(f"I{i}", source="dense_feature") for i in range(1, dense + 1))
    fields = [Slot(str(i)) for i in range(1, slots + 1)]
    if name == "deepfefm":
        # id = trunc(1e5·x + 1e6 + 2). float32 rounds it to sixteenths before the truncation, hence the shift by 1/32.
        shift = 2**-5 / 1e5
        fields += [
            Slot(f"D{i}", bucket=Bucket(f"I{i}", -shift, 1 - shift, 100_000, offset=1_000_002))
            for i in range(1, dense + 1)
        ]
    return Schema(columns, tuple(fields), label="click", keys=KeyRule("raw"))


def _valued_schema(keys: Keys) -> Schema:
    """Return the schema of fields with values: each field has one id, whose row is multiplied by the value."""
    count = keys.integer(H + "num_field", 39, most=MOST_COLUMNS)
    keys.used(H + "num_field", f"schema: {count} slots with values")
    slots = tuple(Slot(str(i)) for i in range(1, count + 1))
    return Schema((), slots, label="click", keys=KeyRule("raw"), values=True)


def _slot_schema(keys: Keys) -> Schema:
    count = keys.integer(H + "slot_num", 300, most=MOST_COLUMNS)
    keys.used(H + "slot_num", f"schema: slots 2 … {count + 1}")
    return Schema((), tuple(Slot(str(i), multi=True) for i in range(2, count + 2)), label="1", keys=KeyRule("raw"))
