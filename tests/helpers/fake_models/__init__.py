"""One tiny modeling file per seam, in the style of remote code. Each runs on every supported Transformers."""
