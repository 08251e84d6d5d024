"""Pure functions on tensors; every fast one stands beside its obvious reference."""
