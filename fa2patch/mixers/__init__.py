"""Layers that carry state along the row outside attention: how it is kept from crossing a document's boundary."""
