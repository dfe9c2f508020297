"""What a release of Transformers changed, read in its sources, and how the repository follows it."""
