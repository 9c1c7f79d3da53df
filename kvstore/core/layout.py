"""Where each number of a KV block lies: one affine map from (layer, head, token, plane, dim) to a byte offset.

    block   | layer 0                                     | layer 1 | ... | scales (only when quantised) |
    layer   | head 0                   | head 1 | ... |
    head    | token 0    | token 1 | ... |
    token   | K: dim 0.. | V: dim 0.. |                                     scales: [layer, head, plane]

Layers are outermost, so one layer can be loaded alone; heads come next, so the heads of any tensor-parallel rank are
one contiguous run of each layer; then token with K and V together, as in vLLM's view [blocks, heads, tokens, planes x
dim]: a page that holds all of a block's layers is a stored block byte for byte.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from kvstore.core.errors import SpecMismatch
from kvstore.core.keys import DTYPE_NBYTES, KVSTORE_PAGE_FORMAT, SCALE_NBYTES, KVSpec

_MAX_DIM = 65536
_ITEM_NBYTES = (1, 2, 4)
_SCALE_NBYTES = (0, 2, 4)


class ByteRun(NamedTuple):
    """A contiguous range inside one block."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The shape of one block, checked at construction and never afterwards (indices out of range are our bugs).

    `item_nbytes` is the size of one number, `scale_nbytes` that of one scale of a quantised block (0: there are none).
    """

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    planes: int
    head_dim: int
    item_nbytes: int
    scale_nbytes: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "block_tokens", "planes", "head_dim"):
            value = getattr(self, name)
            high = 2 if name == "planes" else _MAX_DIM
            if not 1 <= value <= high:
                raise SpecMismatch(f"{name}: {value} is out of range; use 1 to {high}", field=name, value=value)
        for name, allowed in (("item_nbytes", _ITEM_NBYTES), ("scale_nbytes", _SCALE_NBYTES)):
            value = getattr(self, name)
            if value not in allowed:
                raise SpecMismatch(f"{name}: {value} is not one of {allowed}", field=name, value=value)
        if self.scale_nbytes and self.data_nbytes % self.scale_nbytes:
            raise SpecMismatch(
                f"scale_nbytes: {self.scale_nbytes}-byte scales cannot start at byte {self.data_nbytes}, unaligned",
                field="scale_nbytes",
                value=self.scale_nbytes,
            )

    @classmethod
    def from_spec(cls, spec: KVSpec) -> Self:
        """The layout of `spec`'s stored blocks. Raises SpecMismatch when they are opaque, so that no layout describes them."""
        if spec.page_format != KVSTORE_PAGE_FORMAT:
            raise SpecMismatch(
                f"page_format: {spec.page_format!r} has no layout, only {KVSTORE_PAGE_FORMAT!r} has",
                field="page_format",
                value=spec.page_format,
            )
        layout = cls(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            block_tokens=spec.block_tokens,
            planes=spec.planes,
            head_dim=spec.head_dim,
            item_nbytes=1 if spec.quantisation else DTYPE_NBYTES[spec.dtype],
            scale_nbytes=SCALE_NBYTES if spec.quantisation else 0,
        )
        assert layout.nbytes == spec.block_nbytes
        return layout

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[layers, heads, tokens, planes, dims]: the block as an array of numbers."""
        return (self.num_layers, self.num_kv_heads, self.block_tokens, self.planes, self.head_dim)

    @property
    def strides_bytes(self) -> tuple[int, int, int, int, int]:
        """Bytes from one layer, head, token, plane, dim to the next."""
        plane = self.head_dim * self.item_nbytes
        token = self.planes * plane
        head = self.block_tokens * token
        return (self.num_kv_heads * head, head, token, plane, self.item_nbytes)

    @property
    def data_nbytes(self) -> int:
        """Bytes of the numbers, where the scales begin."""
        return self.num_layers * self.strides_bytes[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole block, scales included."""
        return self.data_nbytes + self.num_layers * self.num_kv_heads * self.planes * self.scale_nbytes

    def offset(self, *, layer: int, head: int, token: int, plane: int, dim: int) -> int:
        """Byte offset of one number."""
        index = (layer, head, token, plane, dim)
        assert all(0 <= i < n for i, n in zip(index, self.shape, strict=True)), (index, self.shape)
        return sum(i * stride for i, stride in zip(index, self.strides_bytes, strict=True))

    def head_run(self, layer: int, first_head: int, num_heads: int) -> ByteRun:
        """The numbers of `num_heads` neighbouring heads of one layer: what one tensor-parallel rank reads or writes."""
        assert 0 <= layer < self.num_layers, (layer, self.num_layers)
        assert 0 <= first_head < first_head + num_heads <= self.num_kv_heads, (first_head, num_heads, self.num_kv_heads)
        layer_stride, head_stride, *_ = self.strides_bytes
        return ByteRun(layer * layer_stride + first_head * head_stride, num_heads * head_stride)

    def scale_run(self, layer: int, first_head: int, num_heads: int) -> ByteRun:
        """The scales that belong to `head_run` of the same arguments; empty when the block has none."""
        assert 0 <= layer < self.num_layers, (layer, self.num_layers)
        assert 0 <= first_head < first_head + num_heads <= self.num_kv_heads, (first_head, num_heads, self.num_kv_heads)
        head_nbytes = self.planes * self.scale_nbytes
        return ByteRun(
            self.data_nbytes + (layer * self.num_kv_heads + first_head) * head_nbytes, num_heads * head_nbytes
        )
