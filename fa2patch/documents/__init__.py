"""Where documents start in a batch. Imports torch and numpy only, and knows nothing of Transformers."""
