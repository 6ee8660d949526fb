"""Scores to probabilities and back: masks, sinks, scales, the online softmax, and its gradient."""
