"""Programs that do the workloads' jobs; this file keeps scripts/bench/programs.py from being taken for them."""
