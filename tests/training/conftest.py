"""A configuration small enough to train in a second."""

import pytest

TINY = (
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_size=16",
    "model.expert_size=32",
    "model.num_experts=4",
    "data.context_length=64",
    "data.batch_size=4",
    "trainer.max_steps=30",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=10",
    "trainer.limit_val_batches=2",
    "callbacks.checkpoint.every_n_steps=7",
    "evaluate=false",
)


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Overrides of the default run."""
    return TINY
