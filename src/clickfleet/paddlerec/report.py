"""The migration report: each key is mapped, used, not applicable or unknown, with the reason."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass, field
from typing import Any, Literal

DEVICES = {
    "runner.use_xpu": "networks train on the CPU, on CUDA or on another device that torch knows (train.device)",
    "runner.use_npu": "networks train on the CPU, on CUDA or on another device that torch knows (train.device)",
    "runner.device": "use runner.use_gpu, or train.device=cuda",
    "runner.use_mkldnn": "torch always uses oneDNN on the CPU",
    "runner.enable_mkldnn": "torch always uses oneDNN on the CPU",
    "runner.enable_tensorRT": "it is for inference: clickfleet predict --engine TensorRT, clickfleet serve --engine TensorRT",
    "runner.precision": "networks train in float32; clickfleet serve --int8 serves quantised matrices",
    "runner.use_amp": "networks train in float32",
    "runner.amp_level": "networks train in float32",
    "runner.scale_loss": "networks train in float32, which needs no scaling of the loss",
    "runner.pure_bf16": "networks train in float32",
}
"""Words about devices and precision that have no effect here. A value that asks for something causes a warning."""
NOT_APPLICABLE = {
    **DEVICES,
    "runner.auc_num": "there is one AUC; runner.use_auc controls when it is reset",
    "runner.use_gloo": "workers communicate through Ray",
    "runner.model_path": "the name of the folder selects the network; static_model.py and dygraph_model.py are not run",
    "runner.infer_reader_type": "evaluation reads data in the same way as training",
    "runner.split_file_list": "files are always split over the workers; each is read once",
    "runner.example_count_method": "speed is reported in rows per second",
    "runner.need_dump": "clickfleet predict writes scores; clickfleet export --outputs exports any layer",
    "runner.dump_fields_path": "see runner.need_dump",
    "runner.dump_fields": "see runner.need_dump",
    "runner.dump_param": "the rows of a checkpoint are Arrow files, which DuckDB and pandas can read",
    "runner.fs_client.*": "name remote files by URL (s3://…, hdfs://…); fsspec reads them with its own settings",
    "runner.use_save_data": "clickfleet predict --out scores.npy writes every score",
    "runner.CE": "a switch for PaddleRec's own tests",
    "runner.need_train_dump": "see runner.need_dump",
    "runner.need_infer_dump": "see runner.need_dump",
    "runner.train_dump_fields_dir": "see runner.need_dump",
    "runner.infer_dump_fields_dir": "see runner.need_dump",
    "runner.need_prune": "exports contain only what serving needs",
    "runner.shuffle_thread_num": "shuffling needs no separate threads",
    "runner.preload_thread_num": "data.threads sets the threads that read the next pass",
    "runner.infer_thread_num": "use clickfleet evaluate --threads",
    "runner.infer_data_dir": "each pass is scored before it is trained on (online.validate)",
    "runner.data_dir": "name the files on the command line: clickfleet evaluate RUN FILES",
    "runner.batch_size": "use clickfleet evaluate --batch-size",
    "runner.init_model_path": "name the model on the command line: clickfleet evaluate RUN FILES",
    "runner.model_mode": "the type of a saved model is detected from its folder",
    "runner.shots_shuffle_list": "the report of a run shows the importance of every field",
    "runner.candidate_size": "see runner.shots_shuffle_list",
    "hyper_parameters.sparse_feature_number": "the table grows with the keys; it has no fixed size",
    "hyper_parameters.sparse_feature_num": "the table grows with the keys; it has no fixed size",
    "hyper_parameters.feature_number": "the table grows with the keys; it has no fixed size",
    "hyper_parameters.use_sparse": "gradients of rows are always sparse",
    "hyper_parameters.dict_dim": "the table grows with the keys; it has no fixed size",
    "hyper_parameters.distributed_embedding": "rows are distributed over shards in every cluster mode",
    "hyper_parameters.optimizer.strategy": "PaddleRec never reads it; runner.sync_mode sets the mode",
    "hyper_parameters.adam_d2sum": "Adam updates the dense weights, also on a cluster",
    "hyper_parameters.clip_by_norm": "PaddleRec reads but never uses it; dense.clip_norm=… clips by norm",
    "hyper_parameters.use_DataLoader": "data.format and data.threads say how rows are read",
    "hyper_parameters.is_sparse": "gradients of rows are always sparse",
    "hyper_parameters.dnn_use_bn": "PaddleRec reads but never uses it",
    "hyper_parameters.l2_reg_cross": "PaddleRec reads but never uses it; model.paddlerec=false model.l2=… applies L2 to the cross weights",
    "table_parameters.*.table_class": "all rows are in memory; table.memory_limit bounds it",
    "table_parameters.*.shard_num": "keys are distributed over 1024 virtual shards; for readers of its files, set publish.text_parts",
    "table_parameters.*.compress_in_save": "checkpoints are Arrow files",
    "table_parameters.*.enable_sparse_table_cache": "servers memory-map the rows they read",
    "table_parameters.*.sparse_table_cache_rate": "servers memory-map the rows they read",
    "table_parameters.*.sparse_table_cache_file_num": "servers memory-map the rows they read",
    "table_parameters.*.enable_revert": "clickfleet publish --rollback returns to an earlier entry",
    "table_parameters.*.shard_merge_rate": "there are no shard files to merge",
    "table_parameters.*.accessor.accessor_class": "rows always keep show and click; networks do not see them",
    "table_parameters.*.accessor.fea_dim": "follows from the width of a row",
    "table_parameters.*.accessor.ctr_accessor_param.ssd_unseenday_threshold": "there is no disk tier; table.memory_limit bounds the memory",
    "table_parameters.*.accessor.ctr_accessor_param.show_scale": "table.rule.scale sets the divisor of gradients",
    "table_parameters.*.accessor.table_accessor_save_param.*": "published entries are Arrow files and need no converter",
}


MAPPED = """
runner: train_data_dir test_data_dir train_reader_path infer_reader_path train_batch_size infer_batch_size epochs model_save_path
  infer_load_path model_init_path infer_start_epoch infer_end_epoch use_gpu use_auc use_visual use_inference
  save_inference_feed_varnames save_inference_fetch_varnames use_fleet reader_type num_workers seed thread_num pipe_command
  dataset_debug sync_mode geo_step warmup_model_path parse_ins_id parse_content inference split_interval split_per_pass start_day
  end_day print_interval checkpoint_per_pass save_delta_frequency save_first_base data_donefile data_sleep_second prefetch train_thread_num
