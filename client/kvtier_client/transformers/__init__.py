"""Transformers models that run straight on borrowed pages.

    worker = Worker(model, client).start()
    for token in worker.submit(token_ids, Sampling(max_tokens=64)):
        ...

    requests, sampling   what a caller asks for and gets        worker     the loop: continuous batching
    schedule, sequence   what runs next; a sample's pages       errands    what is asked of kvtierd, in threads
    paging               pages, counted and given back          model      a model's layout and namespace
    attention, gather    attention over pages, for Transformers and in plain PyTorch

Needs `kvtier[transformers]`. docs/transformers.md tells how to use it.
"""

from kvtier_client.transformers.model import open_namespace
from kvtier_client.transformers.requests import Request, RequestFailed, Token
from kvtier_client.transformers.sampling import Sampling
from kvtier_client.transformers.worker import Worker

__all__ = ["Request", "RequestFailed", "Sampling", "Token", "Worker", "open_namespace"]
