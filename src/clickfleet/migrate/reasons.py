"""Keys of PaddleRec that have no meaning here, each with the reason; and all keys that are known."""

from __future__ import annotations

import fnmatch

NOT_APPLICABLE = {
    "runner.print_interval": "progress is shown and logged by time, and every point of the curves is in metrics.jsonl and tensorboard/",
    "runner.auc_num": "there is one AUC, and it starts anew as runner.use_auc says",
    "runner.use_xpu": "networks compute on the CPU or on CUDA (train.device)",
    "runner.use_npu": "networks compute on the CPU or on CUDA (train.device)",
    "runner.use_gloo": "workers meet through Ray",
    "runner.model_path": "the network is picked by the folder's name; static_model.py and dygraph_model.py are not run",
    "runner.infer_reader_type": "evaluation reads as training does",
    "runner.split_file_list": "the files are always split over the workers, each read once",
    "runner.example_count_method": "speed is told in rows",
    "runner.need_dump": "clickfleet predict writes scores, clickfleet export --outputs any layer",
    "runner.dump_fields_path": "see runner.need_dump",
    "runner.dump_fields": "see runner.need_dump",
    "runner.dump_param": "rows of a checkpoint are Arrow files that DuckDB or pandas read",
    "runner.fs_client.*": "remote files are named by URL (s3://…, hdfs://…) and read by fsspec with its own settings",
    "runner.use_save_data": "clickfleet predict --out scores.npy writes every score",
    "runner.CE": "a switch of the old tools' own tests",
    "runner.need_train_dump": "see runner.need_dump",
    "runner.need_infer_dump": "see runner.need_dump",
    "runner.train_dump_fields_dir": "see runner.need_dump",
    "runner.infer_dump_fields_dir": "see runner.need_dump",
    "runner.need_prune": "exports are pruned to what they need",
    "runner.shuffle_thread_num": "shuffling needs no threads of its own",
    "runner.preload_thread_num": "the next pass is read by data.threads",
    "runner.infer_thread_num": "clickfleet evaluate --threads",
    "runner.infer_data_dir": "each pass is scored before it is trained on (online.validate)",
    "runner.data_dir": "name the files: clickfleet evaluate RUN FILES",
    "runner.batch_size": "clickfleet evaluate --batch-size",
    "runner.init_model_path": "name the model: clickfleet evaluate RUN FILES",
    "runner.model_mode": "what is loaded is told by the folder itself",
    "runner.shots_shuffle_list": "the report of a run shows the importance of every field",
    "runner.candidate_size": "see runner.shots_shuffle_list",
    "hyper_parameters.sparse_feature_number": "the table grows as keys come; there is no vocabulary to size",
    "hyper_parameters.dict_dim": "the table grows as keys come; there is no vocabulary to size",
    "hyper_parameters.distributed_embedding": "rows are spread over shards in every cluster mode",
    "hyper_parameters.optimizer.strategy": "runner.sync_mode says it; the old tools never read this",
    "hyper_parameters.adam_d2sum": "dense weights are moved by Adam itself, on a cluster too",
    "hyper_parameters.clip_by_norm": "read and never used by the original; dense.clip_norm=… does what it says",
    "hyper_parameters.is_sparse": "gradients of rows are always sparse",
    "hyper_parameters.dnn_use_bn": "read and never used by the original",
    "hyper_parameters.l2_reg_cross": "read and never used by the original; model.paddlerec=false model.l2=… does what it says",
    "table_parameters.*.table_class": "all rows are in memory, bounded by table.memory_limit",
    "table_parameters.*.shard_num": "keys are spread over 1024 virtual shards, so the number of shards may change",
    "table_parameters.*.compress_in_save": "checkpoints are Arrow files",
    "table_parameters.*.enable_sparse_table_cache": "servers map the rows they read",
    "table_parameters.*.sparse_table_cache_rate": "servers map the rows they read",
    "table_parameters.*.sparse_table_cache_file_num": "servers map the rows they read",
    "table_parameters.*.enable_revert": "clickfleet publish --rollback returns to an earlier entry",
    "table_parameters.*.shard_merge_rate": "there are no shard files to merge",
    "table_parameters.*.accessor.accessor_class": "rows keep show and click either way, and networks do not see them",
    "table_parameters.*.accessor.fea_dim": "it follows from the row's width",
    "table_parameters.*.accessor.ctr_accessor_param.ssd_unseenday_threshold": "there is no disk tier; table.memory_limit bounds the memory",
    "table_parameters.*.accessor.ctr_accessor_param.show_scale": "table.rule.scale says what gradients are divided by",
    "table_parameters.*.accessor.table_accessor_save_param.*": "published entries are Arrow files and need no converter",
}

MAPPED = """
runner: train_data_dir test_data_dir train_reader_path infer_reader_path train_batch_size infer_batch_size epochs model_save_path
  infer_load_path model_init_path infer_start_epoch infer_end_epoch use_gpu use_auc use_visual use_inference
  save_inference_feed_varnames save_inference_fetch_varnames use_fleet reader_type num_workers seed thread_num pipe_command
  dataset_debug sync_mode geo_step warmup_model_path parse_ins_id parse_content inference split_interval split_per_pass start_day
  end_day checkpoint_per_pass save_delta_frequency save_first_base data_donefile data_sleep_second prefetch train_thread_num
hyper_parameters: optimizer.class optimizer.learning_rate reg sparse_inputs_slots sparse_feature_dim dense_input_dim fc_sizes
  num_field slot_num emb_dim layer_sizes cross_num is_Stacked use_low_rank_mixture low_rank num_experts bot_layer_sizes
  top_layer_sizes layer_sizes_cin layer_sizes_dnn use_embedding_gate use_hidden_gate window_size neg_num
"""
"""Keys that become something, as `translate` has them."""


def _names(text: str) -> list[str]:
    found, section = [], ""
    for word in text.split():
        if word.endswith(":"):
            section = word[:-1]
        else:
            found.append(f"{section}.{word}")
    return found


KNOWN = [*_names(MAPPED), *(key for key in NOT_APPLICABLE if "*" not in key)]


def reason(key: str) -> str | None:
    """Why a key has no meaning here; None where that is not known."""
    for pattern, why in NOT_APPLICABLE.items():
        if key == pattern or ("*" in pattern and fnmatch.fnmatchcase(key, pattern)):
            return why
    return None
