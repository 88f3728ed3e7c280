"""Successive refinement: the first bits of every weight first, the others later, exact in the end."""
