"""A start that borrows from a warm neighbour the layers that have not come, and takes them over one by one."""
