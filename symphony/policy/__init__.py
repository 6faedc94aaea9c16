"""Replay of traces: which policy of the tiers would have served a workload best. `symphony policy replay`."""
