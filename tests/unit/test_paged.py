"""Pages and their bytes are one memory."""

import numpy as np
import pytest
import torch

from kvstore.core.errors import ConfigError
from kvstore.core.layout import BlockLayout
from kvstore.kernels.paged import allocate_pages, page_bytes, pages_as_bytes

LAYOUT = BlockLayout(num_layers=2, num_kv_heads=3, block_tokens=4, planes=2, head_dim=8, item_nbytes=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_number_lies_where_the_layout_says(dtype):
    pages = allocate_pages(5, LAYOUT, dtype)
    pages[3, 1, 2, 3, 1, 7] = 1.5

    page = page_bytes(pages, 3)

    at = LAYOUT.offset(layer=1, head=2, token=3, plane=1, dim=7)
    assert np.flatnonzero(page).tolist() == [i for i in (at, at + 1) if page[i]]
    assert torch.from_numpy(page[at : at + 2].copy()).view(pages.dtype).item() == 1.5


def test_bytes_copied_into_a_page_are_its_numbers():
    pages = allocate_pages(3, LAYOUT, "float16")
    source = torch.randn(LAYOUT.shape).to(torch.float16)

    np.copyto(page_bytes(pages, 1), source.numpy().view(np.uint8).reshape(-1))

    assert torch.equal(pages[1], source)
    assert not pages[0].any()
    assert not pages[2].any()


def test_the_view_of_all_pages_has_one_row_a_block():
    pages = allocate_pages(3, LAYOUT, "float16")

    view = pages_as_bytes(pages)

    assert view.shape == (3, LAYOUT.nbytes)
    view[2] = 1
    assert pages[2].view(torch.uint8).eq(1).all()


def test_more_pages_than_memory_is_a_config_error():
    with pytest.raises(ConfigError) as caught:
        allocate_pages(1 << 50, LAYOUT, "float16")

    assert caught.value.fields["field"] == "num_pages"
