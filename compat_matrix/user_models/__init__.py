"""A user's own models and pins: their config.json cut down to tiny models, and a matrix of them."""
