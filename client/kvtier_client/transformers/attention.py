"""Attention over pages, as Transformers calls it: an attention function, and cache layers whose `update` writes in pages.

A forward pass runs on a `Batch`: tokens of several sequences, as rows. The cache that the
model is given has a layer for each of its own; `update(k, v)` appends to pages and returns, in the place of keys and
values, a `Layer`: where they lie. The model hands that on to the attention function untouched, which reads the pages.

Two ways of reading and writing stand behind `Batch`: `gather` (any device that PyTorch can address, used on the CPU) and
`launch` (the kernels, by address). Not here: which sequences run (`schedule`), what their pages are (`sequence`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvtier.errors import InvalidRequest, LayoutError
from kvtier.layout import AttentionLayout
from kvtier_client.transformers.chain import Chain

NAME = "kvtier"
"""Of the attention implementation, as in `model.set_attn_implementation`."""


class Options(NamedTuple):
    """What a model's attention asks for, besides queries, keys and values."""

    scale: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens [start, start + count) of a chain, which has pages for them, are rows `row` and on of a forward pass. Those
    that are computed already (borrowed, or shared) are attended from, and not written again."""

    chain: Chain
    start: int
    count: int
    row: int


class Batch(Protocol):
    """The rows of a forward pass, and the pages of the sequences they belong to."""

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write `[rows, kv head, dim]` where these tokens belong; rows of no part go nowhere."""

    def attend(self, layer: int, q: torch.Tensor, options: Options) -> torch.Tensor:
        """Of queries `[rows, head, dim]`, over each one's sequence up to itself; the same shape, finite in rows of no
        part."""


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a batch's pages; what `update` returns in the place of tensors."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: PagedCache, number: int) -> None:
        super().__init__()
        self.cache = cache
        self.number = number
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        layout = self.cache.layout
        want = (key_states.shape[0], layout.kv_heads, key_states.shape[2], layout.head_dim)
        if key_states.shape != want or value_states.shape != want:
            raise LayoutError(
                f"layer {self.number} makes keys {tuple(key_states.shape)} and values {tuple(value_states.shape)}; its "
                f"pages are laid out for {want}: this model cannot run on pages"
            )
        self.cache.batch.append(self.number, _rows(key_states), _rows(value_states))
        return self, self

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 0, 0  # see `mask`

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):  # type: ignore[misc]
    """What a model is given as its cache: for each forward pass, another `batch`."""

    batch: Batch

    def __init__(self, layout: AttentionLayout) -> None:
        self.layout = layout
        super().__init__(layers=[Layer(self, number) for number in range(layout.layers)])

    def over(self, batch: Batch) -> Self:
        """The same, for a pass over `batch`."""
        self.batch = batch
        return self


def attention(
    module: Any,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function. Where keys and values are tensors, because the model is used beside its worker, it is
    PyTorch's own."""
    if not isinstance(key, Layer):
        options = {"scaling": scaling, "dropout": dropout, "softcap": softcap, **others}
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return plain
    if others.get("position_bias") is not None:
        raise InvalidRequest("this model biases its attention by position: it cannot run on pages")
    out = key.cache.batch.attend(key.number, _rows(query), Options(scaling, sliding_window, softcap, s_aux))
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _rows(states: torch.Tensor) -> torch.Tensor:
    """`[batch, head, token, dim]` as `[batch * token, head, dim]`: a view, if there is one sequence or one token each."""
    return states.transpose(1, 2).flatten(0, 1)


def mask(*, kv_length: int, **wanted: Any) -> torch.Tensor | None:
    """None over pages, which hold a sequence's own tokens only: what may be seen follows from where they stand."""
    found: torch.Tensor | None = sdpa_mask(kv_length=kv_length, **wanted) if kv_length else None
    return found


_lent: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()
"""Of models that have this attention: what they had before, once for everybody who asked."""


def lend(model: Any) -> None:
    """Have the model run on pages until `take_back`, as often as it was lent."""
    before = _lent.setdefault(model, [])
    before.append(before[0] if before else model.config._attn_implementation)
    model.set_attn_implementation(NAME)


def take_back(model: Any) -> None:
    """Its own attention again, when the last of those who asked for this one is done."""
    own = _lent[model].pop()
    if not _lent[model]:
        del _lent[model]
        model.set_attn_implementation(own)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
