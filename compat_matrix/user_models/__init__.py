"""The matrix of a user's own models and pins: tiny models are made from each config.json and checked."""
