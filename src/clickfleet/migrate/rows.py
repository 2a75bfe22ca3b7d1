"""`table_parameters` and the optimizer -> the sections `table` and `dense`."""

from __future__ import annotations

from typing import Any

from clickfleet.errors import ConfigError
from clickfleet.find import closest
from clickfleet.migrate.keys import Keys
from clickfleet.migrate.networks import H, Network

T = "table_parameters."
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
LAYER_R = {"delta_keep_days": 16.0, "delete_after_unseen_days": 30.0}
"""What the original took for policies that a configuration leaves out, where ours is none."""


def take_optimizer(keys: Keys, name: str) -> None:
    """Dense weights and rows learn by the optimizer that the file names."""
    kind = keys.text(H + "optimizer.class", "Adam")
    lr = keys.real(H + "optimizer.learning_rate", 0.001)
    dense = {"sgd": "sgd", "adam": "adam", "adagrad": "adagrad", "adamw": "adamw"}.get(kind.lower())
    if dense is None:
        raise ConfigError(
            f"{keys.original.path}: {H}optimizer.class is {kind!r}{closest(kind, ['Adam', 'SGD', 'Adagrad', 'AdamW'])}"
        )
    note = "" if dense == "adam" or name == "deepfefm" else "obeyed here; the old tools ran Adam whatever this said"
    rule: dict[str, Any] = {"name": {"adagrad": "adagrad_v2", "adamw": "adam"}.get(dense, dense), "lr": lr}
    if dense == "adagrad":
        rule["scale"] = "batch"
        keys.set("dense.eps", 1e-6)
        note += "; rows keep one sum of squares each"
    keys.to(H + "optimizer.class", "dense.optimizer", dense, note)
    keys.to(H + "optimizer.learning_rate", "dense.lr", lr, "and table.rule.lr")
    keys.set("table.rule", {**rule, "bounds": UNBOUNDED})
    if keys.has(H + "reg"):
        if dense == "sgd":
            keys.to(H + "reg", "dense.weight_decay", keys.real(H + "reg"))
        else:
            keys.skip(
                H + "reg",
                "L2 for SGD, documented and never used by the original; train.loss.l2=… does it for any optimizer",
            )


def take_tables(keys: Keys, network: Network) -> None:
    """The settings of the one table that there is."""
    names = sorted({key.split(".")[1] for key in keys.values if key.startswith(T) and key.count(".") >= 2})
    if not names:
        return
    if len(names) > 1:
        raise ConfigError(
            f"{keys.original.path}: table_parameters has several tables ({', '.join(names)}), and a model has one",
            "keep the embedding's, and remove the others",
        )
    base = f"{T}{names[0]}.accessor."
    dim = keys.raw["table"]["dim"]
    if keys.has(base + "embedx_dim"):
        width = keys.whole(base + "embedx_dim", least=0)
        if width != dim + (0 if network.slots_only else -1):
            raise keys.wrong(
                base + "embedx_dim",
                f"must be {dim if network.slots_only else dim - 1} for an embedding of {dim + network.slots_only}",
            )
        keys.used(
            base + "embedx_dim",
            f"table.dim={dim}",
            "" if network.slots_only else "the embedding's width, first weight included",
        )
    if keys.has(base + "embedx_threshold"):
        score = keys.real(base + "embedx_threshold")
        keys.to(base + "embedx_threshold", "table.admission", f"score({score:g})" if score > 0 else "birth")
    for part, ours in (("embedx_sgd_param", "rule"), ("embed_sgd_param", "embed_rule")):
        _take_rule(keys, f"{base}{part}.", ours)
    if keys.has(base + "ctr_accessor_param.zero_init"):
        zero = keys.truth(base + "ctr_accessor_param.zero_init")
        start = "zero" if zero else keys.raw["table"].get("init", {}).get("embed_range", "uniform(-0.0001, 0.0001)")
        keys.to(base + "ctr_accessor_param.zero_init", "table.init.embed", start)
    keys.raw["table"].get("init", {}).pop("embed_range", None)
    for theirs, mine in POLICY.items():
        key = f"{base}ctr_accessor_param.{theirs}"
        if keys.has(key):
            keys.to(key, f"table.{mine}", keys.real(key))
        elif mine in LAYER_R:
            keys.set(f"table.{mine}", LAYER_R[mine])


def _take_rule(keys: Keys, base: str, ours: str) -> None:
    if not keys.has(base + "name"):
        return
    name = keys.text(base + "name")
    if name not in RULES:
        raise ConfigError(f"{keys.original.path}: {base}name is {name!r}{closest(name, RULES)}")
    rule, section = RULES[name]
    keys.to(base + "name", f"table.{ours}.name", rule)
    settings: dict[str, Any] = {"name": rule}
    for key in [key for key in keys.values if key.startswith(base) and key != base + "name"]:
        group, _, setting = key.removeprefix(base).partition(".")
        if group != section:
            keys.skip(key, f"the rule is {name}, which has its settings under {section}")
        elif setting in SETTINGS and not (rule == "adagrad_v2" and setting == "initial_g2sum"):
            settings[SETTINGS[setting]] = keys.real(key)
            keys.used(key, f"table.{ours}.{SETTINGS[setting]}={keys.real(key):g}")
        elif setting == "initial_g2sum":
            settings["initial_g2sum"] = 0.0
            keys.skip(key, "this rule never used it")
        elif setting == "initial_range":
            around = keys.real(key)
            start = f"uniform({-around:g}, {around:g})"
            keys.set("table.init." + ("embedx" if ours == "rule" else "embed_range"), start)
            keys.used(key, "table.init.embedx" if ours == "rule" else "table.init.embed where zero_init is off", start)
        elif setting == "weight_bounds":
            bounds = keys.values[key]
            if not isinstance(bounds, list) or len(bounds) != 2:
                raise keys.wrong(key, "must be two numbers")
            settings["bounds"] = [float(bounds[0]), float(bounds[1])]
            keys.used(key, f"table.{ours}.bounds")
    keys.set(f"table.{ours}", settings)
