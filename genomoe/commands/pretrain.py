"""`genomoe pretrain`: train, then report on the held-out contigs."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from genomoe.training.compose import compose_config
from genomoe.wording import counted

if TYPE_CHECKING:
    from genomoe.training.run import RunResult


def run(overrides: Sequence[str], *, show_config: bool = False) -> None:
    """Compose pretrain.yaml with `overrides`, train, evaluate and draw the loss curve."""
    config = compose_config("pretrain", overrides)
    if show_config:
        sys.stdout.write(OmegaConf.to_yaml(config))
        return
    # Loading Lightning takes seconds: a mistake in the configuration is told before.
    from genomoe.parallel.group import leave_group
    from genomoe.training.run import pretrain

    started = time.perf_counter()
    result = pretrain(config)
    leave_group()
    if not result.is_global_zero:
        return
    if config.evaluate and not result.held_out:
        print("nothing is held out (data.val is empty), so there is no report", file=sys.stderr)
    elif config.evaluate:
        from genomoe.commands.evaluate import print_table, report_on

        print_table(report_on(result.run.path, stride=None, device=config.trainer.accelerator))
    print(_closing_line(result, time.perf_counter() - started))


def _closing_line(result: "RunResult", seconds: float) -> str:
    return f"{counted(result.steps, 'step')}, {seconds:.0f} s in all; the model is in {result.run.model}"
