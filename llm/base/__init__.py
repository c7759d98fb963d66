"""What every other module may import: checks, argument names, CustomOp and its registries, locks, the system."""
