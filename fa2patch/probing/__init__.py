"""What can be learnt of a model by running it on example batches, with no knowledge of the patch."""
