"""A site of static pages: executed notebooks, an index of them, the claims, and where each figure of a report is."""
