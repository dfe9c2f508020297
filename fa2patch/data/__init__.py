"""From examples to batches: collators, and what they share. Nothing here knows how a model computes."""
