"""Old names of programs in benchmarks/timeline, for one release."""
