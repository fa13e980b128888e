"""Paged inputs for the QSA tests: requests of uneven length on scattered pages."""

from dataclasses import dataclass

import torch


@dataclass
class Batch:
    """``lengths`` tokens of context per request, the last ``queries`` of them new."""

    lengths: list[int]
    queries: list[int]
    page_size: int
    ratio: int = 4

    def __post_init__(self) -> None:
        per_request = -(-max(self.lengths) // self.page_size) + 1
        count = len(self.lengths)
        # Page 0 is the null page; the rest are dealt out in a random order.
        pages = torch.randperm(count * per_request) + 1
        self.block_table = pages.view(count, per_request).int()
        self.num_pages = count * per_request + 1
        self.query_start_loc = torch.tensor([0, *self.queries]).cumsum(0).int()
        spans = [range(n - q, n) for n, q in zip(self.lengths, self.queries)]
        self.positions = torch.tensor([p for span in spans for p in span])
        self.token_to_req = torch.repeat_interleave(torch.arange(count), torch.tensor(self.queries)).int()
        self.visible = ((self.positions + 1) // self.ratio).int()

    def slot(self, request: int, row: int, page_size: int) -> int:
        page = int(self.block_table[request, row // page_size])
        return page * page_size + row % page_size

    def compressed_slots(self, page_size: int) -> torch.Tensor:
        """Slot of the group that a row completes, -1 on other rows."""
        return torch.tensor(
            [
                self.slot(int(r), int(p) // self.ratio, page_size) if (int(p) + 1) % self.ratio == 0 else -1
                for r, p in zip(self.token_to_req, self.positions)
            ]
        )


def nan_pages(pages: int, page_size: int, heads: int, width: int) -> torch.Tensor:
    """An allocation that nothing has written to yet."""
    return torch.full((pages, page_size, heads, width), torch.nan).bfloat16()


class CudaLooking(torch.Tensor):
    """Passes the launchers' check for a CUDA tensor, so that they can be interpreted."""

    is_cuda = True

    __torch_function__ = torch._C._disabled_torch_function_impl
