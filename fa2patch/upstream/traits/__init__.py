"""Features of models that packed rows touch. One file describes one feature."""
