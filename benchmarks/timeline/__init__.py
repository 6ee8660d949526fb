"""Programs for traces that `onepass trace` has written; what records them is onepass/bench/timeline/."""
