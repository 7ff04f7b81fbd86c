"""Lists former names of the operator's file; each is refused with its successor or the reason."""

from __future__ import annotations

CONSTANT = "is a constant now; docs/settings.md lists what can be set"
CONSTANTS = """
cgroup_reserve_bytes checked_bytes_per_s_max claimed_bytes_max
cuda_ipc_drain_s cuda_ipc_nodes_max cuda_ipc_open_s
cuda_ipc_window_bytes demote_blocks_max demote_bytes_max embedded_node_bytes_min
event_answer_bytes_max event_answer_taken_s event_answers_max event_backlog_max event_blocks_max
event_connections_max event_messages_waiting_max event_replays_max event_sources_max
events_answer_s events_silent_s expired_at_once_bytes first_answer_wait_s first_node_wait_s
first_question_wait_s gone_keys index_looked_after_every_s index_warned_every_s lookup_links_max
moved_bytes_max names names_kept_max names_looked_up_max names_waiting_max namespaces
nixl_owner_retry_after_max_s nixl_peers_max nixl_quarantined_max pending_remove publish_links_max
redis_args_max replace_tries reservations_per_client reset_timeout_s scrub_keys_max
segments_seen_max shm_reserve_bytes
stream_connections_per_node stream_connections_per_read stream_handshake_timeout_s
stream_idle_timeout_s stream_nodes_at_once stream_reserved_share stream_share_bytes
stream_slow_bytes_per_s stream_unproven_max stream_unproven_per_address_max sweep_every_s told_max
weight_files_max weights_threads weights_timeout_s
"""
REMOVED = {
    **dict.fromkeys(CONSTANTS.split(), CONSTANT),
    "anothers_bytes_max": "is gone: another user's node is read by the stream alone",
    "cuda_batch_copies_max": "is the variable KVSTORE_CUDA_COPIES now: for 1, set it to single",
    "cuda_batch_source_order": "is any-order in the variable KVSTORE_CUDA_COPIES now",
    "cuda_batch_overlap": "is overlap in the variable KVSTORE_CUDA_COPIES now",
    "device_stream_priority": "is low-priority in the variable KVSTORE_CUDA_COPIES now",
    "end_with_last_client": "is an option of kvstore node alone now: --end-with-last-client",
    "hand_over_wait_s": "belongs into [connector] now",
    "inline_bytes": "is a constant now, 32 KiB",
    "page_lock_bytes_max": "belongs into [connector] now",
    "retained_tenant_percent": "is half of retained_percent now; set that",
}
GONE = "connector_limits"
"""A table that was removed; its other names are constants."""
