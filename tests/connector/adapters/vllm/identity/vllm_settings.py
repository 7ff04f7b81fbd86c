"""A verdict for each field of vLLM's configuration, 0.32's and 0.33's, by class and reason."""

from __future__ import annotations

OWN = "in the namespace: a field of its own (identity.CONFIGURATION)"
MADE = "in the namespace, or in what it is made of: weights, forward, spec, layers, topology"
KEYS = "in the keys: tokens, media, adapters, or how they are hashed"
REFUSED = "refused at start"
ROUNDING = "rounding: which kernel sums, in which order, beside what"
PART = "a part with fields of its own"
NOT = "shapes no byte: place, size, time, scheduling, watching"
SAMPLED = "which token is sampled, not what one is computed to"
ENCODED = "embeddings from elsewhere, which are the encoder's of these weights"

VERDICTS: dict[str, dict[str, str]] = {
    "VllmConfig": {
        OWN: "additional_config",
        PART: """
            attention_config aux_output_config cache_config compilation_config device_config
            diffusion_config ec_manager_config ec_transfer_config engram_config kernel_config
            kv_events_config kv_transfer_config load_config logging_config lora_config mamba_config
            model_config observability_config offload_config parallel_config profiler_config
            reasoning_config scheduler_config speculative_config structured_outputs_config
            watchdog_config watermark_config weight_transfer_config
        """,
        MADE: "instance_id quant_config",
        ROUNDING: "optimization_level performance_mode",
        NOT: "shutdown_timeout",
    },
    "ModelConfig": {
        OWN: "code_revision model_class_overrides model_impl",
        MADE: """
            config_format disable_sliding_window dtype hf_config hf_config_path
            hf_overrides hf_text_config max_model_len model model_weights
            quantization quantization_config revision spec_target_max_model_len
            trust_remote_code word_embeddings_untied_by_checkpoint
        """,
        PART: "multimodal_config pooler_config",
        KEYS: """
            allowed_local_media_path allowed_media_domains enable_prompt_embeds io_processor_plugin
            renderer_num_workers skip_tokenizer_init tokenizer tokenizer_mode tokenizer_revision
        """,
        ROUNDING: "disable_cascade_attn enforce_eager",
        SAMPLED: """
            enable_trace_replay generation_config logits_processors logprobs_mode max_logprobs
            override_generation_config return_sampling_mask seed use_fp64_gumbel
        """,
        NOT: """
            allow_deprecated_quantization convert enable_cumem_allocator enable_nccl_comm_suspend
            enable_sleep_mode hf_token is_submodel_config runner served_model_name
            sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names
        """,
    },
    "QuantizationConfigArgs": {MADE: "ignore linear moe targets"},
    "QuantSpec": {MADE: "activation weight"},
    "QuantKey": {MADE: "dtype scale scale2 symmetric"},
    "ScalarType": {MADE: "_finite_values_only bias exponent mantissa nan_repr signed"},
    "ScaleDesc": {MADE: "dtype group_shape static"},
    "PoolerConfig": {
        REFUSED: "pooling_type seq_pooling_type tok_pooling_type",
        NOT: """
            dimensions enable_chunked_processing enable_flash_late_interaction logit_mean
            logit_sigma max_embed_len returned_token_ids step_tag_id task use_activation
        """,
    },
    "MultiModalConfig": {
        OWN: """
            mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_method
            video_pruning_rate
        """,
        MADE: "mm_processor_kwargs",
        KEYS: """
            enable_mm_embeds interleave_mm_strings language_model_only limit_per_prompt
            media_io_kwargs mm_hasher_algorithm mm_processor_cache_gb
        """,
        ENCODED: "allow_missing_mm_embeddings mm_encoder_only",
        ROUNDING: "mm_device_do_normalize mm_encoder_attn_backend mm_encoder_tp_mode",
        NOT: """
            mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_ipc_gpu_memory_gb
            mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc
            skip_mm_profiling
        """,
    },
    "CacheConfig": {
        OWN: "use_replayssm",
        MADE: """
            block_size cache_dtype effective_attention_block_size hash_block_size
            is_attention_free kv_cache_dtype_skip_layers kv_cache_layout mamba_block_size
            mamba_cache_dtype mamba_cache_mode mamba_page_size_padded mamba_ssm_cache_dtype
            replayssm_buffer_len skip_page_size_padded sliding_window swa_bounded_replay
            use_kda_recoverssm user_specified_block_size
        """,
        KEYS: "enable_prefix_caching prefix_caching_hash_algo",
        NOT: """
            _block_size_resolved cache_hit_alignment_tokens enable_mamba_shared_prefix_checkpoint
            gpu_memory_utilization kv_cache_max_concurrency kv_cache_memory_bytes
            kv_cache_size_tokens kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill
            num_cpu_blocks num_gpu_blocks num_gpu_blocks_override prefix_cache_retention_interval
            prefix_match_unit simple_cpu_offload_num_blocks
        """,
    },
    "ParallelConfig": {
        MADE: """
            _allow_auto_resolve_cp_interleave_size cp_kv_cache_interleave_size
            dcp_kv_cache_interleave_size decode_context_parallel_size is_moe_model
            pipeline_parallel_size prefill_context_parallel_size rank tensor_parallel_size
            world_size
        """,
        PART: "eplb_config fault_tolerance_config",
        ROUNDING: """
            all2all_backend dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
            dcp_q_replicate disable_custom_all_reduce enable_batch_sharded_sampling enable_dbo
            enable_ep_weight_filter enable_eplb enable_expert_parallel enable_hc_sp
            enable_shm_tensor_arena expert_placement_strategy ubatch_size
        """,
        NOT: """
            _api_process_count _api_process_rank _coord_store_port _data_parallel_master_port_list
            assigned_physical_gpu_ids cpu_distributed_timeout_seconds data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index
            data_parallel_master_ip data_parallel_master_port data_parallel_rank
            data_parallel_rank_local data_parallel_rpc_port data_parallel_size
            data_parallel_size_local disable_nccl_for_dp_synchronization
            distributed_executor_backend distributed_timeout_seconds dp_sync_interval
            elastic_ep_max_dp_size enable_elastic_ep enable_fault_tolerance master_addr master_port
            max_parallel_loading_workers nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes
            placement_group ray_runtime_env ray_workers_use_nsight worker_cls worker_extension_cls
        """,
    },
    "EPLBConfig": {
        ROUNDING: """
            communicator enable_migration_batching log_balancedness log_balancedness_interval
            num_redundant_experts policy step_interval use_async window_size
        """
    },
    "FaultToleranceConfig": {NOT: "engine_recovery_timeout_sec"},
    "SchedulerConfig": {
        ROUNDING: """
            disable_chunked_mm_input enable_chunked_prefill long_prefill_token_threshold
            long_prefill_token_threshold_adaptive max_num_batched_tokens max_num_scheduled_tokens
        """,
        MADE: "disable_hybrid_kv_cache_manager",
        NOT: """
            async_scheduling encoder_cache_size is_multimodal_model max_num_active_seqs
            max_num_encoder_input_tokens max_num_queued_reqs max_num_queued_tokens max_num_seqs
            policy prefill_schedule_interval runner_type scheduler_cls scheduler_reserve_full_isl
            stream_interval watermark
        """,
    },
    "DeviceConfig": {MADE: "device device_type"},
    "LoadConfig": {
        OWN: "ignore_patterns model_loader_extra_config",
        MADE: "download_dir load_format",
        NOT: """
            device pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size
            safetensors_prefetch_num_threads use_tqdm_on_load
        """,
    },
    "OffloadConfig": {PART: "prefetch uva", NOT: "offload_backend"},
    "UVAOffloadConfig": {NOT: "cpu_offload_gb cpu_offload_params"},
    "PrefetchOffloadConfig": {
        NOT: "offload_group_size offload_num_in_group offload_params offload_prefetch_step"
    },
    "AttentionConfig": {
        OWN: """
            disable_flashinfer_q_quantization indexer_kv_dtype use_non_causal
            use_prefill_query_quantization
        """,
        PART: "hisparse_config",
        ROUNDING: """
            backend backend_per_kind flash_attn_max_num_splits_for_cuda_graph flash_attn_version
            flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size
            indexer_sparse_logits indexer_tp_shard_min_rows minimax_m3_indexer_cp
            minimax_m3_msa_decode_backend mla_prefill_backend sparse_mla_force_mqa
            sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv
            tq_max_kv_splits_for_cuda_graph trtllm_ragged_backend use_trtllm_attention
        """,
    },
    "HiSparseConfig": {NOT: "device_buffer_size eager_host_mirror"},
    "AuxOutputConfig": {NOT: "enable_return_routed_experts max_bytes"},
    "EngramConfig": {NOT: "cpu_offload dp_shared_memory embedding_across_dp use_thp"},
    "MambaConfig": {
        OWN: "enable_stochastic_rounding",
        ROUNDING: "backend ssu_algorithm stochastic_rounding_philox_rounds",
    },
    "KernelConfig": {
        PART: "ir_op_priority",
        ROUNDING: """
            enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup
            enable_rocm_segmented_attn_autotune linear_backend linear_backend_per_quant moe_backend
            monokernel sparse_indexer_topk_backend
        """,
    },
    "IrOpPriorityConfig": {ROUNDING: "fused_add_rms_norm gelu_and_mul_sparse rms_norm"},
    "LoRAConfig": {
        OWN: "enable_moe_shared_loras target_modules",
        KEYS: "default_mm_loras enable_tower_connector_lora",
        ROUNDING: "fully_sharded_loras lora_dtype specialize_active_lora",
        NOT: """
            enable_mixed_moe_lora_format max_cpu_loras max_lora_cls_labels max_lora_rank max_loras
        """,
    },
    "SpeculativeConfig": {
        OWN: "kv_cache_dtype quantization",
        MADE: """
            code_revision draft_load_config draft_model_config draft_parallel_config
            draft_tensor_parallel_size max_model_len method model revision target_model_config
            target_parallel_config tensor_parallel_size
        """,
        ROUNDING: "attention_backend enforce_eager moe_backend use_local_argmax_reduction",
        SAMPLED: """
            disable_eagle_block_drop disable_lookahead_block_hashes disable_padded_drafter_batch
            draft_lm_head_quantization draft_sample_method dspark_draft_topk
            enable_adaptive_verification fly_entropy_threshold fly_entropy_top_k fly_window_size
            index_share_for_mtp_iteration num_speculative_tokens
            num_speculative_tokens_per_batch_size parallel_drafting prompt_lookup_max
            prompt_lookup_min rejection_sample_method suffix_decoding_max_cached_requests
            suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth
            suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates
            use_heterogeneous_vocab xpress_topc
        """,
    },
    "WatermarkConfig": {
        SAMPLED: """
            algorithm allow_target_only_watermarking alpha context_width deduplicate_contexts
            deduplicate_contexts_max_history key prf
        """
    },
    "DiffusionConfig": {REFUSED: "canvas_length max_denoising_steps"},
    "StructuredOutputsConfig": {
        SAMPLED: """
            backend disable_additional_properties disable_any_whitespace enable_in_reasoning
            reasoning_parser reasoning_parser_plugin
        """
    },
    "ObservabilityConfig": {
        NOT: """
            collect_detailed_traces cudagraph_metrics custom_histogram_buckets
            enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mfu_metrics
            enable_mm_processor_stats jit_monitor_mode jit_monitor_verbose kv_cache_metrics
            kv_cache_metrics_sample otlp_traces_endpoint per_request_spec_decode_metrics
            show_hidden_metrics_for_version
        """
    },
    "LoggingConfig": {NOT: "configure_logging formatter log_level pylogging_config_file"},
    "CompilationConfig": {
        PART: "dynamic_shapes_config pass_config",
        ROUNDING: """
            backend cache_dir compilation_time compile_cache_save_format compile_mm_encoder
            compile_ranges_endpoints compile_sizes cudagraph_capture_sizes cudagraph_copy_inputs
            cudagraph_decoder_replay cudagraph_mm_encoder cudagraph_mode cudagraph_num_of_warmups
            cudagraph_specialize_lora custom_ops debug_dump_path
            decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
            disabled_custom_ops enabled_custom_ops encoder_compilation_time
            encoder_cudagraph_max_frames_per_batch encoder_cudagraph_max_vision_items_per_batch
            encoder_cudagraph_token_budgets fast_moe_cold_start inductor_compile_config
            inductor_passes ir_enable_torch_wrap local_cache_dir max_cudagraph_capture_size mode
            splitting_ops static_all_moe_layers static_forward_context traced_files
            use_inductor_graph_partition
        """,
    },
    "PassConfig": {
        ROUNDING: """
            eliminate_noops enable_qk_norm_rope_fusion fi_allreduce_fusion_max_size_mb
            fuse_act_padding fuse_act_quant fuse_allreduce_rms fuse_attn_quant
            fuse_mla_dual_rms_norm fuse_norm_quant fuse_qk_norm_rope_kvcache fuse_rope_kvcache
            fuse_rope_kvcache_cat_mla rope_kvcache_fusion_max_token_num
        """
    },
    "DynamicShapesConfig": {ROUNDING: "assume_32_bit_indexing evaluate_guards type"},
    "ProfilerConfig": {
        NOT: """
            active_iterations capture_torch_profiler delay_iterations detailed_trace_annotation
            ignore_frontend max_iterations profiler proton_backend proton_context proton_data
            proton_graph_attribution proton_hook proton_mode proton_output_format
            proton_profiler_dir torch_profiler_activities torch_profiler_dir
            torch_profiler_dump_cuda_time_total torch_profiler_record_shapes
            torch_profiler_use_gzip torch_profiler_with_flops torch_profiler_with_memory
            torch_profiler_with_stack wait_iterations warmup_iterations
        """
    },
    "KVTransferConfig": {
        MADE: "engine_id kv_connector_extra_config",
        NOT: """
            enable_permute_local_kv kv_buffer_device kv_connector kv_connector_module_path
            kv_load_failure_policy kv_port kv_role
        """,
    },
    "KVEventsConfig": {
        NOT: """
            buffer_steps enable_kv_cache_events endpoint hwm max_queue_size publisher
            replay_endpoint topic
        """
    },
    "ECTransferConfig": {
        ENCODED: """
            ec_buffer_device ec_buffer_size ec_connector ec_connector_extra_config
            ec_connector_module_path ec_ip ec_port ec_role engine_id mm_encoder_output_widths
        """
    },
    "EncoderCacheManagerConfig": {ENCODED: "encoder_cache_manager_cls manager_config"},
    "ReasoningConfig": {
        SAMPLED: """
            _enabled _natural_reasoning_end_token_ids _reasoning_end_token_ids
            _reasoning_start_token_ids reasoning_end_str reasoning_parser reasoning_start_str
        """
    },
    "WeightTransferConfig": {NOT: "backend"},
    "WatchdogConfig": {NOT: "check_interval dump_dir timeout"},
}
