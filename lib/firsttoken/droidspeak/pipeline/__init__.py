"""A sender's cache on its way to the receiver: in which order, over which link, and what is computed meanwhile."""
