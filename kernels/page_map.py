"""Where an engine's pages lie: one affine map from (layer, plane, page, head, token, dim) to an address.

    address = bases[layer][plane] + itemsize * (page, head, token, dim) . strides

The strides are one for all layers and planes; the bases are anywhere. So one map says all of these, by letters of their
dimensions: B pages, L layers, P planes (K and V), H heads, T tokens, D dims, and C for K and V of a token side by side:

    packed          one tensor for all layers          "BLHTPD" (the included engine's; a page is a stored block), "LBPTHD", ...
    of_layers       one tensor a layer, K and V in it  "PBTHD" (NHD), "BPHTD" (HND), "BHTC" (vLLM's view), "BTHC", ...
    of_separate     two tensors a layer                "BTHD" (NHD), "BHTD" (HND)
    of_latents      one tensor a layer, one plane      "BTD" (MLA)

The heads, and the layers, are those that this rank has.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch

from kvstore.core.errors import SpecMismatch

_ORDER = "LPBHTD"


class PageStrides(NamedTuple):
    """In numbers, not bytes."""

    page: int
    head: int
    token: int
    dim: int


@dataclass(frozen=True, slots=True)
class PageMap:
    """`views[layer][plane]` is `[num_pages, heads, tokens, dims]`, any strides, all alike. The views keep the engine's memory
    alive; the engine keeps it in place. Raises SpecMismatch for views that one map cannot describe."""

    views: tuple[tuple[torch.Tensor, ...], ...]
    stacked: torch.Tensor | None = field(init=False, compare=False)
    """All views as one, `[layers, planes, num_pages, heads, tokens, dims]`, where layers and planes lie at even distances too."""

    def __post_init__(self) -> None:
        first = self.views[0][0] if self.views and self.views[0] else None
        if first is None:
            raise SpecMismatch("pages: no tensors; give at least one layer", field="pages", value="")
        for layer, planes in enumerate(self.views):
            if len(planes) != self.num_planes or not 1 <= len(planes) <= 2:
                raise _wrong(
                    f"layer {layer} has {len(planes)} planes; use 1 (a latent) or 2 (K and V) in all layers", first
                )
            for plane, view in enumerate(planes):
                if _facts(view) != _facts(first):
                    raise _wrong(
                        f"layer {layer}, plane {plane} is {_described(view)}, the first is {_described(first)}; "
                        "one map wants shape, strides, dtype and device of all alike",
                        view,
                    )
        if first.dim() != 4 or 0 in first.shape:
            raise _wrong(f"{_described(first)} is not [pages, heads, tokens, dims], at least 1 of each", first)
        if _overlaps(first):
            raise _wrong(f"{_described(first)} has several numbers in one place of memory", first)
        object.__setattr__(self, "stacked", _stacked(self.views))

    @classmethod
    def packed(cls, pages: torch.Tensor, dims: str = "BLHTPD") -> Self:
        """One tensor for all layers."""
        return cls(tuple(_planes(layer) for layer in _canonical(pages, dims, "L")))

    @classmethod
    def of_layers(cls, layers: Sequence[torch.Tensor], dims: str) -> Self:
        """One tensor a layer, with K and V in it."""
        return cls(tuple(_planes(_canonical(layer, dims, "")[0]) for layer in layers))

    @classmethod
    def of_separate(cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], dims: str = "BTHD") -> Self:
        """A tensor of keys and one of values for each layer."""
        if len(keys) != len(values):
            raise SpecMismatch(
                f"pages: {len(keys)} tensors of keys, {len(values)} of values; give both for each layer",
                field="pages",
                value=len(values),
            )
        layers = zip(cls.of_layers(keys, dims).views, cls.of_layers(values, dims).views, strict=True)
        return cls(tuple(k + v for k, v in layers))

    @classmethod
    def of_latents(cls, latents: Sequence[torch.Tensor], dims: str = "BTD") -> Self:
        """One latent a token, in one plane and one head (MLA)."""
        return cls.of_layers(latents, dims)

    @property
    def first(self) -> torch.Tensor:
        """`[num_pages, heads, tokens, dims]`: of what all views have alike."""
        return self.views[0][0]

    @property
    def num_layers(self) -> int:
        """Of this rank."""
        return len(self.views)

    @property
    def num_planes(self) -> int:
        """2 for K and V, 1 for a latent."""
        return len(self.views[0])

    @property
    def num_pages(self) -> int:
        """Pages are numbered from 0."""
        return self.first.shape[0]

    @property
    def num_heads(self) -> int:
        """Of this rank."""
        return self.first.shape[1]

    @property
    def block_tokens(self) -> int:
        """Tokens of a page."""
        return self.first.shape[2]

    @property
    def head_dim(self) -> int:
        """Numbers of a token in one head and plane."""
        return self.first.shape[3]

    @property
    def strides(self) -> PageStrides:
        """The same in all layers and planes; 0 where there is one of something."""
        return PageStrides(*_strides(self.first))

    def bases(self) -> list[list[int]]:
        """`[layers][planes]`: the address of number 0 of token 0 of head 0 of page 0, in bytes."""
        return [[view.data_ptr() for view in planes] for planes in self.views]

    def alignment(self) -> int:
        """What divides the address of every row of dims, in bytes, as far as 16."""
        itemsize = self.first.itemsize
        addresses = [address for planes in self.bases() for address in planes]
        return math.gcd(16, *addresses, *(itemsize * stride for stride in self.strides[:3]))


def _canonical(tensor: torch.Tensor, dims: str, required: str) -> torch.Tensor:
    """A view `[L, P, B, H, T, D]`; dimensions that `dims` does not name have size 1."""
    if "C" in dims and "C" not in required and tensor.dim() == len(dims):
        axis = dims.index("C")
        if tensor.shape[axis] % 2:
            raise _wrong(f"{_described(tensor)} has an odd size where {dims!r} says K and V (C)", tensor)
        shape = tensor.shape
        tensor = tensor.view(*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :])
        dims = dims.replace("C", "PD", 1)
    wanted = set("BTD" + required)
    if len(set(dims)) != len(dims) or not wanted <= set(dims) <= set(_ORDER if required else _ORDER[1:]):
        raise SpecMismatch(
            f"dims: {dims!r} does not name dimensions of pages; use each of {'B, T, D' + ''.join(f', {x}' for x in required)} "
            f"once, H and P (or C for PD) if there are any{'' if required else '; no L for one tensor a layer'}",
            field="dims",
            value=dims,
        )
    if tensor.dim() != len(dims):
        raise _wrong(f"{_described(tensor)} has {tensor.dim()} dimensions, {dims!r} names {len(dims)}", tensor)
    missing = [letter for letter in _ORDER if letter not in dims]
    view = tensor.permute(*(dims.index(letter) for letter in _ORDER if letter in dims))
    for letter in missing:
        view = view.unsqueeze(_ORDER.index(letter))
    return view


def _planes(layer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(layer.unbind(0))


def _facts(view: torch.Tensor) -> tuple[object, ...]:
    return (view.shape, _strides(view), view.dtype, view.device)


def _strides(view: torch.Tensor) -> list[int]:
    """torch gives a dimension of size 1 any stride."""
    return [stride if size > 1 else 0 for stride, size in zip(view.stride(), view.shape, strict=True)]


def _described(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype} with strides {list(tensor.stride())} on {tensor.device}"


def _wrong(problem: str, tensor: torch.Tensor) -> SpecMismatch:
    return SpecMismatch(f"pages: {problem}", field="pages", value=str(list(tensor.shape)))


def _overlaps(view: torch.Tensor) -> bool:
    """Whether two indices may have one place: each stride must step over all that smaller ones reach."""
    reach = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False


def _stacked(views: tuple[tuple[torch.Tensor, ...], ...]) -> torch.Tensor | None:
    first = views[0][0]
    bases = [[(view.data_ptr() - first.data_ptr()) // first.itemsize for view in planes] for planes in views]
    of_layer, of_plane = (bases[-1][0] if len(bases) < 2 else bases[1][0]), bases[0][-1]
    even = all(
        base == layer * of_layer + plane * of_plane
        for layer, planes in enumerate(bases)
        for plane, base in enumerate(planes)
    )
    memory = first.untyped_storage().data_ptr()
    in_one = all(view.untyped_storage().data_ptr() == memory for planes in views for view in planes)
    if not (even and in_one and min(of_layer, of_plane) >= 0):
        return None
    return first.as_strided((len(views), len(views[0]), *first.shape), (of_layer, of_plane, *first.stride()))
