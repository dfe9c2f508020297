"""Rows that are split over processes: which engine splits them, and how attention sees whole rows again."""
