"""Triton kernels over page addresses: what inference workers run on borrowed pages.

Every kernel takes a table of int64 unit addresses, so one launch reads this GPU's memory, a peer's and pinned host
memory alike. Import from the modules; nothing is imported here, so that `kvtier_kernels.addressing` costs no kernels.

    addressing   what an entry of a table is, and how it tells a unit's precision
    decode       attention of the last tokens of each sequence        prefill   of ragged chunks of queries
    mla, mla_prefill    latent attention (DeepSeek)                   merge     of states over disjoint keys
    append       new K and V into units, rotary embedding fused       quantise  units between precisions
    copy         scattered pieces, and units from and to an engine's own cache
    reference    what all of these compute, in plain PyTorch and float64
    tuning, tune, warmup, variants, compiling, measure    how they are compiled, chosen and timed
    tiles, widening, plan, codec, checks    what they share

docs/kernels.md tells how they work and how fast they are.
"""
