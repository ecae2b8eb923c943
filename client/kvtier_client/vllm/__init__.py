"""kvtier's KV connector for vLLM 0.26 to 0.33, out of tree.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier_client.vllm", "kv_role": "kv_both"}'

See docs/vllm.md.
"""
