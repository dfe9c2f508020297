"""Where documents start in a batch. This package does not depend on Transformers, only on torch and numpy."""
