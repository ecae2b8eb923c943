"""Transformers models that run straight on borrowed pages.

    with Worker(model, client) as worker:                       # a server: continuous batching
        for token in worker.submit(token_ids, Sampling(max_tokens=64)):
            ...

    with GenerationCache(model, client, **inputs) as cache:     # existing code
        model.generate(**inputs, past_key_values=cache)

    requests, sampling   what a caller asks for and gets        worker     the loop: continuous batching
    roster, sequence     who runs and who waits; a sample       schedule   what runs next
    generation           the cache for `generate`
    chain, paging        tokens and their pages; pages counted  errands    what is asked of kvtierd, in threads
    attention, batches   attention over pages, as Transformers calls it; gather in plain PyTorch, launch with kernels
    model                a model's layout and namespace

Needs `kvtier[transformers]`. docs/transformers.md tells how to use it.
"""

from kvtier_client.transformers.generation import GenerationCache
from kvtier_client.transformers.model import open_namespace
from kvtier_client.transformers.requests import Request, RequestFailed, Token
from kvtier_client.transformers.sampling import Sampling
from kvtier_client.transformers.worker import Worker

__all__ = ["GenerationCache", "Request", "RequestFailed", "Sampling", "Token", "Worker", "open_namespace"]