hyper_parameters: optimizer.class optimizer.learning_rate reg sparse_inputs_slots sparse_feature_dim dense_input_dim fc_sizes
  num_field slot_num emb_dim layer_sizes cross_num is_Stacked use_low_rank_mixture low_rank num_experts bot_layer_sizes
  top_layer_sizes layer_sizes_cin layer_sizes_dnn use_embedding_gate use_hidden_gate window_size neg_num sparse_field_num
  dense_feature_dim fen_layers_size dense_layers_size att_head_num att_factor_dim sparse_num_field feature_name feature_dim
  dense_inputs_slots sparse_feature_size conv_kernel_width conv_filters new_maps pooling_width stride dnn_hidden_units
  dnn_dropout num_inputs input_size embedding_size width depth n_col pairs grad_c grad_mu optimizer.gamma pred_edges dim
  hidden_layer l0_para l0_weight l2_weight
  embedding_dim attn_layer_sizes head_num use_residual scaling use_wide
"""
"""Keys that `translate` maps or uses."""


def _names(text: str) -> list[str]:
    names, section = [], ""
    for word in text.split():
        if word.endswith(":"):
            section = word[:-1]
        else:
            names.append(f"{section}.{word}")
    return names


KNOWN = [*_names(MAPPED), *(key for key in NOT_APPLICABLE if "*" not in key)]


def reason(key: str) -> str | None:
    """Return why a key does not apply; None for an unknown key."""
    for pattern, why in NOT_APPLICABLE.items():
        if key == pattern or ("*" in pattern and fnmatch.fnmatchcase(key, pattern)):
            return why
    return None


Kind = Literal["mapped", "used", "not applicable", "unknown"]


@dataclass(frozen=True)
class ReportLine:
    key: str
    value: Any
    kind: Kind
    became: str = ""
    """Our setting, or the command that uses the key."""
    note: str = ""

    def __str__(self) -> str:
        end = f" ({self.note})" if self.note and self.became else f" {self.note}" if self.note else ""
        arrow = f"-> {self.became}" if self.became else f"{self.kind}:"
        return f"{self.key} = {shown(self.value)} {arrow}{end}"


@dataclass
class Report:
    """A line per key of the file, and general notes."""

    lines: list[ReportLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What the file asks for and does not get on this machine."""

    def add(self, key: str, value: Any, kind: Kind, became: str = "", note: str = "") -> None:
        self.lines.append(ReportLine(key, value, kind, became, note))

    def counts(self) -> dict[str, int]:
        kinds = [line.kind for line in self.lines]
        return {kind: kinds.count(kind) for kind in ("mapped", "used", "not applicable", "unknown")}

    def text(self) -> str:
        """Return the report for a terminal."""
        return "\n".join([*map(str, sorted(self.lines, key=lambda line: line.key)), *self.notes])

    def markdown(self, title: str) -> str:
        """Return the report for a file beside the new configuration."""
        rows = [f"# {title}", "", "| key | value | became | remark |", "|---|---|---|---|"]
        for line in sorted(self.lines, key=lambda line: line.key):
            cells = (line.key, f"`{shown(line.value)}`", line.became or line.kind, line.note)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join([*rows, "", *(f"* {note}" for note in self.notes), ""])

    def to_dict(self) -> list[dict[str, object]]:
        return [vars(line) for line in sorted(self.lines, key=lambda line: line.key)]


def shown(value: Any) -> str:
    """Format a value on one line and shorten it if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:56]} …"
