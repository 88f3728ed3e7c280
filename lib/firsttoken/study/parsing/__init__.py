"""Files that somebody else may have written, or a disk may have spoiled: read within limits, blamed in one line."""
