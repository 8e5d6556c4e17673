"""Cutting a step into stages: torch in one process; no torch.distributed, no Lightning."""
