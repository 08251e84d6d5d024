"""The processes of a run as torch.distributed knows them."""

from __future__ import annotations

from torch import distributed


def leave_group() -> None:
    """Leave the groups of processes at a run's regular end, before the interpreter ends, as torch asks of its users.

    Lightning does so for NCCL alone, and leaves Gloo's to the teardown of the process.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
