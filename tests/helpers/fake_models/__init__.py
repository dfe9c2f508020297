"""One tiny modeling file per seam, in the style of remote code, each running on every supported Transformers."""
