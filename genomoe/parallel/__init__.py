"""Training divided over several devices."""
