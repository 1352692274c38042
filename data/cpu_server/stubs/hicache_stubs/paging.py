"""Page allocation of 0.5.10 with pages of more than one token: its two triton kernels, as plain tensor code.

Later releases carry a fallback of their own. What the kernels compute is integer bookkeeping: the slots that new
tokens get, first in the page that is already open, then in the free pages in their order.
"""

from collections.abc import Callable
from typing import Any

import torch


class Launch:
    """Stands where a kernel stood: ``kernel[grid](*arguments)`` calls the function once."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def allocate_extend(
    before: torch.Tensor,
    after: torch.Tensor,
    last_slot: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    _batch_power_of_two: int,
    page_size: int,
) -> None:
    """Slots for tokens ``before[i]`` to ``after[i]`` of each request, one request after the other, into ``out``.

    With too few free pages ``out`` stays unfilled from there on; the caller sees that itself and drops it.
    """
    filled = taken = 0
    for had, have, last in zip(before.tolist(), after.tolist(), last_slot.tolist(), strict=True):
        first_new_page = -(-had // page_size)
        in_open_page = min(have, first_new_page * page_size) - had
        pages = -(-have // page_size) - first_new_page
        if taken + pages > len(free_pages):
            return
        out[filled : filled + in_open_page] = last + 1 + torch.arange(in_open_page)
        rest = torch.arange(had + in_open_page, have)
        slots = free_pages[taken + rest // page_size - first_new_page] * page_size + rest % page_size
        out[filled + in_open_page : filled + have - had] = slots
        filled, taken = filled + have - had, taken + pages


def allocate_decode(
    after: torch.Tensor,
    last_slot: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    batch_power_of_two: int,
    page_size: int,
) -> None:
    """One more token for each request."""
    allocate_extend(after - 1, after, last_slot, free_pages, out, batch_power_of_two, page_size)
